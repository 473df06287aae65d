"""The block that transformers repeat: self-attention and an MLP, of images (every token sees every token) or of text (causal)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class TransformerBlock(nnx.Module):
    """Self-attention and an MLP, each behind a LayerNorm and around a residual connection.

    With ``causal``, a token sees itself and the tokens before it only.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        dropout: float,
        *,
        causal: bool = False,
        rngs: nnx.Rngs,
        **dtypes: Any,
    ):
        norm = partial(nnx.LayerNorm, width, epsilon=1e-6, rngs=rngs, **dtypes)
        self.causal = causal
        self.norm1, self.norm2 = norm(), norm()
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs, **dtypes)
        self.up = nnx.Linear(width, hidden, rngs=rngs, **dtypes)
        self.down = nnx.Linear(hidden, width, rngs=rngs, **dtypes)
        self.dropout1, self.dropout2, self.dropout3 = (nnx.Dropout(dropout, rngs=rngs) for _ in range(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, tokens, width]`` to the same."""
        mask = causal_mask(x.shape[1]) if self.causal else None
        x = x + self.dropout1(self.attention(self.norm1(x), mask=mask))
        hidden = self.dropout2(nnx.gelu(self.up(self.norm2(x)), approximate=False))
        return x + self.dropout3(self.down(hidden))


def causal_mask(tokens: int) -> jax.Array:
    """Bool ``[1, 1, tokens, tokens]``: query t may look at key s iff s ≤ t.

    >>> causal_mask(3)[0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    return jnp.tril(jnp.ones((1, 1, tokens, tokens), bool))
