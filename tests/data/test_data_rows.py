"""A process that asks for some rows of each batch gets what is there in the whole batch, and nothing else is read."""

from contextlib import closing
from itertools import islice

import numpy as np
import pytest

from experiments.data import DatasetLike, Split
from experiments.data.dataset import Dataset
from experiments.data.text import Text, make_text
from tests.data.test_data_imagenet import imagenet

ROWS = np.array([1, 2])


def in_memory() -> Dataset:
    images = np.arange(11 * 4, dtype=np.uint8).reshape(11, 2, 2, 1)
    split = Split(images, np.arange(11, dtype=np.int32))
    return Dataset("tiny", split, split, 11, (2, 2, 1), (0.0,), (1.0,), "none", "eleven images")


DATA = {"in memory": in_memory, "text": lambda: make_text("to be or not to be" * 20, context=4), "imagenet": imagenet}


@pytest.mark.parametrize("name", DATA)
def test_rows_are_those_of_the_whole_batch(name):
    data: DatasetLike | Text = DATA[name]()
    with closing(data.batches(4, seed=1)) as every, closing(data.batches(4, seed=1, rows=ROWS)) as own:  # type: ignore[type-var]
        for whole, part in islice(zip(every, own, strict=False), 4):
            for a, b in zip(whole, part, strict=True):
                np.testing.assert_array_equal(a[ROWS], b)
                assert not np.array_equal(a[ROWS - 1], b)


@pytest.mark.parametrize("rows", [ROWS, np.array([3]), np.arange(0)], ids=["some", "last", "none"])
@pytest.mark.parametrize("name", DATA)
def test_evaluation_too(name, rows):
    data = DATA[name]()
    whole, part = list(data.eval_batches(4)), list(data.eval_batches(4, rows))
    assert len(whole) == len(part) > 1
    for everything, own in zip(whole, part, strict=True):
        for a, b in zip(everything, own, strict=True):
            np.testing.assert_array_equal(a[rows], b)


def test_other_images_are_not_decoded():
    data, read = imagenet(), []

    class Watched(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    object.__setattr__(data, "train", Watched(data.train))
    with closing(data.batches(4, seed=1, rows=ROWS)) as batches:
        next(batches)
    assert set(read)  # reading ahead may have been stopped between two images
    whole = {int(label) for _, labels in islice(imagenet().batches(4, seed=1), 12) for label in labels[ROWS]}
    assert set(read) <= whole
