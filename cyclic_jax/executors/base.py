"""What every executor offers, and the checks they share. All checks run before anything is traced."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cyclic_jax.rules import UpdateRule
from cyclic_jax.stages import StagedModel
from cyclic_jax.state import Metrics, Snapshot, TrainState

PyTree = Any
Loss = Callable[[PyTree, PyTree], jax.Array]
Batch = tuple[PyTree, PyTree]


class Executor(Protocol):
    """One realisation of the schedule. ``carry`` is opaque and donated: never use one after it was given to
    ``step``."""

    model: StagedModel
    rule: UpdateRule
    mesh: Mesh
    num_workers: int
    batch_sharding: NamedSharding

    def init(self, state: TrainState) -> Any:
        """A canonical state, spread over the devices."""

    def step(self, carry: Any, batch: Batch) -> tuple[Any, Metrics]:
        """One training step of every worker; jitted, ``carry`` donated."""

    def drain(self, carry: Any) -> tuple[TrainState, Metrics]:
        """Finish what is in flight. Metrics are those of the last steps that end here, with step −1 where there is
        none."""

    def snapshot(self, carry: Any) -> Snapshot:
        """Parameters of the newest complete step, for evaluation; training goes on from the same carry."""

    def lower(self, carry: Any, batch: Batch) -> jax.stages.Lowered:
        """The step, lowered for arrays or structs: compiled text, memory, cost."""

    def carry_struct(self, state: TrainState, batch: Batch | None = None) -> Any:
        """Shapes, dtypes and shardings of the carry that ``init`` makes of such a state; with a batch, arrays or structs, of the
        carry that ``step`` returns, with what is in flight."""


def check_rule(rule: UpdateRule, model: StagedModel) -> None:
    """The rule's mask must have a column for each stage."""
    if rule.num_stages != model.num_stages:
        raise ValueError(
            f"rule {rule.name!r} has {rule.num_stages} stages, the model has {model.num_stages}: they must be equal"
        )


def check_state(state: TrainState, model: StagedModel, num_workers: int) -> None:
    """Stages and worker axis of a canonical state must be the executor's."""
    if len(state.params) != model.num_stages:
        raise ValueError(f"the state has {len(state.params)} stages, the model has {model.num_stages}")
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.model_state):
        if leaf.shape[:1] != (num_workers,):
            raise ValueError(
                f"model_state{jax.tree_util.keystr(path)} has shape {leaf.shape}: its leading axis must be the "
                f"number of workers, {num_workers} (TrainState.create(..., num_workers={num_workers}))"
            )


def placed(state: TrainState, mesh: Mesh) -> TrainState:
    """``state`` where a program on the mesh can read it: leaves that lie on other devices are copied to each of the mesh's.

    With several processes each copies to its own devices, and what it has is taken to be what the others have.
    """
    everywhere, devices = NamedSharding(mesh, PartitionSpec()), set(mesh.devices.flat)

    def one(leaf: Any) -> Any:
        there = not isinstance(leaf, jax.Array) or not leaf.committed or leaf.sharding.device_set == devices
        return leaf if there else copied(leaf, everywhere)

    return jax.tree.map(one, state)


def copied(leaf: jax.Array, everywhere: NamedSharding) -> jax.Array:
    """``leaf`` on all devices of a sharding that splits nothing.

    Raises:
        ValueError: if this process has only a part of it.
    """
    if everywhere.is_fully_addressable and leaf.is_fully_addressable:
        return jax.device_put(leaf, everywhere)
    if not leaf.is_fully_replicated:
        raise ValueError(
            f"a leaf of shape {leaf.shape} lies in parts on several processes ({leaf.sharding}): gather it first"
        )
    own = [device for device in everywhere.mesh.devices.flat if device in everywhere.addressable_devices]
    copies = [jax.device_put(leaf.addressable_data(0), device) for device in own]
    return jax.make_array_from_single_device_arrays(leaf.shape, everywhere, copies)


def check_batch(batch: Batch, num_workers: int) -> None:
    """A batch is ``(inputs, targets)`` whose leaves share a leading axis that the number of workers divides."""
    if not (isinstance(batch, tuple) and len(batch) == 2):
        raise ValueError(f"a batch is a tuple (inputs, targets), got {type(batch).__name__}")
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or sizes == {()}:
        raise ValueError(f"all leaves of a batch must share their leading axis, got sizes {sorted(sizes)}")
    (rows,) = sizes.pop()
    if rows % num_workers or rows == 0:
        raise ValueError(f"a batch of {rows} rows cannot be divided among {num_workers} workers")
