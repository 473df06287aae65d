"""A synthetic stand-in, not real data: each class is a coarse random pattern, each image its pattern plus noise.

It exercises code at any shape. An accuracy on it says nothing about accuracy on real images.
"""

import numpy as np

from experiments.data.dataset import Dataset, Split, channel_statistics

_CONTRAST, _NOISE = 40.0, 40.0  # of a pattern around grey, and of the noise: in pixel units, 0..255


def class_patterns(rng: np.random.Generator, classes: int, shape: tuple[int, int, int]) -> np.ndarray:
    """One pattern for each class: float32 ``[classes, H, W, C]`` around 0, constant in 4x4 patches of the image."""
    height, width, channels = shape
    patches = rng.choice([-_CONTRAST, _CONTRAST], (classes, 4, 4, channels)).astype(np.float32)
    rows, columns = np.arange(height) * 4 // height, np.arange(width) * 4 // width
    return patches[:, rows[:, None], columns]


def _draw(rng: np.random.Generator, patterns: np.ndarray, size: int) -> Split:
    labels = rng.permutation(np.arange(size) % len(patterns)).astype(np.int32)
    images = np.empty((size, *patterns.shape[1:]), np.uint8)
    for i, label in enumerate(labels):  # one at a time: large shapes would need much memory in float
        noise = rng.standard_normal(patterns.shape[1:], np.float32)
        images[i] = np.clip(128 + patterns[label] + _NOISE * noise, 0, 255)
    return Split(images, labels)


def load_synthetic(
    seed: int = 0, *, shape: tuple[int, int, int] = (8, 8, 1), classes: int = 10, size: int = 1024, test_size: int = 256
) -> Dataset:
    """A synthetic stand-in, not real data, with as many images of each class as possible.

    Args:
        seed: of patterns, labels and noise.
        shape: (H, W, C) of an image.
        classes: number of classes.
        size: training images.
        test_size: test images.

    Raises:
        ValueError: unless all of them are positive.

    >>> load_synthetic(shape=(4, 4, 3), classes=2, size=8).name
    'synthetic stand-in, not real data'
    """
    if len(shape) != 3 or min(*shape, classes, size, test_size) < 1:
        raise ValueError(f"shape={shape}, classes={classes}, size={size}, test_size={test_size}: all must be positive")
    rng = np.random.default_rng(seed)
    patterns = class_patterns(rng, classes, shape)
    train, test = _draw(rng, patterns, size), _draw(rng, patterns, test_size)
    mean, std = channel_statistics(train.images)
    name = "synthetic stand-in, not real data"
    description = (
        f"{name}: {classes} random patterns with noise, {size:,} training and {test_size:,} test images, seed {seed}"
    )
    return Dataset(name, train, test, classes, shape, mean, std, "none", description)
