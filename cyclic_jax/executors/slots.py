"""Slots: room for pytrees of whichever stage a device has, in flat vectors that are the same on all devices.

With one stage a device, what a device holds depends on its stage; but all run one program, whose buffers have one size. So
parameters, optimizer state, statistics and residuals lie in one vector for each dtype (mixed dtypes never share one: a promotion
would change their numbers), as long as the largest stage needs, one slot after the other.
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
Vectors = dict[str, jax.Array]  # dtype name -> vector


@dataclass(frozen=True)
class Slots:
    """``counts[j]`` slots for trees like ``structs[j]``, for each stage j."""

    structs: tuple[PyTree, ...]
    counts: tuple[int, ...]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Entries of each vector: what the largest stage needs."""
        names = sorted({name for sizes in self._stage_sizes for name in sizes})
        needs = list(zip(self.counts, self._stage_sizes, strict=True))
        return {name: max(count * sizes.get(name, 0) for count, sizes in needs) for name in names}

    @cached_property
    def _stage_sizes(self) -> tuple[dict[str, int], ...]:
        found = []
        for struct in self.structs:
            sizes: dict[str, int] = {}
            for leaf in map(_raw_struct, jax.tree.leaves(struct)):
                sizes[leaf.dtype.name] = sizes.get(leaf.dtype.name, 0) + prod(leaf.shape)
            found.append(sizes)
        return tuple(found)

    @property
    def num_bytes(self) -> int:
        """Bytes of the vectors on each device."""
        return sum(size * np.dtype(name).itemsize for name, size in self.sizes.items())

    def used_bytes(self, j: int) -> int:
        """Bytes that stage j fills, without the padding."""
        sizes = self._stage_sizes[j].items()
        return self.counts[j] * sum(size * np.dtype(name).itemsize for name, size in sizes)

    def full(self, fill: float) -> Vectors:
        """Vectors that hold ``fill`` (zero where the dtype is no float)."""
        return {
            name: jnp.full(size, fill if jnp.issubdtype(name, jnp.inexact) else 0, name)
            for name, size in self.sizes.items()
        }

    def read(self, j: int, vectors: Vectors, slot: jax.Array | int = 0) -> PyTree:
        """The tree of stage j in a slot."""
        leaves, structure = jax.tree.flatten(self.structs[j])
        places = self._places(j, slot)
        return jax.tree.unflatten(
            structure,
            [
                _cooked(leaf, _slice(vectors[name], at, prod(raw.shape)).reshape(raw.shape))
                for leaf, (name, at, raw) in zip(leaves, places, strict=True)
            ],
        )

    def write(self, j: int, vectors: Vectors, tree: PyTree, slot: jax.Array | int = 0) -> Vectors:
        """``vectors`` with a tree of stage j in a slot."""
        return self.change(j, vectors, lambda _, leaf: _raw(leaf), tree, slot)

    def change(
        self,
        j: int,
        vectors: Vectors,
        change: Callable[[jax.Array, jax.Array], jax.Array],
        tree: PyTree,
        slot: jax.Array | int = 0,
    ) -> Vectors:
        """``vectors`` with ``change(old, leaf)`` in the place of each old leaf, one after the other and in place."""
        for leaf, (name, at, raw) in zip(jax.tree.leaves(tree), self._places(j, slot), strict=True):
            old = _slice(vectors[name], at, prod(raw.shape)).reshape(raw.shape)
            entries = change(old, leaf).astype(raw.dtype).ravel()
            vectors = {**vectors, name: jax.lax.dynamic_update_slice(vectors[name], entries, (at,))}
        return vectors

    def _places(self, j: int, slot: jax.Array | int) -> list[tuple[str, Any, Any]]:
        """For each leaf its vector, its first entry there, and its struct."""
        at = {name: slot * size for name, size in self._stage_sizes[j].items()}
        places = []
        for raw in map(_raw_struct, jax.tree.leaves(self.structs[j])):
            places.append((raw.dtype.name, at[raw.dtype.name], raw))
            at[raw.dtype.name] = at[raw.dtype.name] + prod(raw.shape)
        return places


def per_stage(structs: Sequence[PyTree], counts: int | Sequence[int] = 1) -> Slots:
    """Slots for one struct a stage; one count for all or one each."""
    counts = [counts] * len(structs) if isinstance(counts, int) else counts
    return Slots(tuple(structs), tuple(counts))


def _slice(vector: jax.Array, at: jax.Array | int, size: int) -> jax.Array:
    if isinstance(at, int):
        return vector[at : at + size]
    return jax.lax.dynamic_slice(vector, (at,), (size,))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _raw_struct(leaf: Any) -> Any:
    return jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf


def _raw(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _cooked(struct: Any, entries: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(entries) if _is_key(struct) else entries
