"""The replicated executor: N devices, a full copy each, gradients point to point, no barrier and no all-reduce.

Each worker adds its gradient of a stage to the partial sum that comes around the ring and sends it on; worker N−1 completes the
sum and hands it to the first worker that can use it; from there it rides the forwards. Each worker applies the optimizer itself,
just before its own forward needs the newer version. One protocol serves every rule that the schedule can run (derived;
``docs/method.md``).

A call of ``step`` runs one period: worker i finishes the tail of its step t − 1 and begins step t, so micro-batches, targets and
sums in flight live in the carry. With D data groups, each is a ring of its own; worker N−1 of each averages a finished sum over
the groups.
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

from cyclic_jax.executors.base import Batch, Loss, check_batch, check_rule, check_state
from cyclic_jax.executors.guard import Memory
from cyclic_jax.executors.mesh import CYCLIC, DATA, ring_mesh
from cyclic_jax.executors.payload import PayloadFormat
from cyclic_jax.executors.replicated_period import Clock, Period, Plan
from cyclic_jax.executors.ring import Ring
from cyclic_jax.executors.stage_op import Inputs, StageOp, split
from cyclic_jax.optimizer import check_separate
from cyclic_jax.rules import UpdateRule
from cyclic_jax.schedule import Schedule
from cyclic_jax.stages import StagedModel
from cyclic_jax.state import Metrics, Snapshot, TrainState, mean_over_workers

PyTree = Any
WORKERS, EVERYWHERE = PartitionSpec((DATA, CYCLIC)), PartitionSpec()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReplicatedCarry:
    """Buffers by name; those of ``held`` and ``flight`` have a worker axis ``[D·N, …]``, sharded along it.

    Attributes:
        first_step: int32 scalar: T, the step of the state that training began from.
        calls: int32 scalar: calls of ``step`` since.
        key: the run's base key.
        held: each worker's parameters, optimizer state, pending sums and statistics, by stage.
        flight: what a step leaves unfinished: residuals, activations, cotangents, targets, sums on their way. ``None`` before
            the first step, which tells their shapes.
    """

    first_step: jax.Array
    calls: jax.Array
    key: jax.Array
    held: Memory
    flight: Memory | None


class ReplicatedExecutor:
    """See the module's text. Made by :func:`cyclic_jax.make_executor`.

    ``residuals`` is ``"save"``, ``"recompute"`` or a ``jax.checkpoint`` policy. ``fill`` is what buffers hold before they are first
    written; it is never read (tests make it NaN).
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
        fill: float = 0.0,
    ):
        check_rule(rule, model)
        self.schedule = schedule or Schedule.cyclic(rule.num_workers, rule.num_stages)
        rule.check(self.schedule)
        self.mesh = ring_mesh(mesh, rule.num_workers)
        self.model, self.loss, self.rule, self.fill = model, loss, rule, fill
        self.optimizer = optax.with_extra_args_support(optimizer)
        self.ring = Ring(self.schedule)
        self.num_workers = rule.num_workers * self.mesh.shape[DATA]
        self.batch_sharding = NamedSharding(self.mesh, WORKERS)
        last = model.num_stages - 1
        platform = self.mesh.devices.flat[0].platform
        self.ops = [
            StageOp(stage, loss if stage.index == last else None, residuals, platform) for stage in model.stages
        ]
        params, _ = jax.eval_shape(model.init, jax.random.key(0))
        check_separate(self.optimizer, params)
        self.format = PayloadFormat(params)
        # worker i keeps a sum pending iff it is delayed and the sum reaches it a step before it may use it
        workers = np.arange(rule.num_workers)[:, None]
        self._traced: Any = None
        self.keeps = ~rule.fresh & (workers >= np.array(self.ring.first_users))
        self._compile()

    def _compile(self) -> None:
        everywhere, specs = NamedSharding(self.mesh, EVERYWHERE), self._carry_specs()
        sharded = partial(jax.shard_map, mesh=self.mesh, check_vma=False)
        step = sharded(self._device_step, in_specs=(specs, WORKERS), out_specs=(specs, WORKERS))
        drain = sharded(self._device_drain, in_specs=(specs,), out_specs=(WORKERS, WORKERS))
        self._jit_step = jax.jit(step, donate_argnums=0)
        self._jit_drain = jax.jit(lambda carry: self._canonical(carry, *drain(carry)), out_shardings=everywhere)
        self._jit_spread = jax.jit(self._spread, out_shardings=self._carry_shardings())
        self._jit_flight = jax.jit(self._flight, out_shardings=self.batch_sharding)
        self._jit_snapshot = jax.jit(self._snapshot, out_shardings=everywhere)
        self._jit_unstarted = jax.jit(self._unstarted, out_shardings=everywhere)

    def _carry_specs(self) -> Any:
        return _laid_out(EVERYWHERE, WORKERS)

    def _carry_shardings(self) -> Any:
        return _laid_out(NamedSharding(self.mesh, EVERYWHERE), self.batch_sharding)

    # ---- the face -------------------------------------------------------------------------------------------

    def init(self, state: TrainState) -> ReplicatedCarry:
        """A canonical state, spread over the devices. ``state`` stays usable."""
        check_state(state, self.model, self.num_workers)
        return self._jit_spread(state)

    def step(self, carry: ReplicatedCarry, batch: Batch) -> tuple[ReplicatedCarry, Metrics]:
        """One period; ``carry`` is donated. Late workers' losses belong to the step before (−1 where there is none)."""
        check_batch(batch, self.num_workers)
        batch = jax.device_put(batch, self.batch_sharding)
        self._trace(batch)
        if carry.flight is None:
            carry = replace(carry, flight=self._jit_flight())
        return self._jit_step(carry, batch)

    def drain(self, carry: ReplicatedCarry) -> tuple[TrainState, Metrics]:
        """Finish what is in flight; ``carry`` stays usable. Metrics are those of the micro-batches that end here."""
        if carry.flight is None:
            nothing = jnp.zeros(self.num_workers), jnp.full(self.num_workers, -1, jnp.int32)
            return self._jit_unstarted(carry), Metrics(*nothing)
        return self._jit_drain(carry)

    def snapshot(self, carry: ReplicatedCarry) -> Snapshot:
        """Parameters of the newest complete step; statistics are the workers' own, some a step older. ``carry`` stays usable."""
        return self._jit_snapshot(replace(carry, flight=None))

    def lower(self, carry: Any, batch: Batch) -> jax.stages.Lowered:
        """The step, lowered for arrays or structs."""
        check_batch(batch, self.num_workers)
        self._trace(batch)
        if carry.flight is None:
            carry = replace(carry, flight=jax.eval_shape(self._flight))
        return self._jit_step.lower(carry, batch)

    def carry_struct(self, state: TrainState) -> Any:
        """Shapes, dtypes and shardings of the carry that ``init`` makes."""
        structs, shardings = jax.eval_shape(self._spread, state), self._carry_shardings()

        def put(sharding: NamedSharding, part: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), part)

        return ReplicatedCarry(
            put(shardings.first_step, structs.first_step),
            put(shardings.calls, structs.calls),
            put(shardings.key, structs.key),
            put(shardings.held, structs.held),
            None,
        )

    # ---- canonical state <-> carry --------------------------------------------------------------------------

    def _spread(self, state: TrainState) -> ReplicatedCarry:
        """A delayed worker holds theta_{T−1} and finds theta_T pending; for a fresh one it is the other way round."""
        fresh, held = np.tile(self.rule.fresh, (self.mesh.shape[DATA], 1)), {}

        def choose(row: np.ndarray, first: PyTree, second: PyTree) -> PyTree:
            return jax.tree.map(lambda a, b: jax.vmap(lambda yes: jnp.where(yes, a, b))(row), first, second)

        for j, (now, before) in enumerate(zip(state.params, state.previous_params, strict=True)):
            held[f"params{j}"] = choose(fresh[:, j], now, before)
            held[f"pending{j}"] = choose(fresh[:, j], before, now)
            held[f"optimizer{j}"] = jax.tree.map(
                lambda leaf: jnp.repeat(leaf[None], self.num_workers, axis=0), state.opt_state[j]
            )
            held[f"state{j}"] = state.model_state[j]
        return ReplicatedCarry(state.step, jnp.zeros((), jnp.int32), state.key, held, None)

    def _newest(self, carry: ReplicatedCarry, j: int) -> tuple[PyTree, PyTree, PyTree]:
        """theta, the one before and the optimizer's state of stage j, read where its sum arrives first.

        theta is the version that fresh workers saw in the last call. The one before is right as long as no call was made.
        """
        e = self.ring.first_users[j]
        names = (f"params{j}", f"pending{j}", f"optimizer{j}")
        params, pending, state = (jax.tree.map(lambda leaf: leaf[e], carry.held[name]) for name in names)
        if self.rule.fresh[e, j]:
            return params, pending, state
        applied, applied_state = self._update(pending, state, params)
        staged = carry.calls <= 1  # what is pending is theta_T itself, no sum has arrived yet
        theta = _where(staged, pending, applied)
        return theta, params, _where(staged, state, applied_state)

    def _snapshot(self, carry: ReplicatedCarry) -> Snapshot:
        stages = range(self.model.num_stages)
        params = tuple(self._newest(carry, j)[0] for j in stages)
        state = mean_over_workers(tuple(carry.held[f"state{j}"] for j in stages))
        return Snapshot(carry.first_step + jnp.maximum(carry.calls - 1, 0), params, state)

    def _unstarted(self, carry: ReplicatedCarry) -> TrainState:
        """The state that ``init`` was given."""
        newest = [self._newest(carry, j) for j in range(self.model.num_stages)]
        return self._state(carry, carry.held, *(tuple(parts) for parts in zip(*newest, strict=True)))

    def _canonical(self, carry: ReplicatedCarry, memory: Memory, metrics: Metrics) -> tuple[TrainState, Metrics]:
        """theta_t from where each sum arrives first, theta_{t+1} by the sum that the drain brought there."""
        params, previous, opt_state = [], [], []
        for j, e in enumerate(self.ring.first_users):
            theta, _, state = self._newest(carry, j)
            final = jax.tree.map(lambda leaf, e=e: leaf[e], memory[f"final{j}"])
            new, state = self._update(final, state, theta)
            params.append(new)
            previous.append(theta)
            opt_state.append(state)
        return self._state(carry, memory, tuple(params), tuple(previous), tuple(opt_state)), metrics

    def _state(self, carry: ReplicatedCarry, memory: Memory, params: Any, previous: Any, opt_state: Any) -> TrainState:
        model_state = tuple(memory[f"state{j}"] for j in range(self.model.num_stages))
        return TrainState(carry.first_step + carry.calls, carry.key, params, previous, opt_state, model_state)

    # ---- what is in flight ----------------------------------------------------------------------------------

    def _trace(self, batch: Batch) -> None:
        """Learn the shapes of everything in flight from one micro-batch's structs."""

        def struct(leaf: Any) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
            return jax.ShapeDtypeStruct((leaf.shape[0] // self.num_workers, *leaf.shape[1:]), dtype)

        x, targets = structs = jax.tree.map(struct, batch)
        if self._traced == structs:
            return
        params, states = jax.eval_shape(self.model.init, jax.random.key(0))
        key, flight = jax.eval_shape(lambda: jax.random.key(0)), {"targets": targets}
        for j, op in enumerate(self.ops):
            if j:
                flight[f"x{j}"] = x
                flight[f"cotangent{j}"], _ = split(x)
            op.trace(params[j], Inputs(x, states[j], key, targets if op.loss else None))
            flight[f"residuals{j}"], x = op.residual_structs, op.output_struct
        flight["loss"], flight["loss_step"] = x, jax.ShapeDtypeStruct((), jnp.int32)
        self._flight_structs, self._traced = flight, structs

    def _flight(self) -> Memory:
        payload = jax.eval_shape(partial(self.format.full, 0.0))
        boxes = {f"box{q}": payload for q in range(len(self.ring.beats))}
        handed = {f"handed{c}": payload for c in range(max(self.ring.boxes) + 1)}
        structs = {**self._flight_structs, **boxes, **handed}
        return jax.tree.map(lambda struct: _filled(struct, self.num_workers, self.fill), structs)

    # ---- the step -------------------------------------------------------------------------------------------

    def _device_step(self, carry: ReplicatedCarry, batch: Batch) -> tuple[ReplicatedCarry, Metrics]:
        memory = self._run(carry, batch)
        metrics = Metrics(memory["loss"], memory["loss_step"])
        held, flight = ({name: memory[name] for name in part} for part in (carry.held, carry.flight))  # type: ignore[union-attr]
        return replace(carry, calls=carry.calls + 1, held=held, flight=flight), metrics

    def _device_drain(self, carry: ReplicatedCarry) -> tuple[Memory, Metrics]:
        memory = self._run(carry, None)
        wanted = {name: memory[name] for name in memory if name.startswith(("final", "state"))}
        return wanted, Metrics(memory["loss"], memory["loss_step"])

    def _run(self, carry: ReplicatedCarry, batch: Batch | None) -> Memory:
        """One period on one device: N blocks. Without a batch it drains."""
        memory: Memory = jax.tree.map(lambda leaf: leaf[0], {**carry.held, **(carry.flight or {})})
        memory["loss_step"] = jnp.full((), -1, jnp.int32)
        if batch is None:
            memory |= {f"final{j}": jax.tree.map(jnp.zeros_like, memory[f"params{j}"]) for j in range(len(self.ops))}
        plan = Plan(
            self.ring,
            self.ops,
            self.format,
            self._update,
            self.rule.fresh,
            self.keeps,
            self.mesh.shape[DATA],
            self._traced[0],
        )
        period = Period(plan, Clock(carry.calls, carry.first_step, carry.key), batch)
        blocks = jnp.arange(self.rule.num_workers, dtype=jnp.int32)
        memory, _ = jax.lax.scan(lambda memory, b: (period.block(memory, b), None), memory, blocks)
        return jax.tree.map(lambda leaf: leaf[None], memory)

    def _update(self, gradient: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = self.optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state


def _laid_out(everywhere: Any, workers: Any) -> Any:
    """How a carry lies on the mesh: ``workers`` for what has a worker axis."""
    return ReplicatedCarry(everywhere, everywhere, everywhere, workers, workers)


def _where(condition: jax.Array, first: PyTree, second: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), first, second)


def _filled(struct: Any, num_workers: int, fill: float) -> jax.Array:
    shape = (num_workers, *struct.shape)
    if jnp.issubdtype(struct.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), shape)
    value = fill if jnp.issubdtype(struct.dtype, jnp.inexact) else 0
    return jnp.full(shape, value, struct.dtype)
