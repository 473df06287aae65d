"""The face that the training loop needs from data, and the dataset that fits in memory.

Letters: n examples, B rows of a batch, H, W and C of an image. Images stay uint8 until they are on the device.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from experiments.data.order import check_stream, step_indices, steps_per_epoch

Batch = tuple[np.ndarray, np.ndarray]
EvalBatch = tuple[np.ndarray, np.ndarray, np.ndarray]
Rows = np.ndarray | slice


class DatasetLike(Protocol):
    """What :func:`experiments.data.load` returns."""

    @property
    def name(self) -> str:
        """What the data is called."""

    @property
    def description(self) -> str:
        """One line: origin and size."""

    @property
    def num_classes(self) -> int:
        """Labels lie in ``[0, num_classes)``."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C)."""

    @property
    def image_dtype(self) -> np.dtype:
        """Of the images of a batch, before augmentation."""

    @property
    def mean(self) -> tuple[float, ...]:
        """Of each channel, in units of the stored pixels."""

    @property
    def std(self) -> tuple[float, ...]:
        """Of each channel, in units of the stored pixels."""

    @property
    def augmentation(self) -> str:
        """A name that :func:`experiments.data.augment.make_augment` knows."""

    def steps_per_epoch(self, batch_size: int) -> int:
        """Whole batches of ``batch_size`` rows in the training split."""

    def batches(
        self, batch_size: int, seed: int, start_step: int = 0, rows: np.ndarray | None = None
    ) -> Iterator[Batch]:
        """Training steps for ever: (images uint8 [B, H, W, C], labels int32 [B]); step k depends on (seed, k) alone.

        With ``rows``, only those of each batch, which are the same as in the whole batch.
        """

    def eval_batches(self, batch_size: int, rows: np.ndarray | None = None) -> Iterator[EvalBatch]:
        """The test split once: (images, labels, valid bool [B]); the last batch is padded with rows that are not valid."""


def check_labels(labels: np.ndarray, num_classes: int, where: str, indices: np.ndarray | None = None) -> None:
    """Raise ValueError for the first label outside ``[0, num_classes)``.

    Args:
        labels: integers ``[n]``.
        num_classes: the range.
        where: what the error calls the labels, such as "train split".
        indices: the examples the labels belong to, by default 0..n-1.
    """
    bad = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if bad.size:
        index = bad[0] if indices is None else indices[bad[0]]
        raise ValueError(f"{where}: example {index} has label {labels[bad[0]]}, outside the range [0, {num_classes})")


def every_row(rows: np.ndarray | None) -> Rows:
    """``rows`` as an index: without them, of all rows."""
    return slice(None) if rows is None else rows


def pad_rows(array: np.ndarray, rows: int) -> np.ndarray:
    """``array`` with zeros appended along its first axis up to ``rows``."""
    return np.pad(array, [(0, rows - len(array))] + [(0, 0)] * (array.ndim - 1))


def padded(images: np.ndarray, labels: np.ndarray, batch_size: int) -> EvalBatch:
    """(images, labels, valid), all with ``batch_size`` rows; added rows are zero and not valid."""
    valid = np.arange(batch_size) < len(labels)
    return pad_rows(images, batch_size), pad_rows(labels, batch_size), valid


@dataclass(frozen=True, eq=False)
class Split:
    """Examples in memory.

    Attributes:
        images: uint8 ``[n, H, W, C]``.
        labels: int32 ``[n]``.

    Raises:
        ValueError: for another dtype or shape, or if the counts differ.
    """

    images: np.ndarray
    labels: np.ndarray

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4:
            raise ValueError(f"images must be uint8 [n, H, W, C], not {self.images.dtype} {list(self.images.shape)}")
        if self.labels.dtype != np.int32 or self.labels.ndim != 1:
            raise ValueError(f"labels must be int32 [n], not {self.labels.dtype} {list(self.labels.shape)}")
        if len(self.images) != len(self.labels):
            raise ValueError(f"{len(self.images)} images but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)


def channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, in units of the stored pixels.

    A channel without any variation gets standard deviation 1, so that it can be divided by.

    Args:
        images: uint8 ``[n, H, W, C]``, n >= 1.
    """
    counts = np.zeros((images.shape[-1], 256), np.int64)
    for start in range(0, len(images), 1024):  # bincount makes int64 copies: keep them small
        for channel in range(images.shape[-1]):
            pixels = images[start : start + 1024, ..., channel].ravel()
            counts[channel] += np.bincount(pixels, minlength=256)
    weights, levels = counts / counts.sum(axis=1, keepdims=True), np.arange(256)
    mean = weights @ levels
    std = np.sqrt((weights * (levels - mean[:, None]) ** 2).sum(axis=1))
    return tuple(mean.tolist()), tuple((value or 1.0) for value in std.tolist())


@dataclass(frozen=True, eq=False)
class Dataset:
    """A labelled image dataset in memory.

    Attributes:
        name: what it is called.
        train: training split.
        test: what is evaluated on.
        num_classes: labels lie in ``[0, num_classes)``.
        image_shape: (H, W, C).
        mean: of each channel, in units of the stored pixels (0..255, or 0..16 for digits).
        std: likewise.
        augmentation: "none" or "crop_flip", see :mod:`experiments.data.augment`.
        description: one line: origin and size.

    Raises:
        ValueError: for a label outside the range or images of another shape.

    >>> split = Split(np.zeros((5, 2, 2, 1), np.uint8), np.arange(5, dtype=np.int32))
    >>> data = Dataset("tiny", split, split, 5, (2, 2, 1), (0.0,), (1.0,), "none", "five black images")
    >>> images, labels = next(data.batches(batch_size=2, seed=0))
    >>> images.shape, labels.shape, data.steps_per_epoch(2)
    ((2, 2, 2, 1), (2,), 2)
    >>> [valid.tolist() for _, _, valid in data.eval_batches(3)]
    [[True, True, True], [True, True, False]]
    """

    name: str
    train: Split
    test: Split
    num_classes: int
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmentation: str
    description: str

    def __post_init__(self) -> None:
        for kind, split in (("train", self.train), ("test", self.test)):
            where = f"{self.name}, {kind} split"
            check_labels(split.labels, self.num_classes, where)
            if split.images.shape[1:] != self.image_shape:
                raise ValueError(f"{where}: images are {split.images.shape[1:]}, not {self.image_shape}")
        channels = self.image_shape[-1]
        if not len(self.mean) == len(self.std) == channels:
            raise ValueError(
                f"{self.name}: {channels} channels need as many means {self.mean} and deviations {self.std}"
            )

    @property
    def image_dtype(self) -> np.dtype:
        """Of the images of a batch."""
        return np.dtype(np.uint8)

    def steps_per_epoch(self, batch_size: int) -> int:
        """Whole batches in the training split; ValueError if it has fewer examples than ``batch_size``."""
        return steps_per_epoch(len(self.train), batch_size)

    def batches(
        self, batch_size: int, seed: int, start_step: int = 0, rows: np.ndarray | None = None
    ) -> Iterator[Batch]:
        """Training steps for ever, from ``start_step`` on; step k depends on (seed, k) alone.

        Args:
            batch_size: B.
            seed: of the order, at least 0.
            start_step: the first step to yield; to resume after m steps, pass m.
            rows: which rows of each batch to yield, by default all.

        Yields:
            (images uint8 ``[B, H, W, C]``, labels int32 ``[B]``)

        Raises:
            ValueError: at the call, if ``batch_size`` exceeds the training split or an argument is negative.
        """
        check_stream(len(self.train), batch_size, seed, start_step)
        return self._stream(batch_size, seed, start_step, every_row(rows))

    def _stream(self, batch_size: int, seed: int, step: int, rows: Rows) -> Iterator[Batch]:
        while True:
            chosen = step_indices(len(self.train), batch_size, seed, step)[rows]
            yield self.train.images[chosen], self.train.labels[chosen]
            step += 1

    def eval_batches(self, batch_size: int, rows: np.ndarray | None = None) -> Iterator[EvalBatch]:
        """The test split once, in order; the last batch is padded. With ``rows``, only those of each batch.

        Yields:
            (images uint8 ``[B, H, W, C]``, labels int32 ``[B]``, valid bool ``[B]``)

        Raises:
            ValueError: at the call, if ``batch_size`` is below 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: at least 1 is needed")
        starts = range(0, len(self.test), batch_size)
        slices, own = (slice(start, start + batch_size) for start in starts), every_row(rows)
        whole = (padded(self.test.images[span], self.test.labels[span], batch_size) for span in slices)
        return ((images[own], labels[own], valid[own]) for images, labels, valid in whole)
