"""Augmentation on the device, inside jit: uint8 images in, normalised float32 out.

Images cross to the device as uint8, a quarter of the bytes; crops and flips are one gather there. Call it for each micro-batch
with a key of its own. Letters: B rows, H, W and C of an image.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data.dataset import DatasetLike

Augment = Callable[[jax.Array, jax.Array], jax.Array]
Normalise = Callable[[jax.Array], jax.Array]

AUGMENTATIONS = ("none", "crop_flip", "random_resized_crop")
_PAD = 4


def normaliser(mean: tuple[float, ...], std: tuple[float, ...]) -> Normalise:
    """``images -> (images - mean) / std`` for each channel: uint8 ``[..., H, W, C]`` to float32.

    Args:
        mean: C values in units of the stored pixels.
        std: likewise, positive.

    >>> normaliser((8.0,), (4.0,))(jnp.full((1, 1, 1, 1), 16, jnp.uint8)).item()
    2.0
    """
    centre, scale = np.array(mean, np.float32), 1 / np.array(std, np.float32)
    return lambda images: (images.astype(jnp.float32) - centre) * scale


def crop_flip(images: jax.Array, offsets: jax.Array, flips: jax.Array, pad: int = _PAD) -> jax.Array:
    """Pad with zeros, crop to the former size, then flip left-right where asked.

    Args:
        images: ``[B, H, W, C]``.
        offsets: integers ``[B, 2]``, top and left of the crop in the padded image, 0..2*pad.
        flips: bool ``[B]``.
        pad: pixels added on each side.

    Returns:
        ``[B, H, W, C]`` of the same dtype.
    """
    rows, height, width, _ = images.shape
    padded = jnp.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    across = jnp.where(flips[:, None], jnp.arange(width)[::-1], jnp.arange(width))
    y = offsets[:, :1] + jnp.arange(height)
    x = offsets[:, 1:] + across
    return padded[jnp.arange(rows)[:, None, None], y[:, :, None], x[:, None, :]]


def random_crop_flip(key: jax.Array, images: jax.Array, pad: int = _PAD) -> jax.Array:
    """:func:`crop_flip` with uniform offsets and a fair coin for each image; determined by the key."""
    crop_key, flip_key = jax.random.split(key)
    offsets = jax.random.randint(crop_key, (len(images), 2), 0, 2 * pad + 1)
    return crop_flip(images, offsets, jax.random.bernoulli(flip_key, shape=(len(images),)), pad)


def make_augment(dataset: DatasetLike) -> tuple[Augment, Normalise]:
    """The pair (augment, normalise) of a dataset, for training and for evaluation.

    ``augment(key, images)`` and ``normalise(images)`` take uint8 ``[B, H, W, C]`` and return float32 of the same shape. For
    "none" and "random_resized_crop" (done by the data workers) augment only normalises.

    Raises:
        ValueError: for an unknown augmentation.
    """
    if dataset.augmentation not in AUGMENTATIONS:
        raise ValueError(f"unknown augmentation {dataset.augmentation!r}; known: {', '.join(AUGMENTATIONS)}")
    normalise = normaliser(dataset.mean, dataset.std)
    if dataset.augmentation == "crop_flip":
        return lambda key, images: normalise(random_crop_flip(key, images)), normalise
    return lambda key, images: normalise(images), normalise
