"""What a study ends in when something breaks, and that it goes on once that is repaired."""

import dataclasses
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import accuracy, training
from experiments.running import run_all
from experiments.training import prepare
from tests.experiments.studies import STEPS, config, losses, study


class Poisoned:
    """The data, but for the micro-batch of worker 1 at step 5."""

    def __init__(self, data: Any, poison: Callable[[np.ndarray, np.ndarray], None]):
        self._data, self._poison = data, poison

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def batches(self, size: int, seed: int, start_step: int = 0, **options: Any) -> Iterator[Any]:
        for step, (x, y) in enumerate(self._data.batches(size, seed, start_step, **options), start_step):
            x, y = x.astype(np.float32), y.copy()
            if step == 5:
                self._poison(x[size // 3 : 2 * size // 3], y[size // 3 : 2 * size // 3])
            yield x, y


def poisoned(poison: Callable[[np.ndarray, np.ndarray], None], folder: Path, **options: Any) -> training.Study:
    mine = study(folder, **options)
    return dataclasses.replace(mine, data=Poisoned(mine.data, poison))


@pytest.fixture(scope="module")
def unpoisoned(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpoisoned")
    run_all(poisoned(nothing, folder))
    return folder


def blank(images: np.ndarray, labels: np.ndarray) -> None:
    images[:] = np.nan


def nothing(images: np.ndarray, labels: np.ndarray) -> None:
    pass


def test_nan_in_one_micro_batch(unpoisoned, tmp_path):
    with pytest.raises(FloatingPointError, match=r"the loss of worker 1 at step 5 is nan \(rule cdp-v2, seed 0\)"):
        run_all(poisoned(blank, tmp_path, save_every=1))
    run_all(poisoned(nothing, tmp_path, resume=True))  # the last checkpoint is one from before
    assert losses(tmp_path) == losses(unpoisoned)


@jax.custom_vjp
def stings(x: jax.Array, bad: jax.Array) -> jax.Array:
    """The identity, with a gradient that is not a number where ``bad``."""
    return x


stings.defvjp(lambda x, bad: (x, bad), lambda bad, g: (jnp.where(bad, jnp.nan, g), None))


def test_a_gradient_that_is_not_finite_is_never_saved(tmp_path, monkeypatch):
    """Its loss is; the parameters are looked at before they are saved."""

    def marked(images: np.ndarray, labels: np.ndarray) -> None:
        labels[0] = -1

    real = training.cross_entropy
    monkeypatch.setattr(training, "cross_entropy", lambda y, labels: real(stings(y, (labels < 0).any()), abs(labels)))
    message = r"the parameters of stage 0, 1, 2 are not finite after step 5, though every loss was.*rule cdp-v2, seed 0"
    mine = prepare(config(tmp_path, save_every=1))
    mine = dataclasses.replace(mine, data=Poisoned(mine.data, marked))
    with pytest.raises(FloatingPointError, match=message):
        run_all(mine)
    assert sorted(path.name for path in (tmp_path / "checkpoints/cdp-v2-seed0").iterdir()) == ["4", "5"]
    with pytest.raises(FloatingPointError, match=r"the loss of worker \d at step 6 is nan"):
        run_all(dataclasses.replace(mine, config=config(tmp_path / "b", save_every=8)))


# the storage library's threads report to an event loop that its failure has closed
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk(alone, tmp_path, at_step, monkeypatch, capsys):
    """No file may grow beyond 8 KB: the losses fit, a checkpoint does not."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    at_step(4, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, most)))
    try:
        with pytest.raises(OSError, match=r"could not be written to .*; the last complete one is of step \d+"):
            run_all(study(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert len(losses(tmp_path)) < STEPS
    monkeypatch.undo()
    run_all(study(tmp_path, resume=True))
    assert losses(tmp_path) == losses(alone)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_checkpoint_is_named_and_the_older_one_can_be_used(interrupted, alone, tmp_path):
    shutil.copytree(interrupted, tmp_path, dirs_exist_ok=True)
    (newest,) = (tmp_path / "checkpoints/cdp-v2-seed0").glob("5")
    for path in newest.glob("state/**/d/*"):
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=f"checkpoint {newest} is damaged: .*; delete it to go on from step 4"):
        run_all(study(tmp_path, resume=True))
    shutil.rmtree(newest)
    run_all(study(tmp_path, resume=True))
    assert losses(tmp_path) == losses(alone)


def test_data_that_is_damaged_while_training(unpoisoned, tmp_path):
    """A shard that was cut short after it was opened, say; once it is repaired, the run goes on."""

    def cut(images: np.ndarray, labels: np.ndarray) -> None:
        raise ValueError("cifar10-train.tfrecord-00000-of-00001: truncated since it was opened, in record 7")

    with pytest.raises(ValueError, match="truncated since it was opened, in record 7"):
        run_all(poisoned(cut, tmp_path))
    run_all(poisoned(nothing, tmp_path, resume=True))
    assert losses(tmp_path) == losses(unpoisoned)


def test_missing_files_end_the_program_with_one_line(tmp_path):
    options = ["--dataset=fashion_mnist", f"--data-dir={tmp_path}", f"--devices={jax.device_count()}"]
    with pytest.raises(SystemExit, match=f"error: .*{tmp_path}"):
        accuracy.main([*options, f"--out={tmp_path}/out"])
