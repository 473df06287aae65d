"""Augmentation on the device against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.data import load
from experiments.data.augment import crop_flip, make_augment, random_crop_flip
from experiments.data.tfds_source import Split, cifar10_from_splits


def numpy_crop_flip(images: np.ndarray, offsets: np.ndarray, flips: np.ndarray, pad: int) -> np.ndarray:
    height, width = images.shape[1:3]
    out = []
    for image, (top, left), flip in zip(images, offsets, flips, strict=True):
        crop = np.pad(image, ((pad, pad), (pad, pad), (0, 0)))[top : top + height, left : left + width]
        out.append(crop[:, ::-1] if flip else crop)
    return np.stack(out)


@pytest.mark.parametrize(("shape", "pad"), [((32, 32, 3), 4), ((5, 7, 1), 2)])
def test_crop_and_flip_equal_numpy_for_every_offset(shape: tuple[int, int, int], pad: int) -> None:
    side = 2 * pad + 1
    offsets = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1).reshape(-1, 2)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (len(offsets), *shape), dtype=np.uint8)
    flips = rng.random(len(offsets)) < 0.5
    got = jax.jit(crop_flip, static_argnames="pad")(images, offsets, flips, pad=pad)
    assert got.dtype == jnp.uint8
    np.testing.assert_array_equal(got, numpy_crop_flip(images, offsets, flips, pad))


def pairs(images: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Which (top, left, flip) gave each drawn image; each image must have exactly one."""
    found = []
    for image, result in zip(images, drawn, strict=True):
        grid = np.stack(np.meshgrid(np.arange(9), np.arange(9), np.arange(2), indexing="ij"), -1).reshape(-1, 3)
        candidates = numpy_crop_flip(np.broadcast_to(image, (len(grid), *image.shape)), grid[:, :2], grid[:, 2], 4)
        (hits,) = np.nonzero((candidates == result).all((1, 2, 3)))
        assert len(hits) == 1
        found.append(grid[hits[0]])
    return np.stack(found)


def test_offsets_cover_the_padding_and_half_of_the_images_are_flipped() -> None:
    images = np.random.default_rng(0).integers(0, 256, (600, 9, 8, 1), dtype=np.uint8)
    drawn = np.asarray(jax.jit(random_crop_flip)(jax.random.key(0), images))
    tops, lefts, flips = pairs(images, drawn).T
    for offsets in (tops, lefts):  # each of 9 offsets has 66.7 expected, standard deviation 7.7
        assert (np.abs(np.bincount(offsets, minlength=9) - 600 / 9) < 40).all()
    assert abs(flips.mean() - 0.5) < 0.1  # 5 standard deviations
    assert abs(np.corrcoef([tops, lefts, flips])[np.triu_indices(3, 1)]).max() < 0.2


def cifar_like() -> Split:
    rng = np.random.default_rng(1)
    return Split(rng.integers(0, 256, (8, 32, 32, 3), dtype=np.uint8), np.arange(8, dtype=np.int32))


def test_normalisation_is_per_channel() -> None:
    split = cifar_like()
    augment, normalise = make_augment(cifar10_from_splits(split, split))
    got = jax.jit(normalise)(split.images)
    expected = (split.images / 255 - [0.4914, 0.4822, 0.4465]) / [0.2470, 0.2435, 0.2616]
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)  # float32 of numbers up to about 2
    drawn = jax.jit(augment)(jax.random.key(3), split.images)
    np.testing.assert_allclose(
        drawn, normalise(random_crop_flip(jax.random.key(3), split.images)), rtol=1e-6, atol=1e-6
    )
    assert drawn.dtype == jnp.float32


def test_the_key_alone_decides_and_keys_can_be_mapped() -> None:
    split = cifar_like()
    augment, _ = make_augment(cifar10_from_splits(split, split))
    keys, images = jax.random.split(jax.random.key(0), 2), jnp.stack([split.images, split.images])
    mapped = jax.jit(jax.vmap(augment))(keys, images)
    for row in range(2):
        np.testing.assert_array_equal(mapped[row], jax.jit(augment)(keys[row], split.images))
    assert (mapped[0] != mapped[1]).mean() > 0.5


def test_digits_are_only_normalised() -> None:
    data = load("digits")
    augment, normalise = make_augment(data)
    images = jnp.asarray(data.train.images)
    np.testing.assert_array_equal(augment(jax.random.key(0), images), normalise(images))
    np.testing.assert_allclose(normalise(images).mean(), 0.0, atol=1e-5)
    np.testing.assert_allclose(normalise(images).std(), 1.0, rtol=1e-5)


def test_an_unknown_augmentation_is_refused() -> None:
    class Odd:
        augmentation = "mixup"

    with pytest.raises(ValueError, match=r"'mixup'.*none, crop_flip, random_resized_crop"):
        make_augment(Odd())  # type: ignore[arg-type]
