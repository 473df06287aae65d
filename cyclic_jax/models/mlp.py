"""A small residual multi-layer perceptron as a list of layers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cyclic_jax.models import norm as norms
from cyclic_jax.models.resnet import _make
from cyclic_jax.stages import Layer, from_nnx


class Input(nnx.Module):
    """Flattens, then a linear layer."""

    def __init__(self, in_features: int, width: int, *, rngs: nnx.Rngs, **dtypes: Any):
        self.linear = nnx.Linear(in_features, width, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, …]`` to ``[B, width]``."""
        return nnx.relu(self.linear(x.reshape(x.shape[0], -1)))


class Block(nnx.Module):
    """``x + W2 relu(W1 norm(x))``, with dropout on the branch."""

    def __init__(self, width: int, batch_norm: bool, dropout: float, *, rngs: nnx.Rngs, **dtypes: Any):
        make_norm = norms.batch_norm if batch_norm else nnx.LayerNorm
        self.norm = make_norm(width, rngs=rngs, **dtypes)
        self.up = nnx.Linear(width, width, rngs=rngs, **dtypes)
        self.down = nnx.Linear(width, width, rngs=rngs, **dtypes)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, width]`` to the same."""
        return x + self.dropout(self.down(nnx.relu(self.up(self.norm(x)))))


def residual_mlp(
    num_classes: int,
    *,
    in_features: int,
    width: int = 64,
    depth: int = 6,
    batch_norm: bool = False,
    dropout: float = 0.0,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> tuple[Layer, ...]:
    """An input layer, ``depth`` residual blocks and a linear head.

    Args:
        num_classes: outputs.
        in_features: entries of one input, all axes together.
        width: of every block.
        depth: number of blocks.
        batch_norm: BatchNorm instead of LayerNorm.
        dropout: rate.
        dtype: of the computation; by default that of inputs and parameters.
        param_dtype: of parameters.

    Returns:
        Layers from ``[B, …]`` to ``[B, num_classes]``.
    """
    dtypes = {"dtype": dtype, "param_dtype": param_dtype}
    return from_nnx(
        [
            ("input", partial(_make, Input, in_features, width, **dtypes)),
            *((f"block{k}", partial(_make, Block, width, batch_norm, dropout, **dtypes)) for k in range(depth)),
            ("head", partial(_make, _linear, width, num_classes, **dtypes)),
        ]
    )


def _linear(*sizes: int, **options: Any) -> nnx.Module:
    return nnx.Linear(*sizes, **options)
