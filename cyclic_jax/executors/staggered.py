"""What executors that keep micro-batches in flight between calls have in common: the carry, and the face."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cyclic_jax.executors.base import Batch, Loss, check_batch, check_rule, check_state, placed
from cyclic_jax.executors.guard import Memory
from cyclic_jax.executors.placing import place, widen, widened
from cyclic_jax.executors.stage_op import StageOp, trace_ops
from cyclic_jax.optimizer import check_separate
from cyclic_jax.rules import UpdateRule
from cyclic_jax.schedule import Schedule
from cyclic_jax.stages import StagedModel
from cyclic_jax.state import Metrics, Snapshot, TrainState

PyTree = Any
EVERYWHERE = PartitionSpec()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StaggeredCarry:
    """Buffers by name; those of ``held`` and ``flight`` have a leading axis over devices, sharded along it.

    Attributes:
        first_step: int32 scalar: T, the step of the state that training began from.
        calls: int32 scalar: calls of ``step`` since.
        key: the run's base key.
        held: parameters, optimizer state and statistics.
        flight: what a step leaves unfinished. ``None`` before the first step, which tells its shapes.
    """

    first_step: jax.Array
    calls: jax.Array
    key: jax.Array
    held: Memory
    flight: Memory | None


class Staggered:
    """The face of such an executor. A subclass lays the state out and runs one period.

    ``residuals`` is ``"save"``, ``"recompute"`` or a ``jax.checkpoint`` policy. ``fill`` is what buffers hold before they are first
    written; it is never read (tests make it NaN).
    """

    mesh: Mesh
    num_workers: int
    batch_sharding: NamedSharding

    def __init__(
        self,
        model: StagedModel,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        *,
        rule: UpdateRule,
        schedule: Schedule,
        residuals: str | Callable[..., bool],
        fill: float,
    ):
        check_rule(rule, model)
        rule.check(schedule)
        self.model, self.loss, self.rule, self.schedule, self.fill = model, loss, rule, schedule, fill
        self.optimizer = optax.with_extra_args_support(optimizer)
        platform, last = self.mesh.devices.flat[0].platform, model.num_stages - 1
        self.ops = [StageOp(s, loss if s.index == last else None, residuals, platform) for s in model.stages]
        self.structs = jax.eval_shape(model.init, jax.random.key(0))  # parameters and statistics, by stage
        check_separate(self.optimizer, self.structs[0])
        self._traced: Any = None  # structs of one micro-batch

    def _compile(self, devices: PartitionSpec) -> None:
        """``devices``: the spec of a leading axis over all devices."""
        everywhere, each = NamedSharding(self.mesh, EVERYWHERE), NamedSharding(self.mesh, devices)
        self._each, specs = each, _laid_out(EVERYWHERE, devices)
        self._shardings = _laid_out(everywhere, each)
        sharded = partial(jax.shard_map, mesh=self.mesh, check_vma=False)
        step = sharded(self._device_step, in_specs=(specs, devices), out_specs=(specs, devices))
        drain = sharded(lambda carry: self._run(carry, None), in_specs=(specs,), out_specs=devices)
        self._jit_step = jax.jit(step, donate_argnums=0)
        self._jit_spread = jax.jit(self._spread, out_shardings=self._shardings)
        self._jit_flight = jax.jit(self._flight, out_shardings=each)
        self._jit_snapshot = jax.jit(self._snapshot, out_shardings=everywhere)
        self._jit_gather = jax.jit(self._gather, out_shardings=everywhere)
        self._jit_drain = jax.jit(lambda carry: self._drained(carry, drain(carry)), out_shardings=everywhere)

    # ---- what a subclass brings -----------------------------------------------------------------------------

    def _spread(self, state: TrainState) -> StaggeredCarry:
        """A canonical state as a carry that has not started."""
        raise NotImplementedError

    def _gather(self, carry: StaggeredCarry) -> TrainState:
        """A carry that has nothing in flight as a canonical state."""
        raise NotImplementedError

    def _snapshot(self, carry: StaggeredCarry) -> Snapshot:
        raise NotImplementedError

    def _flight(self) -> Memory:
        """Buffers of what will be in flight, from what ``_trace`` has learned."""
        raise NotImplementedError

    def _run(self, carry: StaggeredCarry, batch: Batch | None) -> Memory:
        """One period on one device; without a batch it drains. Buffers have their leading axis, here of length 1."""
        raise NotImplementedError

    def _losses(self, memory: Memory) -> Memory:
        """The losses that a period has seen, by device one after the other."""
        return {name: memory[name].reshape(-1) for name in ("loss", "loss_step")}

    def _metrics(self, losses: Memory) -> Metrics:
        """Each worker's loss, out of them."""
        raise NotImplementedError

    def _leaving(self, losses: Memory) -> Metrics:
        """The same after a step, without a program over all devices, which would make each of them wait for the last."""
        return self._metrics(losses)

    # ---- the face -------------------------------------------------------------------------------------------

    def init(self, state: TrainState) -> StaggeredCarry:
        """A canonical state, spread over the devices. ``state`` stays usable."""
        check_state(state, self.model, self.num_workers)
        return self._jit_spread(placed(state, self.mesh))

    def step(self, carry: StaggeredCarry, batch: Batch) -> tuple[StaggeredCarry, Metrics]:
        """One period; ``carry`` is donated. Late micro-batches' losses belong to the step before (−1 where there is none)."""
        batch = place(batch, self.batch_sharding, self.num_workers)
        self._trace(batch)
        if carry.flight is None:
            carry = replace(carry, flight=self._jit_flight())
        carry, losses = self._jit_step(carry, widen(batch, self._batch_layout))
        return carry, self._leaving(losses)

    def drain(self, carry: StaggeredCarry) -> tuple[TrainState, Metrics]:
        """Finish what is in flight; ``carry`` stays usable. Metrics are those of the micro-batches that end here."""
        if carry.flight is None:
            nothing = jnp.zeros(self.num_workers), jnp.full(self.num_workers, -1, jnp.int32)
            return self._jit_gather(carry), Metrics(*nothing)
        return self._jit_drain(carry)

    def snapshot(self, carry: StaggeredCarry) -> Snapshot:
        """Parameters of the newest complete step; statistics are the workers' own, some a step older. ``carry`` stays usable."""
        return self._jit_snapshot(replace(carry, flight=None))

    def lower(self, carry: Any, batch: Batch) -> jax.stages.Lowered:
        """The step, lowered for arrays or structs."""
        check_batch(batch, self.num_workers)
        self._trace(batch)
        if carry.flight is None:
            carry = replace(carry, flight=jax.eval_shape(self._flight))

        def struct(leaf: Any) -> jax.ShapeDtypeStruct:
            shape, dtype = np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype)
            return jax.ShapeDtypeStruct(widened(shape, self.batch_sharding, self._batch_layout), dtype)

        return self._jit_step.lower(carry, jax.tree.map(struct, batch))

    def carry_struct(self, state: TrainState, batch: Batch | None = None) -> Any:
        """Shapes, dtypes and shardings of the carry that ``init`` makes; with a batch, of the one that ``step`` returns."""
        structs = jax.eval_shape(self._spread, state)

        def put(sharding: NamedSharding, part: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), part)

        parts = {name: put(getattr(self._shardings, name), getattr(structs, name)) for name in _CARRIED}
        if batch is None:
            return StaggeredCarry(**parts, flight=None)
        check_batch(batch, self.num_workers)
        self._trace(batch)
        return StaggeredCarry(**parts, flight=put(self._shardings.flight, jax.eval_shape(self._flight)))

    _first_layer: jax.ShapeDtypeStruct | None = None  # where stages that are alike share a program

    # ---- shared parts ---------------------------------------------------------------------------------------

    _batch_layout: NamedSharding  # as batch_sharding; or over more devices, those that it lacks holding no rows

    def _micro_batch(self, batch: Batch) -> Batch:
        """The structs of one."""

        def struct(leaf: Any) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
            return jax.ShapeDtypeStruct((leaf.shape[0] // self.num_workers, *leaf.shape[1:]), dtype)

        return jax.tree.map(struct, batch)

    def _trace(self, batch: Batch) -> None:
        """Learn the shapes of everything in flight from one micro-batch's structs."""

        structs = self._micro_batch(batch)
        if self._traced != structs:
            trace_ops(self.model, self.ops, *structs, first_layer=self._first_layer)
            self._traced = structs

    def _device_step(self, carry: StaggeredCarry, batch: Batch) -> tuple[StaggeredCarry, Memory]:
        memory = self._run(carry, batch)
        held, flight = ({name: memory[name] for name in part} for part in (carry.held, carry.flight))  # type: ignore[union-attr]
        return replace(carry, calls=carry.calls + 1, held=held, flight=flight), self._losses(memory)

    def _drained(self, carry: StaggeredCarry, memory: Memory) -> tuple[TrainState, Metrics]:
        held = {name: memory[name] for name in carry.held}
        return self._gather(replace(carry, held=held, flight=None)), self._metrics(self._losses(memory))

    def _update(self, gradient: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = self.optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state


_CARRIED = ("first_step", "calls", "key", "held")


def _laid_out(everywhere: Any, devices: Any) -> Any:
    """How a carry lies on the mesh: ``devices`` for what has a leading axis over them."""
    return StaggeredCarry(everywhere, everywhere, everywhere, devices, devices)
