"""Models as lists of layers, at the granularity of residual blocks.

``MODELS`` and :func:`build` are the image classifiers; :func:`causal_transformer` reads tokens and is called by itself.
"""

import difflib
from collections.abc import Callable
from math import prod
from typing import Any

from cyclic_jax.models.mlp import residual_mlp
from cyclic_jax.models.resnet import resnet, resnet18, resnet50, tiny_resnet
from cyclic_jax.models.transformer import causal_transformer
from cyclic_jax.models.vit import vit, vit_b16
from cyclic_jax.stages import Layer

SMALL = 64  # images up to this height get the CIFAR form

MODELS: dict[str, Callable[..., tuple[Layer, ...]]] = {
    "tiny_resnet": tiny_resnet,
    "residual_mlp": residual_mlp,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "vit_b16": vit_b16,
}

__all__ = [
    "MODELS",
    "build",
    "causal_transformer",
    "residual_mlp",
    "resnet",
    "resnet18",
    "resnet50",
    "tiny_resnet",
    "vit",
    "vit_b16",
]


def build(name: str, *, num_classes: int, image_shape: tuple[int, int, int], **options: Any) -> tuple[Layer, ...]:
    """An image classifier by name, in the form that fits the images.

    Args:
        name: a key of ``MODELS``.
        num_classes: outputs.
        image_shape: ``(H, W, C)``; ResNets take their CIFAR form up to 64 pixels, ViTs need ``H = W``.
        options: of the model.

    Raises:
        ValueError: for an unknown name, with the nearest known one; for a ViT on images that are not square.

    Examples:
        >>> len(build("tiny_resnet", num_classes=10, image_shape=(8, 8, 1)))
        8
    """
    height, width, channels = image_shape
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown model {name!r}: did you mean {near!r}? Known: {', '.join(MODELS)}")
    if name == "residual_mlp":
        return residual_mlp(num_classes, in_features=prod(image_shape), **options)
    if name == "vit_b16":
        if height != width:
            raise ValueError(f"vit_b16 needs square images, not image_shape={image_shape}")
        return vit_b16(num_classes, image_size=height, in_channels=channels, **options)
    return MODELS[name](num_classes, small_images=height <= SMALL, in_channels=channels, **options)
