"""A pytree as a flat dict of plain arrays by name, which is what lies on disk; and a fingerprint of it.

Keys of random numbers become their data, and empty arrays are left out: the format has no place for either. The storage library
finds a file that was cut short or whose index is damaged, but not a bit that has changed within an array (measured); the
fingerprint does.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
Flat = dict[str, Any]
ODD = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1)  # multipliers, one for each axis in turn


def flatten(tree: PyTree) -> Flat:
    """Every leaf that is not empty, by its path; arrays or structs. Keys of random numbers as their data."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path).lstrip("."): _data(leaf) for path, leaf in leaves if math.prod(leaf.shape)}


def unflatten(flat: Mapping[str, Any], like: PyTree) -> PyTree:
    """The inverse; ``like`` is the tree of structs."""

    def one(path: Any, struct: Any) -> Any:
        name = jax.tree_util.keystr(path).lstrip(".")
        if name not in flat:  # an empty array
            return jax.device_put(jnp.zeros(struct.shape, struct.dtype), struct.sharding)
        if not _is_key(struct):
            return flat[name]
        return jax.random.wrap_key_data(flat[name], impl=_implementation(struct))

    return jax.tree_util.tree_map_with_path(one, like)


def described(flat: Mapping[str, Any]) -> dict[str, str]:
    """Dtype and shape of each leaf.

    >>> described({"w": jnp.zeros((2, 3), jnp.float32)})
    {'w': 'float32[2, 3]'}
    """
    return {name: f"{leaf.dtype.name}{list(leaf.shape)}" for name, leaf in flat.items()}


def fingerprint(flat: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """A uint32 for each array: the sum of its words, each times an odd number that depends on its place, modulo 2³².

    One changed word always changes it, and so do, but for a chance of about 2⁻³², several. Sharded arrays stay where they are.
    """
    return {name: _fingerprint(leaf) for name, leaf in flat.items()}


def _fingerprint(array: jax.Array) -> jax.Array:
    if array.dtype == bool:
        array = array.astype(jnp.uint8)
    word = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    words = jax.lax.bitcast_convert_type(array, word).astype(jnp.uint32)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(words.ndim):
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        place = (place + along) * jnp.uint32(ODD[axis % len(ODD)])
    return jnp.sum(words * (2 * place + 1), dtype=jnp.uint32)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf: Any) -> Any:
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _implementation(struct: Any) -> Any:
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), struct)
    return found[0]


def numbers(fingerprints: Mapping[str, jax.Array]) -> dict[str, int]:
    """As integers of Python; waits for the devices."""
    return {name: int(np.asarray(value)) for name, value in fingerprints.items()}
