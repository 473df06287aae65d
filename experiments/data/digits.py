"""Handwritten digits, embedded in the package: real data that needs neither network nor files. See ``digits.md``."""

from importlib import resources

import numpy as np

from experiments.data.dataset import Dataset, Split, channel_statistics


def read() -> tuple[np.ndarray, np.ndarray]:
    """All 1,797 examples in the order of their source: images uint8 ``[1797, 8, 8, 1]`` of 0..16, labels int32 ``[1797]``."""
    with resources.files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        return arrays["images"], arrays["labels"].astype(np.int32)


def is_test(labels: np.ndarray) -> np.ndarray:
    """Every fifth example of the examples sorted by class: bool ``[n]``, stratified, and no random numbers to depend on."""
    chosen = np.zeros(len(labels), bool)
    chosen[np.argsort(labels, kind="stable")[::5]] = True
    return chosen


def load_digits() -> Dataset:
    """The digits: 1,437 for training, 360 for the test, 10 classes, 8x8 grey images with values 0..16."""
    images, labels = read()
    test = is_test(labels)
    train = Split(images[~test], labels[~test])
    mean, std = channel_statistics(train.images)
    return Dataset(
        name="digits",
        train=train,
        test=Split(images[test], labels[test]),
        num_classes=10,
        image_shape=(8, 8, 1),
        mean=mean,
        std=std,
        augmentation="none",
        description="Optical Recognition of Handwritten Digits (UCI): 1,437 training and 360 test images of 8x8 pixels",
    )
