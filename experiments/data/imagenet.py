"""ImageNet from the user's own prepared folder, decoded and cropped by grain workers.

A batch is a pure function of (seed, step): the workers only compute batches ahead, so neither their number nor a resumed run
changes the data. Letters: B rows of a batch, ``size`` = H = W of the crops.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data.crops import eval_crop, to_pil, train_crop
from experiments.data.dataset import Batch, EvalBatch, check_labels, padded
from experiments.data.order import check_stream, step_indices, steps_per_epoch
from experiments.data.tfds_source import Example, examples, open_builder

# the usual constants of ImageNet's training split, on a scale of 0..1
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_ENDLESS = 2**40  # training steps


@dataclass(frozen=True, eq=False)
class TrainSteps:
    """Element k is the batch of training step ``start + k``, or those of its rows that ``rows`` names."""

    source: Sequence[Example]
    num_classes: int
    size: int
    batch_size: int
    seed: int
    start: int
    rows: np.ndarray

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> Batch:
        step = self.start + int(index)
        chosen = step_indices(len(self.source), self.batch_size, self.seed, step)[self.rows]
        images = np.empty((len(chosen), self.size, self.size, 3), np.uint8)
        labels = np.empty(len(chosen), np.int32)
        for i, (row, index) in enumerate(zip(self.rows.tolist(), chosen.tolist(), strict=True)):
            example = self.source[index]
            rng = np.random.default_rng((self.seed, step, row))
            images[i], labels[i] = train_crop(rng, to_pil(example["image"]), self.size), example["label"]
        check_labels(labels, self.num_classes, "imagenet2012, train split", chosen)
        return images, labels


@dataclass(frozen=True, eq=False)
class EvalSteps:
    """Element k is the k-th batch of the test split, the last one padded; or those of its rows that ``rows`` names."""

    source: Sequence[Example]
    num_classes: int
    size: int
    batch_size: int
    rows: np.ndarray

    def __len__(self) -> int:
        return -(-len(self.source) // self.batch_size)

    def __getitem__(self, index: int) -> EvalBatch:
        chosen = int(index) * self.batch_size + self.rows
        chosen = chosen[chosen < len(self.source)]  # ascending, so that what lacks is at the end
        read = [self.source[row] for row in chosen.tolist()]
        crops = [eval_crop(to_pil(example["image"]), self.size) for example in read]
        images = np.array(crops, np.uint8).reshape(-1, self.size, self.size, 3)
        labels = np.array([example["label"] for example in read], np.int32)
        check_labels(labels, self.num_classes, "imagenet2012, test split", chosen)
        return padded(images, labels, len(self.rows))


def in_workers(steps: Any, worker_count: int) -> Iterator[Any]:
    """The elements of ``steps`` in order, computed ahead by grain workers, which end with the iterator.

    Args:
        steps: a sequence that can be pickled.
        worker_count: processes; with 0, threads of this process.
    """
    import absl.flags
    import grain

    if not absl.flags.FLAGS.is_parsed():  # grain reads its options there, also when absl did not start the program
        absl.flags.FLAGS.mark_as_parsed()
    read = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)  # whole batches: more would need much memory
    dataset = grain.MapDataset.source(steps).to_iter_dataset(read)
    iterator = iter(dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=worker_count)))
    try:
        yield from iterator
    finally:
        iterator.close()


@dataclass(frozen=True, eq=False)
class ImageNet:
    """ImageNet with the face of :class:`experiments.data.dataset.DatasetLike`; its test split is the validation split.

    Attributes:
        train: examples with "image" (file bytes or uint8 ``[H, W, 3]``) and "label", random access; pickled for the workers.
        test: likewise.
        image_size: H and W of the crops, pixels.
        worker_count: grain worker processes; 0 for none.
        num_classes: labels lie in ``[0, num_classes)``, checked as batches are read.

    Raises:
        ValueError: for a negative ``worker_count`` or an ``image_size`` below 1.
    """

    train: Sequence[Example]
    test: Sequence[Example]
    image_size: int = 224
    worker_count: int = 0
    num_classes: int = 1000
    name: str = "imagenet2012"
    augmentation: str = "random_resized_crop"

    def __post_init__(self) -> None:
        if self.image_size < 1 or self.worker_count < 0:
            raise ValueError(
                f"image_size={self.image_size} must be positive and worker_count={self.worker_count} not negative"
            )

    @property
    def description(self) -> str:
        """One line: origin and size."""
        counts = f"{len(self.train):,} training and {len(self.test):,} validation images"
        return f"ImageNet (ILSVRC 2012): {counts}, cropped to {self.image_size}x{self.image_size} pixels"

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C) of a crop."""
        return self.image_size, self.image_size, 3

    @property
    def image_dtype(self) -> np.dtype:
        """Of the images of a batch."""
        return np.dtype(np.uint8)

    @property
    def mean(self) -> tuple[float, ...]:
        """Of each channel, in pixel units 0..255."""
        return tuple(255 * value for value in _MEAN)

    @property
    def std(self) -> tuple[float, ...]:
        """Of each channel, in pixel units 0..255."""
        return tuple(255 * value for value in _STD)

    def steps_per_epoch(self, batch_size: int) -> int:
        """Whole batches in the training split; ValueError if it has fewer examples than ``batch_size``."""
        return steps_per_epoch(len(self.train), batch_size)

    def batches(
        self, batch_size: int, seed: int, start_step: int = 0, rows: np.ndarray | None = None
    ) -> Iterator[Batch]:
        """Random resized crops, training steps for ever from ``start_step`` on; step k depends on (seed, k) alone.

        Close the iterator (or drop it) to end its workers. With ``rows``, only those of each batch are read.

        Yields:
            (images uint8 ``[B, image_size, image_size, 3]``, labels int32 ``[B]``)

        Raises:
            ValueError: at the call, if ``batch_size`` exceeds the training split or an argument is negative; at a step, for a
                label out of range.
        """
        check_stream(len(self.train), batch_size, seed, start_step)
        rows = np.arange(batch_size) if rows is None else rows
        steps = TrainSteps(self.train, self.num_classes, self.image_size, batch_size, seed, start_step, rows)
        return in_workers(steps, self.worker_count)

    def eval_batches(self, batch_size: int, rows: np.ndarray | None = None) -> Iterator[EvalBatch]:
        """Centre crops of the test split once, in order; the last batch is padded. With ``rows`` (ascending), only those of each.

        Yields:
            (images uint8 ``[B, image_size, image_size, 3]``, labels int32 ``[B]``, valid bool ``[B]``)

        Raises:
            ValueError: at the call, if ``batch_size`` is below 1; at a step, for a label out of range.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: at least 1 is needed")
        rows = np.arange(batch_size) if rows is None else rows
        steps = EvalSteps(self.test, self.num_classes, self.image_size, batch_size, rows)
        return in_workers(steps, self.worker_count)


def load_imagenet(data_dir: Path | None = None, *, image_size: int = 224, worker_count: int | None = None) -> ImageNet:
    """ImageNet from the user's own prepared folder.

    Args:
        data_dir: tensorflow-datasets folder; by default $TFDS_DATA_DIR or ~/tensorflow_datasets.
        image_size: H and W of the crops, pixels.
        worker_count: grain worker processes; by default one for each core, at most 16; 0 for none.

    Raises:
        FileNotFoundError: if it is not prepared (says how to), or naming a missing shard.
        ValueError: naming a damaged shard.
    """
    builder = open_builder("imagenet2012", data_dir)
    train, test = (examples(builder, split, encoded_images=True) for split in ("train", "validation"))
    workers = min(16, os.cpu_count() or 1) if worker_count is None else worker_count
    return ImageNet(train, test, image_size, workers)
