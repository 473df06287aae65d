"""``load`` by name, the embedded digits and the synthetic stand-in."""

import hashlib
import subprocess
import sys
from importlib import resources

import numpy as np
import pytest

from experiments.data import DATASETS, load
from experiments.data.digits import is_test, read


def test_the_digits_are_the_published_ones() -> None:
    images, labels = read()
    assert images.shape == (1797, 8, 8, 1)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    # over uint8 pixels and labels in the order of sklearn.datasets.load_digits
    digest = hashlib.sha256(images.tobytes() + labels.astype(np.uint8).tobytes()).hexdigest()
    assert digest == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def test_the_digits_are_split_by_class_without_overlap() -> None:
    data = load("digits")
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert (data.train.images.max(), data.image_shape, data.num_classes) == (16, (8, 8, 1), 10)
    counts = np.bincount(data.train.labels) + np.bincount(data.test.labels)
    assert (np.abs(np.bincount(data.test.labels) - counts / 5) < 1).all()
    images, labels = read()
    rows = is_test(labels)
    np.testing.assert_array_equal(
        np.concatenate([data.train.images, data.test.images]), np.concatenate([images[~rows], images[rows]])
    )
    np.testing.assert_array_equal(
        np.concatenate([data.train.labels, data.test.labels]), np.concatenate([labels[~rows], labels[rows]])
    )


def test_source_and_licence_of_the_digits_ship_with_them() -> None:
    text = resources.files("experiments.data").joinpath("digits.md").read_text()
    assert "Alpaydin" in text
    assert "CC BY 4.0" in text
    assert "BSD" in text


def test_digits_is_the_default_and_all_names_are_known() -> None:
    assert load().name == "digits"
    assert list(DATASETS) == ["digits", "fashion_mnist", "cifar10", "imagenet2012", "synthetic"]


def test_an_unknown_name_gets_the_nearest_known_one() -> None:
    with pytest.raises(ValueError, match=r"'cifar-10'.*'cifar10'.*digits, fashion_mnist"):
        load("cifar-10")


def test_what_a_dataset_does_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'digits' has no option 'shape'; its options: none"):
        load("digits", shape=(4, 4, 1))
    with pytest.raises(
        ValueError, match=r"'synthetic' has no option 'sizes'; its options: classes, shape, size, test_size"
    ):
        load("synthetic", sizes=3)
    with pytest.raises(ValueError, match=r"'digits' reads no files of yours"):
        load("digits", data_dir="/somewhere")


def test_the_synthetic_stand_in_says_what_it_is() -> None:
    data = load("synthetic", shape=(12, 10, 3), classes=7, size=70, test_size=21)
    assert "synthetic stand-in, not real data" in data.name
    assert "synthetic stand-in, not real data" in data.description
    assert data.train.images.shape == (70, 12, 10, 3)
    assert np.bincount(data.train.labels).tolist() == [10] * 7
    assert np.bincount(data.test.labels).tolist() == [3] * 7
    with pytest.raises(ValueError, match="classes=0"):
        load("synthetic", classes=0)


def test_the_synthetic_stand_in_depends_on_its_seed() -> None:
    first, again, other = (load("synthetic", seed=seed, size=32) for seed in (1, 1, 2))
    assert (first.train.images == again.train.images).all()
    assert (first.train.images != other.train.images).mean() > 0.5
    assert not (first.train.images[:32] == first.test.images[:32]).all()


def test_the_synthetic_stand_in_can_be_learnt_from_its_training_split() -> None:
    data = load("synthetic")

    def accuracy(train_labels: np.ndarray) -> float:
        centres = np.stack([data.train.images[train_labels == label].mean(0) for label in range(10)])
        distance = ((data.test.images[:, None] - centres[None]) ** 2).sum((2, 3, 4))
        return float((distance.argmin(1) == data.test.labels).mean())

    assert accuracy(data.train.labels) > 0.95
    assert accuracy(np.random.default_rng(0).permutation(data.train.labels)) < 0.4


def test_loading_data_imports_neither_tensorflow_nor_tensorflow_datasets() -> None:
    code = "import sys; from experiments.data import load; load(); print([m for m in sys.modules if m.startswith('tensorflow')])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
