"""CIFAR-10 and the examples of ImageNet from a folder that tensorflow-datasets prepared, in either of its formats.

Nothing is ever downloaded, and TensorFlow is not needed: ``array_record`` shards are read through ``as_data_source``, ``tfrecord``
shards (the default when preparing) by :mod:`experiments.data.tfrecord`.
"""

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data.dataset import Dataset, Split
from experiments.data.tfrecord import TFRecords

Example = Mapping[str, Any]

# the usual constants for CIFAR-10's training split, on a scale of 0..1
_CIFAR10_MEAN, _CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_MANUAL = {"imagenet2012": "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar"}  # what the user has to fetch himself


def default_folder() -> Path:
    """Where tensorflow-datasets prepares unless told otherwise: $TFDS_DATA_DIR or ~/tensorflow_datasets."""
    return Path(os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")).expanduser()


def find_prepared(name: str, data_dir: Path | None = None) -> Path:
    """The folder ``data_dir/name/VERSION`` of the newest prepared version; ``data_dir`` may also be that folder itself.

    Raises:
        FileNotFoundError: at once, without asking the network; says how to prepare the dataset.
    """
    folder = default_folder() if data_dir is None else data_dir
    if (folder / "dataset_info.json").is_file():
        return folder
    infos = [*folder.glob(f"{name}/*/dataset_info.json"), *folder.glob("*/dataset_info.json")]
    versions = [info.parent for info in infos if re.fullmatch(r"\d+\.\d+\.\d+", info.parent.name)]
    if not versions:
        raise FileNotFoundError(_not_prepared(name, folder))
    return max(versions, key=lambda path: tuple(map(int, path.name.split("."))))


def _not_prepared(name: str, folder: Path) -> str:
    first = f"put {_MANUAL[name]} into {folder}/downloads/manual and " if name in _MANUAL else ""
    return (
        f"{name} is not prepared in {folder}, and nothing is downloaded from here. On a machine of your own with tensorflow and "
        f"tensorflow-datasets, {first}run\n"
        f"    tfds build {name} --data_dir={folder} --file_format=array_record\n"
        f"or in Python tfds.builder({name!r}, data_dir={str(folder)!r}, file_format='array_record').download_and_prepare(); "
        "file_format tfrecord works too. Then name that folder as data_dir."
    )


def open_builder(name: str, data_dir: Path | None = None) -> Any:
    """The read-only builder of a prepared dataset.

    Raises:
        FileNotFoundError: if it is not prepared, see :func:`find_prepared`.
        ValueError: if the folder holds another dataset.
    """
    import tensorflow_datasets as tfds

    folder = find_prepared(name, data_dir)
    builder = tfds.builder_from_directory(folder)
    if builder.name != name:
        raise ValueError(f"{folder} holds the dataset {builder.name!r}, not {name!r}")
    return builder


@dataclass(frozen=True, eq=False)
class TFRecordExamples(Sequence[Example]):
    """Deserialised examples over TFRecord shards, with random access.

    Attributes:
        records: serialised examples.
        features: of the dataset, a tfds FeaturesDict.
        decoders: as in ``as_data_source``.
    """

    records: TFRecords
    features: Any
    decoders: Any = None

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # integers only
        return self.features.deserialize_example_np(self.records[index], decoders=self.decoders)


def examples(builder: Any, split: str, encoded_images: bool = False) -> Sequence[Example]:
    """The examples of a split with random access, whichever format they are stored in.

    Args:
        builder: from :func:`open_builder`.
        split: such as "train".
        encoded_images: leave "image" as the bytes of its JPEG or PNG file instead of uint8 ``[H, W, C]``.

    Raises:
        ValueError: for an unknown split or format, or naming a shard that is truncated.
        FileNotFoundError: naming a shard that is missing.
    """
    import tensorflow_datasets as tfds

    splits, file_format = builder.info.splits, builder.info.file_format.value
    if split not in splits:
        raise ValueError(f"{builder.info.data_dir} has no split {split!r}, only {', '.join(splits)}")
    decoders = {"image": tfds.decode.SkipDecoding()} if encoded_images else None
    paths, lengths = [Path(path) for path in splits[split].filepaths], splits[split].shard_lengths
    if file_format == "tfrecord":
        return TFRecordExamples(TFRecords.open(paths, lengths), builder.info.features, decoders)
    if file_format == "array_record":
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(_check_array_record, paths, lengths))
        return builder.as_data_source(split=split, decoders=decoders)
    raise ValueError(f"{builder.info.data_dir} is stored as {file_format}: only array_record and tfrecord can be read")


def _check_array_record(path: Path, num_records: int) -> None:
    """Refuse a missing or damaged shard now and by name, not somewhere in the first epoch."""
    from array_record.python.array_record_module import ArrayRecordReader

    if not path.is_file():
        raise FileNotFoundError(f"the shard {path} is missing")
    try:
        reader = ArrayRecordReader(str(path))
        have = reader.num_records()
        reader.close()  # raises again if it has failed before
    except RuntimeError as error:
        raise ValueError(f"{path}: truncated or damaged: {error}") from error
    if have != num_records:
        raise ValueError(f"{path}: {have} records, but dataset_info.json says {num_records}")


def split_from_examples(source: Sequence[Example], image_shape: tuple[int, int, int]) -> Split:
    """Read all examples into memory.

    Args:
        source: examples with "image", uint8 of ``image_shape``, and "label".
        image_shape: (H, W, C).

    Raises:
        ValueError: naming the index of an image with another shape.
    """
    images, labels = np.empty((len(source), *image_shape), np.uint8), np.empty(len(source), np.int32)
    for i in range(len(source)):
        example = source[i]
        if example["image"].shape != image_shape:
            raise ValueError(f"example {i}: the image has shape {example['image'].shape}, not {image_shape}")
        images[i], labels[i] = example["image"], example["label"]
    return Split(images, labels)


def cifar10_from_splits(train: Split, test: Split) -> Dataset:
    """CIFAR-10 from its two splits; trains with random crops and flips."""
    return Dataset(
        name="cifar10",
        train=train,
        test=test,
        num_classes=10,
        image_shape=(32, 32, 3),
        mean=tuple(255 * value for value in _CIFAR10_MEAN),
        std=tuple(255 * value for value in _CIFAR10_STD),
        augmentation="crop_flip",
        description=f"CIFAR-10: {len(train):,} training and {len(test):,} test images of 32x32 pixels",
    )


def load_cifar10(data_dir: Path | None = None) -> Dataset:
    """CIFAR-10 from the user's own prepared folder, read into memory.

    Args:
        data_dir: tensorflow-datasets folder; by default $TFDS_DATA_DIR or ~/tensorflow_datasets.

    Raises:
        FileNotFoundError: if it is not prepared (says how to), or naming a missing shard.
        ValueError: naming a damaged shard.
    """
    builder = open_builder("cifar10", data_dir)
    train, test = (split_from_examples(examples(builder, split), (32, 32, 3)) for split in ("train", "test"))
    return cifar10_from_splits(train, test)
