"""The in-memory dataset: what is checked when it is built, and the stream of batches."""

import itertools

import numpy as np
import pytest

from experiments.data.dataset import Dataset, Split, channel_statistics


def numbered(n: int, first_label: int = 0) -> Split:
    """Image i is filled with i, its label is i modulo 10."""
    images = np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None, None, None], (n, 2, 3, 1)).copy()
    return Split(images, (np.arange(n, dtype=np.int32) + first_label) % 10)


def dataset(train: Split, test: Split | None = None) -> Dataset:
    test = train if test is None else test
    return Dataset("numbers", train, test, 10, (2, 3, 1), (0.0,), (1.0,), "none", "numbered images")


def ids(images: np.ndarray) -> list[int]:
    assert (images == images[:, :1, :1]).all()
    return images[:, 0, 0, 0].tolist()


def take(data: Dataset, count: int, batch_size: int = 4, seed: int = 0, start_step: int = 0) -> list[list[int]]:
    batches = itertools.islice(data.batches(batch_size, seed, start_step), count)
    return [ids(images) for images, _ in batches]


def joined(steps: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(steps))


def test_images_and_labels_stay_together_with_the_documented_types() -> None:
    for images, labels in itertools.islice(dataset(numbered(23)).batches(4, seed=3), 12):
        assert images.dtype == np.uint8
        assert images.shape == (4, 2, 3, 1)
        assert labels.dtype == np.int32
        assert labels.tolist() == [i % 10 for i in ids(images)]


def test_the_same_seed_gives_the_same_stream_and_another_seed_another() -> None:
    data = dataset(numbered(23))
    assert take(data, 12, seed=1) == take(data, 12, seed=1)
    assert take(data, 12, seed=1) != take(data, 12, seed=2)


@pytest.mark.parametrize("start", [1, 4, 5, 6, 11])
def test_a_resumed_stream_continues_where_the_first_would_have(start: int) -> None:
    data = dataset(numbered(23))
    assert take(data, 12 - start, start_step=start) == take(data, 12)[start:]


def test_an_epoch_covers_every_example_once_and_epochs_differ() -> None:
    data = dataset(numbered(24))
    assert data.steps_per_epoch(4) == 6
    steps = take(data, 12)
    first, second = joined(steps[:6]), joined(steps[6:])
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second
    assert first != list(range(24))


def test_what_is_left_over_is_dropped_from_its_epoch_only() -> None:
    data = dataset(numbered(23))
    assert data.steps_per_epoch(4) == 5
    epochs = [joined(take(data, 5, start_step=5 * epoch)) for epoch in range(8)]
    assert all(len(set(epoch)) == 20 for epoch in epochs)
    assert set().union(*epochs) == set(range(23))


def test_a_batch_larger_than_the_training_split_is_refused_at_the_call() -> None:
    with pytest.raises(ValueError, match=r"batch_size=24 .* 23 examples"):
        dataset(numbered(23)).batches(24, seed=0)
    with pytest.raises(ValueError, match=r"batch_size=24 .* 23 examples"):
        dataset(numbered(23)).steps_per_epoch(24)
    assert dataset(numbered(23)).steps_per_epoch(23) == 1


@pytest.mark.parametrize(
    ("batch_size", "seed", "start", "named"),
    [(0, 0, 0, "batch_size=0"), (1, -1, 0, "seed=-1"), (1, 0, -2, "start_step=-2")],
)
def test_negative_arguments_are_refused_at_the_call(batch_size: int, seed: int, start: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        dataset(numbered(5)).batches(batch_size, seed, start)


@pytest.mark.parametrize(("n", "batch_size"), [(10, 4), (8, 4), (3, 5)])
def test_evaluation_covers_the_test_split_once_and_pads_the_end(n: int, batch_size: int) -> None:
    data = dataset(numbered(20), numbered(n))
    batches = list(data.eval_batches(batch_size))
    assert all(len(images) == len(labels) == len(valid) == batch_size for images, labels, valid in batches)
    assert all(valid.dtype == bool and images.dtype == np.uint8 for images, _, valid in batches)
    seen = [
        (i, label)
        for images, labels, valid in batches
        for i, label in zip(ids(images[valid]), labels[valid], strict=True)
    ]
    assert seen == [(i, i % 10) for i in range(n)]
    images, labels, valid = batches[-1]
    assert valid.sum() == (n - 1) % batch_size + 1
    assert not images[~valid].any()
    assert not labels[~valid].any()
    with pytest.raises(ValueError, match="batch_size=0"):
        data.eval_batches(0)


@pytest.mark.parametrize("label", [10, -1])
def test_a_label_out_of_range_names_index_label_and_range(label: int) -> None:
    bad = numbered(8)
    bad.labels[5] = label
    with pytest.raises(ValueError, match=rf"train split: example 5 has label {label}, outside the range \[0, 10\)"):
        dataset(bad)
    with pytest.raises(ValueError, match=rf"test split: example 5 has label {label}, outside the range \[0, 10\)"):
        dataset(numbered(8), bad)


def test_shapes_types_and_counts_are_checked() -> None:
    images, labels = np.zeros((4, 2, 3, 1), np.uint8), np.zeros(4, np.int32)
    with pytest.raises(ValueError, match="float32"):
        Split(images.astype(np.float32), labels)
    with pytest.raises(ValueError, match="int64"):
        Split(images, labels.astype(np.int64))
    with pytest.raises(ValueError, match="4 images but 3 labels"):
        Split(images, labels[:3])
    with pytest.raises(ValueError, match=r"\(3, 2, 1\), not \(2, 3, 1\)"):
        dataset(Split(images.reshape(4, 3, 2, 1), labels))


def test_channel_statistics_equal_numpys() -> None:
    images = np.random.default_rng(0).integers(0, 256, (1500, 3, 2, 3), dtype=np.uint8)
    images[..., 2] = 7  # without variation
    mean, std = channel_statistics(images)
    np.testing.assert_allclose(mean, images.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(std[:2], images.std((0, 1, 2))[:2], rtol=1e-12)
    assert std[2] == 1.0
