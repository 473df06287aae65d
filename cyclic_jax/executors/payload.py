"""Payloads: the gradients of one stage as flat vectors, one for each dtype, all stages padded to the largest.

Every device runs the same program, so a message has one size whichever stage it carries; mixed dtypes never share a vector, since a
promotion would change their numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
Payload = dict[str, jax.Array]  # dtype name -> vector


@dataclass(frozen=True)
class PayloadFormat:
    """How the pytrees of each stage lie in a payload. ``structs`` has one pytree of structs per stage."""

    structs: tuple[PyTree, ...]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Entries of each dtype's vector: those of the largest stage."""
        each = [self._sizes(j) for j in range(len(self.structs))]
        return {name: max(size.get(name, 0) for size in each) for name in sorted(set().union(*each))}

    @property
    def num_bytes(self) -> int:
        """Bytes of one payload."""
        return sum(size * np.dtype(name).itemsize for name, size in self.sizes.items())

    def stage_bytes(self, stage: int) -> int:
        """Bytes of one stage's entries, without the padding."""
        return sum(size * np.dtype(name).itemsize for name, size in self._sizes(stage).items())

    def full(self, fill: float) -> Payload:
        """A payload that holds ``fill`` everywhere."""
        return {name: jnp.full(size, fill, name) for name, size in self.sizes.items()}

    def _sizes(self, stage: int) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for leaf in jax.tree.leaves(self.structs[stage]):
            sizes[leaf.dtype.name] = sizes.get(leaf.dtype.name, 0) + leaf.size
        return sizes

    def unpack(self, stage: int, payload: Payload) -> PyTree:
        """The pytree of a stage."""
        leaves, structure = jax.tree.flatten(self.structs[stage])
        return jax.tree.unflatten(structure, [self.leaf(stage, payload, k) for k in range(len(leaves))])

    def leaf(self, stage: int, payload: Payload, k: int) -> jax.Array:
        """Leaf k of that pytree."""
        struct, at = self._places(stage)[k]
        return payload[struct.dtype.name][at : at + prod(struct.shape)].reshape(struct.shape)

    def _places(self, stage: int) -> list[tuple[Any, int]]:
        """For each leaf its struct and its first entry."""
        at: dict[str, int] = {}
        places = []
        for leaf in jax.tree.leaves(self.structs[stage]):
            places.append((leaf, at.setdefault(leaf.dtype.name, 0)))
            at[leaf.dtype.name] += prod(leaf.shape)
        return places

    def change(
        self, stage: int, payload: Payload, change: Callable[[jax.Array, jax.Array], jax.Array], tree: PyTree
    ) -> Payload:
        """``payload`` with ``change(old, leaf)`` in the place of each old leaf of a stage, one after the other and in place."""
        for k, (leaf, (struct, at)) in enumerate(zip(jax.tree.leaves(tree), self._places(stage), strict=True)):
            name, new = struct.dtype.name, change(self.leaf(stage, payload, k), leaf).astype(struct.dtype).ravel()
            payload = {**payload, name: jax.lax.dynamic_update_slice(payload[name], new, (at,))}
        return payload

    def flatten(self, stage: int, tree: PyTree) -> Payload:
        """The vectors of a stage's pytree, without the padding."""
        leaves: dict[str, list[jax.Array]] = {name: [] for name in self._sizes(stage)}
        for struct, leaf in zip(jax.tree.leaves(self.structs[stage]), jax.tree.leaves(tree), strict=True):
            leaves[struct.dtype.name].append(leaf.astype(struct.dtype).ravel())
        return {name: _concatenate(parts) for name, parts in leaves.items()}

    def put(self, stage: int, tree: PyTree, payload: Payload) -> Payload:
        """``payload`` with the pytree of a stage at its beginning."""
        return self.change(stage, payload, lambda _, leaf: leaf, tree)

    def write(self, flat: Payload, payload: Payload) -> Payload:
        """``payload`` with a stage's vectors written over its beginning."""
        return {
            name: jax.lax.dynamic_update_slice(vector, flat[name], (0,)) if name in flat else vector
            for name, vector in payload.items()
        }


def _concatenate(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
