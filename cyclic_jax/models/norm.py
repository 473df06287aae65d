"""BatchNorm whose running statistics have at least the precision of its parameters."""

from typing import Any

import jax.numpy as jnp
from flax import nnx


def batch_norm(width: int, *, rngs: nnx.Rngs, dtype: Any = None, param_dtype: Any = jnp.float32) -> nnx.BatchNorm:
    """BatchNorm with momentum 0.9 of the running statistics and epsilon 1e-5, over the last axis.

    ``nnx.BatchNorm`` starts its statistics in float32 whatever the parameters are; with float64 parameters they would be cast
    down at every step.
    """
    norm = nnx.BatchNorm(width, momentum=0.9, epsilon=1e-5, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
    for statistic in (norm.mean, norm.var):
        value = statistic.get_value()
        statistic.set_value(value.astype(jnp.promote_types(value.dtype, param_dtype)))
    return norm
