"""What owners have: parameters and optimizer state of whichever stage it is, in buffers that are the same on all devices.

If the optimizer works entry by entry (:mod:`cyclic_jax.entrywise`), parameters and everything it remembers of them are vectors that
an update changes in place, as a whole. Otherwise parameters and state lie in one vector for each dtype, and an update takes the
leaves out and puts them back, for which the compiler makes copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from cyclic_jax.entrywise import Entrywise, Init, Update
from cyclic_jax.executors.payload import Payload, PayloadFormat
from cyclic_jax.executors.slots import Slots, per_stage

PyTree = Any


class Shares(Protocol):
    """Room for one of some stages: ``params`` and ``state`` below are the buffers of the two."""

    def empty(self) -> tuple[PyTree, PyTree]:
        """The buffers of a device that has no stage."""

    def put(self, j: int, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """The buffers of a device that has stage j."""

    def params(self, j: int, params: PyTree) -> PyTree:
        """The parameters of stage j."""

    def state(self, j: int, state: PyTree) -> PyTree:
        """Its optimizer state."""

    def update(self, j: int, gradient: Payload, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """The buffers after an update of stage j with a gradient payload."""


def make_shares(init: Init, update: Update, params: Sequence[PyTree], stages: Sequence[int]) -> Shares:
    """Room for one of ``stages``.

    Args:
        init: of the optimizer, for one stage.
        update: ``update(gradient, state, params) -> (params, state)`` of one stage.
        params: structs of all stages.
        stages: those that a device may have.
    """
    kept = tuple(p if j in stages else {} for j, p in enumerate(params))
    found = {j: Entrywise.of(init, update, params[j]) for j in stages}
    forms = {(jax.tree.structure(e.flat_state), _dtypes(e.flat_state)) if e else None for e in found.values()}
    if len(forms) == 1 and None not in forms:
        return VectorShares(PayloadFormat(kept), {j: e for j, e in found.items() if e}, update)
    state = [jax.eval_shape(init, p) if j in stages else {} for j, p in enumerate(params)]
    return TreeShares(PayloadFormat(tuple(params)), per_stage(kept), per_stage(state), update)


def _dtypes(tree: PyTree) -> tuple[Any, ...]:
    return tuple(leaf.dtype for leaf in jax.tree.leaves(tree))


@dataclass(frozen=True)
class VectorShares:
    """For an optimizer that works entry by entry. What is beyond the stage's own entries is never read."""

    format: PayloadFormat
    stages: dict[int, Entrywise]
    change: Update

    def empty(self) -> tuple[PyTree, PyTree]:
        """See :class:`Shares`."""
        structs = [e.flat_state for e in self.stages.values()]
        sizes = jax.tree.map(lambda *leaves: max(leaf.size for leaf in leaves), *structs)
        zeros = jax.tree.map(lambda leaf, n: jnp.zeros(n if leaf.ndim else (), leaf.dtype), structs[0], sizes)
        return self.format.full(0.0), zeros

    def put(self, j: int, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """See :class:`Shares`."""
        no_params, no_state = self.empty()

        def fill(room: jax.Array, leaf: jax.Array) -> jax.Array:
            return room.at[: leaf.size].set(leaf) if room.ndim else leaf

        return self.format.put(j, params, no_params), jax.tree.map(fill, no_state, self.stages[j].pack(state))

    def params(self, j: int, params: PyTree) -> PyTree:
        """See :class:`Shares`."""
        return self.format.unpack(j, params)

    def state(self, j: int, state: PyTree) -> PyTree:
        """See :class:`Shares`."""
        return self.stages[j].unpack(state)

    def update(self, j: int, gradient: Payload, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """See :class:`Shares`."""
        gradient = {name: gradient[name][: vector.size] for name, vector in params.items()}
        return self.change(gradient, state, params)


@dataclass(frozen=True)
class TreeShares:
    """For any optimizer that treats each stage on its own."""

    format: PayloadFormat
    param_slots: Slots
    state_slots: Slots
    change: Update

    def empty(self) -> tuple[PyTree, PyTree]:
        """See :class:`Shares`."""
        return self.param_slots.full(0.0), self.state_slots.full(0.0)

    def put(self, j: int, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """See :class:`Shares`."""
        no_params, no_state = self.empty()
        return self.param_slots.write(j, no_params, params), self.state_slots.write(j, no_state, state)

    def params(self, j: int, params: PyTree) -> PyTree:
        """See :class:`Shares`."""
        return self.param_slots.read(j, params)

    def state(self, j: int, state: PyTree) -> PyTree:
        """See :class:`Shares`."""
        return self.state_slots.read(j, state)

    def update(self, j: int, gradient: Payload, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """See :class:`Shares`."""
        new, new_state = self.change(self.format.unpack(j, gradient), self.state(j, state), self.params(j, params))
        return self.param_slots.write(j, params, new), self.state_slots.write(j, state, new_state)
