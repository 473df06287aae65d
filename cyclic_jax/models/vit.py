"""Vision transformers (Dosovitskiy et al., arXiv 2010.11929) as lists of layers: embedding, one layer per block, head."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cyclic_jax.models.attention import TransformerBlock
from cyclic_jax.models.resnet import _make
from cyclic_jax.stages import Layer, from_nnx


class Embedding(nnx.Module):
    """Patches to tokens, a class token in front, learned positions added."""

    def __init__(
        self,
        image_size: int,
        patch: int,
        in_channels: int,
        width: int,
        dropout: float,
        *,
        rngs: nnx.Rngs,
        **dtypes: Any,
    ):
        self.image_size = image_size
        tokens = (image_size // patch) ** 2 + 1
        self.patches = nnx.Conv(in_channels, width, (patch, patch), strides=patch, padding="VALID", rngs=rngs, **dtypes)
        self.class_token = nnx.Param(jnp.zeros((1, 1, width), dtypes["param_dtype"]))
        position = 0.02 * jax.random.normal(rngs.params(), (1, tokens, width), dtypes["param_dtype"])
        self.position = nnx.Param(position)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, image_size, image_size, in_channels]`` to ``[B, tokens, width]``; ValueError for other sizes."""
        size = self.image_size
        if x.shape[1:3] != (size, size):  # less than a patch would leave the class token alone, and broadcast
            raise ValueError(f"images are {x.shape[1]}x{x.shape[2]}, but the positions are those of {size}x{size}")
        x = self.patches(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        first = jnp.broadcast_to(self.class_token[...].astype(x.dtype), (x.shape[0], 1, x.shape[-1]))
        return self.dropout(jnp.concatenate([first, x], axis=1) + self.position[...].astype(x.dtype))


class Head(nnx.Module):
    """The class token, normalised, then a linear layer."""

    def __init__(self, width: int, num_classes: int, *, rngs: nnx.Rngs, **dtypes: Any):
        self.norm = nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs, **dtypes)
        self.linear = nnx.Linear(width, num_classes, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, tokens, width]`` to ``[B, num_classes]``."""
        return self.linear(self.norm(x[:, 0]))


def vit(
    num_classes: int,
    *,
    image_size: int,
    patch: int,
    width: int,
    depth: int,
    heads: int,
    hidden: int,
    in_channels: int = 3,
    dropout: float = 0.0,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> tuple[Layer, ...]:
    """A vision transformer of any size.

    Args:
        num_classes: outputs.
        image_size: height and width, a multiple of ``patch``.
        patch: height and width of a patch.
        width: of a token.
        depth: number of encoder blocks.
        heads: of attention; divides ``width``.
        hidden: width of the MLP.
        in_channels: of the images.
        dropout: rate.
        dtype: of the computation; by default that of inputs and parameters.
        param_dtype: of parameters.

    Returns:
        Layers from ``[B, image_size, image_size, in_channels]`` to ``[B, num_classes]``.

    Raises:
        ValueError: if ``patch`` does not divide ``image_size``, or ``heads`` not ``width``.
    """
    if image_size % patch or width % heads:
        raise ValueError(
            f"patch={patch} must divide image_size={image_size}, and heads={heads} must divide width={width}"
        )
    dtypes = {"dtype": dtype, "param_dtype": param_dtype}
    block = partial(_make, TransformerBlock, width, heads, hidden, dropout, **dtypes)
    return from_nnx(
        [
            ("embedding", partial(_make, Embedding, image_size, patch, in_channels, width, dropout, **dtypes)),
            *((f"block{index}", block) for index in range(depth)),
            ("head", partial(_make, Head, width, num_classes, **dtypes)),
        ]
    )


def vit_b16(num_classes: int, image_size: int = 224, **options: Any) -> tuple[Layer, ...]:
    """ViT-B/16: 86,567,656 parameters at 224×224 with 1000 classes. Options as :func:`vit`."""
    sizes = {"patch": 16, "width": 768, "depth": 12, "heads": 12, "hidden": 3072}
    return vit(num_classes, image_size=image_size, **{**sizes, **options})
