"""Residual networks (He et al., arXiv 1512.03385) as lists of layers: a stem, one layer per residual block, a head.

Padding is symmetric and written out, as in the usual PyTorch implementation, so that strided convolutions see the same pixels; the
bottleneck block strides in its 3×3 convolution (the "v1.5" form that the known parameter counts and accuracies belong to).
Images are NHWC.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cyclic_jax.models.norm import batch_norm
from cyclic_jax.stages import Layer, from_nnx

he_fan_out = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


class ConvNorm(nnx.Module):
    """Convolution without bias, then BatchNorm."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int, *, rngs: nnx.Rngs, **dtypes: Any):
        self.conv = nnx.Conv(
            inputs,
            outputs,
            (size, size),
            strides=stride,
            padding=[(size // 2, size // 2)] * 2,
            use_bias=False,
            kernel_init=he_fan_out,
            rngs=rngs,
            **dtypes,
        )
        self.norm = batch_norm(outputs, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, H, W, inputs]`` to ``[B, H / stride, W / stride, outputs]``."""
        return self.norm(self.conv(x))


class Stem(nnx.Module):
    """The first convolution: 3×3 for small images; 7×7 of stride 2 and a max-pool for large ones."""

    def __init__(self, inputs: int, width: int, small_images: bool, *, rngs: nnx.Rngs, **dtypes: Any):
        self.small_images = small_images
        size, stride = (3, 1) if small_images else (7, 2)
        self.conv = ConvNorm(inputs, width, size, stride, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, H, W, inputs]`` to ``[B, H, W, width]``, or a quarter of H and W for large images."""
        x = nnx.relu(self.conv(x))
        return x if self.small_images else nnx.max_pool(x, (3, 3), strides=(2, 2), padding=[(1, 1)] * 2)


class Block(nnx.Module):
    """A residual block; the shortcut is a 1×1 convolution where the shape changes."""

    def __init__(self, convs: Sequence[tuple[int, int, int, int]], *, rngs: nnx.Rngs, **dtypes: Any):
        self.convs = nnx.List([ConvNorm(*conv, rngs=rngs, **dtypes) for conv in convs])
        inputs, outputs = convs[0][0], convs[-1][1]
        stride = max(conv[3] for conv in convs)
        changes = stride > 1 or inputs != outputs
        self.shortcut = ConvNorm(inputs, outputs, 1, stride, rngs=rngs, **dtypes) if changes else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Shapes as :class:`ConvNorm`."""
        y = x
        for conv in self.convs[:-1]:
            y = nnx.relu(conv(y))
        shortcut = x if self.shortcut is None else self.shortcut(x)
        return nnx.relu(self.convs[-1](y) + shortcut)


class Head(nnx.Module):
    """Mean over the image, then a linear layer."""

    def __init__(self, inputs: int, num_classes: int, *, rngs: nnx.Rngs, **dtypes: Any):
        self.linear = nnx.Linear(inputs, num_classes, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, H, W, inputs]`` to ``[B, num_classes]``."""
        return self.linear(x.mean(axis=(1, 2)))


def basic_convs(inputs: int, width: int, stride: int) -> list[tuple[int, int, int, int]]:
    """Two 3×3 convolutions, as ``(inputs, outputs, size, stride)``."""
    return [(inputs, width, 3, stride), (width, width, 3, 1)]


def bottleneck_convs(inputs: int, width: int, stride: int) -> list[tuple[int, int, int, int]]:
    """1×1 down, 3×3, 1×1 up to four times the width."""
    return [(inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]


def resnet(
    num_classes: int,
    blocks: Sequence[int],
    *,
    bottleneck: bool = False,
    width: int = 64,
    in_channels: int = 3,
    small_images: bool = False,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> tuple[Layer, ...]:
    """A residual network of any depth.

    Args:
        num_classes: outputs.
        blocks: residual blocks of each group; every group but the first halves the image and doubles the width.
        bottleneck: three convolutions a block instead of two.
        width: of the first group.
        in_channels: of the images.
        small_images: CIFAR form (3×3 stem, no max-pool) instead of ImageNet form.
        dtype: of the computation; by default that of inputs and parameters.
        param_dtype: of parameters.

    Returns:
        Layers from ``[B, H, W, in_channels]`` to ``[B, num_classes]``: stem, blocks, head.
    """
    dtypes = {"dtype": dtype, "param_dtype": param_dtype}
    convs_of = bottleneck_convs if bottleneck else basic_convs
    layers: list[tuple[str, Any]] = [("stem", partial(_make, Stem, in_channels, width, small_images, **dtypes))]
    channels = width
    for group, count in enumerate(blocks):
        for index in range(count):
            convs = convs_of(channels, width * 2**group, 2 if group and not index else 1)
            layers.append((f"block{group}.{index}", partial(_make, Block, convs, **dtypes)))
            channels = convs[-1][1]
    layers.append(("head", partial(_make, Head, channels, num_classes, **dtypes)))
    return from_nnx(layers)


def _make(module: Any, *args: Any, **kwargs: Any) -> nnx.Module:
    *args, rngs = args  # type: ignore[assignment]
    return module(*args, rngs=rngs, **kwargs)


def resnet18(num_classes: int, small_images: bool = False, **options: Any) -> tuple[Layer, ...]:
    """ResNet-18: 11,689,512 parameters in ImageNet form with 1000 classes. Options as :func:`resnet`.

    Examples:
        >>> [layer.name for layer in resnet18(10, small_images=True)][:3]
        ['stem', 'block0.0', 'block0.1']
    """
    return resnet(num_classes, (2, 2, 2, 2), small_images=small_images, **options)


def resnet50(num_classes: int, small_images: bool = False, **options: Any) -> tuple[Layer, ...]:
    """ResNet-50: 25,557,032 parameters in ImageNet form with 1000 classes. Options as :func:`resnet`."""
    return resnet(num_classes, (3, 4, 6, 3), bottleneck=True, small_images=small_images, **options)


def tiny_resnet(num_classes: int, small_images: bool = True, **options: Any) -> tuple[Layer, ...]:
    """A small network for small images: a 3×3 stem and six basic blocks of width 16, 32 and 64. Options as :func:`resnet`."""
    return resnet(num_classes, (2, 2, 2), small_images=small_images, **{"width": 16, **options})
