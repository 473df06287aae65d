"""The interleaved executor: one device, N micro-batches that take turns in the schedule's order.

It runs the staggered schedule as a plain program: ops one after the other, every phase known when it is traced, no messages and no
guards. What N devices hold together in the replicated executor is held here by one, so the memory that the schedule promises can
be read off the compiler's own figures. On one device gradient accumulation, one micro-batch after the other, needs less memory
still: this executor is there to measure and to prove.

A stage is updated once its last worker's backward has ended, so theta_t and theta_{t-1} of each stage serve all workers. A call of
``step`` runs one period: late workers finish their step t − 1, and what they have in flight lives in the carry. The first period
and the drain are programs of their own.

The order is kept by ``jax.lax.optimization_barrier`` between ops. XLA for CPUs removes barriers before it orders the program, and
then runs all forwards as early as it can: there (and only there) the step is compiled without that pass, and with the order
that needs the least memory within an op (:data:`CPU_OPTIONS`).
"""

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
from cyclic_jax.executors.interleaved_period import Period, Plan
from cyclic_jax.executors.mesh import CYCLIC, DATA, check_mesh, check_processes
from cyclic_jax.executors.stage_op import StageOp, trace_ops
from cyclic_jax.executors.turns import updated_late
from cyclic_jax.optimizer import check_separate
from cyclic_jax.rules import UpdateRule
from cyclic_jax.schedule import Schedule
from cyclic_jax.stages import StagedModel
from cyclic_jax.state import Metrics, Snapshot, TrainState, mean_over_workers

PyTree = Any
CPU_OPTIONS: dict[str, Any] = {
    "xla_disable_hlo_passes": "cse_barrier_expander",
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InterleavedCarry:
    """Buffers by name, as in :mod:`cyclic_jax.executors.interleaved_period`; all on one device.

    Attributes:
        first_step: int32 scalar: T, the step of the state that training began from.
        calls: int32 scalar: calls of ``step`` since.
        key: the run's base key.
        held: both versions of each stage, optimizer state and statistics.
        flight: what a period leaves unfinished, and no more than that. ``None`` before the first step.
    """

    first_step: jax.Array
    calls: jax.Array
    key: jax.Array
    held: Memory
    flight: Memory | None


class InterleavedExecutor:
    """See the module's text. Made by :func:`cyclic_jax.make_executor`.

    ``residuals`` is ``"save"``, ``"recompute"`` or a ``jax.checkpoint`` policy. ``ordered=False`` leaves the order of the ops to
    the compiler: the same numbers, without the schedule's memory.
    """

    def __init__(
        self,
        model: StagedModel,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        *,
        rule: UpdateRule,
        schedule: Schedule | None = None,
        mesh: Mesh | None = None,
        residuals: str | Callable[..., bool] = "save",
        ordered: bool = True,
    ):
        check_rule(rule, model)
        self.schedule = schedule or Schedule.cyclic(rule.num_workers, rule.num_stages)
        rule.check(self.schedule)
        self.mesh = _one_device(mesh)
        self.model, self.loss, self.rule, self.ordered = model, loss, rule, ordered
        self.optimizer = optax.with_extra_args_support(optimizer)
        self.num_workers = rule.num_workers
        self.batch_sharding = NamedSharding(self.mesh, PartitionSpec())
        last = model.num_stages - 1
        self.ops = [StageOp(stage, loss if stage.index == last else None, residuals) for stage in model.stages]
        check_separate(self.optimizer, jax.eval_shape(model.init, jax.random.key(0))[0])
        self._late = updated_late(self.schedule)
        self._traced: Any = None
        self._compile()

    def _compile(self) -> None:
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        jit = partial(jax.jit, compiler_options=dict(CPU_OPTIONS) if self.ordered and on_cpu else None)
        self._jit_step = jit(self._step, donate_argnums=0)
        self._jit_drain = jit(self._drain)
        self._jit_spread = jax.jit(self._spread, out_shardings=self.batch_sharding)
        self._jit_gather = jax.jit(self._gather)
        self._jit_snapshot = jax.jit(self._snapshot)

    # ---- the face -------------------------------------------------------------------------------------------

    def init(self, state: TrainState) -> InterleavedCarry:
        """A canonical state on the device. ``state`` stays usable."""
        check_state(state, self.model, self.num_workers)
        return self._jit_spread(placed(state, self.mesh))

    def step(self, carry: InterleavedCarry, batch: Batch) -> tuple[InterleavedCarry, Metrics]:
        """One period; ``carry`` is donated. Late workers' losses belong to the step before (−1 where there is none)."""
        check_batch(batch, self.num_workers)
        batch = jax.device_put(batch, self.batch_sharding)
        self._trace(batch)
        return self._jit_step(carry, batch)

    def drain(self, carry: InterleavedCarry) -> tuple[TrainState, Metrics]:
        """Finish what is in flight; ``carry`` stays usable. Metrics are those of the micro-batches that end here."""
        if carry.flight is None:
            nothing = jnp.zeros(self.num_workers), jnp.full(self.num_workers, -1, jnp.int32)
            return self._jit_gather(carry), Metrics(*nothing)
        return self._jit_drain(carry)

    def snapshot(self, carry: InterleavedCarry) -> Snapshot:
        """Parameters of the newest step that every stage has completed; statistics are the workers' own, some a step older.

        ``carry`` stays usable.
        """
        return self._jit_snapshot(carry)

    def lower(self, carry: Any, batch: Batch) -> jax.stages.Lowered:
        """The step, lowered for arrays or structs: of the steady state, also for a carry that has not started."""
        check_batch(batch, self.num_workers)
        self._trace(batch)
        if carry.flight is None:
            carry = jax.eval_shape(self._step, carry, batch)[0]
        return self._jit_step.lower(carry, batch)

    def carry_struct(self, state: TrainState, batch: Batch | None = None) -> Any:
        """Shapes, dtypes and shardings of the carry that ``init`` makes; with a batch, of the one that ``step`` returns."""
        carry = jax.eval_shape(self._spread, state)
        if batch is not None:
            check_batch(batch, self.num_workers)
            self._trace(batch)
            carry = jax.eval_shape(self._step, carry, batch)[0]
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.batch_sharding), carry
        )

    # ---- canonical state <-> carry --------------------------------------------------------------------------

    def _spread(self, state: TrainState) -> InterleavedCarry:
        held: Memory = {}
        for j in range(self.model.num_stages):
            held[f"now{j}"], held[f"before{j}"] = state.params[j], state.previous_params[j]
            held[f"optimizer{j}"] = state.opt_state[j]
            for i in range(self.num_workers):
                held[f"state{i}/{j}"] = jax.tree.map(lambda leaf, i=i: leaf[i], state.model_state[j])
        # copies: the carry is donated, the state is not
        step, key, held = jax.tree.map(jnp.copy, (state.step, state.key, held))
        return InterleavedCarry(step, jnp.zeros((), jnp.int32), key, held, None)

    def _gather(self, carry: InterleavedCarry) -> TrainState:
        now, before, optimizer = (
            tuple(carry.held[f"{name}{j}"] for j in range(self.model.num_stages))
            for name in ("now", "before", "optimizer")
        )
        return TrainState(
            carry.first_step + carry.calls, carry.key, now, before, optimizer, self._model_state(carry.held)
        )

    def _model_state(self, held: Memory) -> tuple[PyTree, ...]:
        """With the worker axis ``[N, …]``."""
        workers = range(self.num_workers)
        return tuple(
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *(held[f"state{i}/{j}"] for i in workers))
            for j in range(self.model.num_stages)
        )

    def _snapshot(self, carry: InterleavedCarry) -> Snapshot:
        behind = carry.flight is not None and any(self._late)  # some stage has not had its last update yet
        names = ["before" if behind and not late else "now" for late in self._late]
        params = tuple(carry.held[f"{name}{j}"] for j, name in enumerate(names))
        state = mean_over_workers(self._model_state(carry.held))
        return Snapshot(carry.first_step + carry.calls - int(behind), params, state)

    # ---- the step -------------------------------------------------------------------------------------------

    def _trace(self, batch: Batch) -> None:
        """Learn the shapes of residuals from one micro-batch's structs."""

        def struct(leaf: Any) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
            return jax.ShapeDtypeStruct((leaf.shape[0] // self.num_workers, *leaf.shape[1:]), dtype)

        structs = jax.tree.map(struct, batch)
        if self._traced != structs:
            trace_ops(self.model, self.ops, *structs)
            self._traced = structs

    def _step(self, carry: InterleavedCarry, batch: Batch) -> tuple[InterleavedCarry, Metrics]:
        memory, metrics = self._run(carry, batch)
        held = {name: memory.pop(name) for name in carry.held}
        return replace(carry, calls=carry.calls + 1, held=held, flight=memory), metrics

    def _drain(self, carry: InterleavedCarry) -> tuple[TrainState, Metrics]:
        held, metrics = self._run(carry, None)
        return self._gather(replace(carry, held=held)), metrics

    def _run(self, carry: InterleavedCarry, batch: Batch | None) -> tuple[Memory, Metrics]:
        plan = Plan(self.schedule, self.ops, self._update, self.rule.fresh, self.ordered)
        step = carry.first_step + carry.calls
        period = Period(plan, carry.key, step, batch, started=carry.flight is not None)
        return period.run({**carry.held, **(carry.flight or {})})

    def _update(self, gradient: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = self.optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state


def _one_device(mesh: Mesh | None) -> Mesh:
    if mesh is None:
        return check_processes(Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), (DATA, CYCLIC)))
    if mesh.size != 1:
        raise ValueError(f"the interleaved executor runs on one device, and the mesh has {mesh.size}")
    return check_mesh(mesh, 1)
