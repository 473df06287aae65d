"""A causal transformer for tokens as a list of layers: embedding, one layer per block, head.

Blocks are those of Radford et al. (GPT-2, 2019): LayerNorm before attention and before the MLP. The head has a matrix of its own:
one shared with the embedding would belong to the first stage and to the last.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cyclic_jax.models.attention import TransformerBlock
from cyclic_jax.models.resnet import _make
from cyclic_jax.stages import Layer, from_nnx

small_normal = nnx.initializers.normal(0.02)


class TokenEmbedding(nnx.Module):
    """Tokens to vectors, learned positions added."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float, *, rngs: nnx.Rngs, **dtypes: Any):
        self.context = context
        self.tokens = nnx.Embed(vocabulary, width, embedding_init=small_normal, rngs=rngs, **dtypes)
        self.position = nnx.Param(small_normal(rngs.params(), (context, width), dtypes["param_dtype"]))
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Integers ``[B, T]``, T ≤ context, to ``[B, T, width]``; ValueError for anything else."""
        if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"tokens are integers [B, T], not {x.dtype} {list(x.shape)}")
        length = x.shape[1]
        if length > self.context:
            raise ValueError(f"{length} tokens, but there are only context={self.context} positions")
        y = self.tokens(x)
        return self.dropout(y + self.position[...][:length].astype(y.dtype))


class TokenHead(nnx.Module):
    """A LayerNorm and a linear layer, at every token."""

    def __init__(self, width: int, vocabulary: int, *, rngs: nnx.Rngs, **dtypes: Any):
        self.norm = nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs, **dtypes)
        self.linear = nnx.Linear(width, vocabulary, kernel_init=small_normal, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, T, width]`` to ``[B, T, vocabulary]``."""
        return self.linear(self.norm(x))


def causal_transformer(
    vocabulary: int,
    *,
    context: int,
    width: int,
    depth: int,
    heads: int,
    hidden: int | None = None,
    dropout: float = 0.0,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> tuple[Layer, ...]:
    """A transformer that predicts every next token from those up to it.

    With V = vocabulary, T = context, W = width and H = hidden it has V·W + T·W parameters in the embedding,
    4·W² + 2·W·H + H + 9·W in each block, and W·V + V + 2·W in the head.

    Args:
        vocabulary: tokens are ``0 … vocabulary − 1``; others give outputs that are not numbers.
        context: the most tokens that it can read.
        width: of a token.
        depth: number of blocks.
        heads: of attention; divides ``width``.
        hidden: width of the MLP, by default ``4 · width``.
        dropout: rate, in ``[0, 1)``.
        dtype: of the computation; by default that of the parameters.
        param_dtype: of parameters.

    Returns:
        ``depth + 2`` layers from integers ``[B, T]``, T ≤ context, to logits ``[B, T, vocabulary]``; the output at position t
        depends on the tokens 0 … t only.

    Raises:
        ValueError: naming the size that is below 1, ``heads`` if it does not divide ``width``, or a rate outside ``[0, 1)``.

    Examples:
        >>> layers = causal_transformer(50, context=16, width=8, depth=2, heads=2)
        >>> [layer.name for layer in layers]
        ['embedding', 'block0', 'block1', 'head']
    """
    hidden = 4 * width if hidden is None else hidden
    sizes = {"vocabulary": vocabulary, "context": context, "width": width, "depth": depth, "heads": heads}
    for name, value in {**sizes, "hidden": hidden}.items():
        if value < 1:
            raise ValueError(f"{name}={value}: it must be at least 1")
    if width % heads:
        raise ValueError(f"heads={heads} must divide width={width}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout}: it must lie in [0, 1)")
    dtypes = {"dtype": dtype, "param_dtype": param_dtype}
    block = partial(_make, TransformerBlock, width, heads, hidden, dropout, causal=True, **dtypes)
    return from_nnx(
        [
            ("embedding", partial(_make, TokenEmbedding, vocabulary, context, width, dropout, **dtypes)),
            *((f"block{index}", block) for index in range(depth)),
            ("head", partial(_make, TokenHead, width, vocabulary, **dtypes)),
        ]
    )
