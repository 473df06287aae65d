"""Data for the experiments: one function, :func:`load`.

Nothing is downloaded. ``digits`` is embedded; ``fashion_mnist``, ``cifar10`` and ``imagenet2012`` are read from the user's own
copies; ``synthetic`` is a stand-in and not real data. Those are labelled images; text is in :mod:`experiments.data.text`.
"""

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.data.dataset import Dataset, DatasetLike, Split
from experiments.data.digits import load_digits
from experiments.data.idx import load_fashion_mnist
from experiments.data.imagenet import ImageNet, load_imagenet
from experiments.data.synthetic import load_synthetic
from experiments.data.tfds_source import load_cifar10

__all__ = ["DATASETS", "Dataset", "DatasetLike", "ImageNet", "Split", "load"]

DATASETS: dict[str, Callable[..., DatasetLike]] = {
    "digits": load_digits,
    "fashion_mnist": load_fashion_mnist,
    "cifar10": load_cifar10,
    "imagenet2012": load_imagenet,
    "synthetic": load_synthetic,
}


def load(name: str = "digits", data_dir: str | Path | None = None, seed: int = 0, **options: Any) -> DatasetLike:
    """The dataset of that name.

    Args:
        name: a key of ``DATASETS``.
        data_dir: where the user's copy is: IDX files for fashion_mnist, the tensorflow-datasets folder for cifar10 and
            imagenet2012; without it the usual places are searched. digits and synthetic have none.
        seed: of the content of synthetic; the others do not depend on it. The order of the data has a seed of its own, in
            ``batches``.
        **options: imagenet2012: ``image_size``, ``worker_count``; synthetic: ``shape``, ``classes``, ``size``, ``test_size``.

    Raises:
        ValueError: for an unknown name (with the nearest known one), an option or ``data_dir`` the dataset does not take, a
            label out of range, or a damaged file.
        FileNotFoundError: if the user's copy is not found; says how to get it.

    >>> data = load("digits")
    >>> len(data.train), len(data.test), data.image_shape
    (1437, 360, (8, 8, 1))
    """
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown dataset {name!r}: did you mean {near!r}? Known: {', '.join(DATASETS)}")
    accepted = set(inspect.signature(DATASETS[name]).parameters)
    unknown = sorted(set(options) - accepted)
    if unknown:
        known = ", ".join(sorted(accepted - {"data_dir", "seed"})) or "none"
        raise ValueError(f"dataset {name!r} has no option {unknown[0]!r}; its options: {known}")
    if data_dir is not None:
        if "data_dir" not in accepted:
            raise ValueError(
                f"dataset {name!r} reads no files of yours: data_dir={str(data_dir)!r} would have no effect"
            )
        options["data_dir"] = Path(data_dir).expanduser()
    if "seed" in accepted:
        options["seed"] = seed
    return DATASETS[name](**options)
