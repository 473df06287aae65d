"""Sending a payload along pairs that change from block to block."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from cyclic_jax.executors.mesh import CYCLIC

PyTree = Any
Pairs = Sequence[tuple[int, int]]


def permute(pairs: Pairs, payload: PyTree) -> PyTree:
    """``payload`` along the pairs; with none, as it is. Whoever receives nothing gets zeros."""
    return jax.lax.ppermute(payload, CYCLIC, list(pairs)) if pairs else payload


def routed(table: Sequence[Pairs], index: jax.Array, payload: PyTree) -> PyTree:
    """``payload`` along ``table[index]``: one permutation if they are all the same, else a switch over the different ones.

    ``index`` must be the same on all devices.
    """
    different = list(dict.fromkeys(map(tuple, table)))
    if len(different) == 1:
        return permute(different[0], payload)
    branch = jnp.asarray([different.index(tuple(pairs)) for pairs in table])[index]
    return jax.lax.switch(branch, [partial(permute, pairs) for pairs in different], payload)
