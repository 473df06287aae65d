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
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cyclic_jax.executors.base import Batch, Loss, check_rule
from cyclic_jax.executors.clock import Clock
from cyclic_jax.executors.guard import Memory, in_turn
from cyclic_jax.executors.mesh import CYCLIC, DATA, ring_mesh
from cyclic_jax.executors.payload import PayloadFormat
from cyclic_jax.executors.replicated_period import Period, Plan
from cyclic_jax.executors.ring import Ring
from cyclic_jax.executors.staggered import Staggered, StaggeredCarry
from cyclic_jax.executors.worker_ops import filled, flight_structs
from cyclic_jax.rules import UpdateRule
from cyclic_jax.schedule import Schedule
from cyclic_jax.stages import StagedModel
from cyclic_jax.state import Metrics, Snapshot, TrainState, mean_over_workers

PyTree = Any
WORKERS = PartitionSpec((DATA, CYCLIC))


class ReplicatedExecutor(Staggered):
    """See the module's text. Made by :func:`cyclic_jax.make_executor`; options as :class:`Staggered`."""

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
        self.mesh = ring_mesh(mesh, rule.num_workers)
        schedule = schedule or Schedule.cyclic(rule.num_workers, rule.num_stages)
        super().__init__(model, loss, optimizer, rule=rule, schedule=schedule, residuals=residuals, fill=fill)
        self.ring = Ring(self.schedule)
        self.num_workers = rule.num_workers * self.mesh.shape[DATA]
        self.batch_sharding = self._batch_layout = NamedSharding(self.mesh, WORKERS)
        self.format = PayloadFormat(self.structs[0])
        # worker i keeps a sum pending iff it is delayed and the sum reaches it a step before it may use it
        workers = np.arange(rule.num_workers)[:, None]
        self.keeps = ~rule.fresh & (workers >= np.array(self.ring.first_users))
        self._compile(WORKERS)

    # ---- canonical state <-> carry --------------------------------------------------------------------------

    def _spread(self, state: TrainState) -> StaggeredCarry:
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
        return StaggeredCarry(state.step, jnp.zeros((), jnp.int32), state.key, held, None)

    def _newest(self, carry: StaggeredCarry, j: int) -> tuple[PyTree, PyTree, PyTree]:
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

    def _snapshot(self, carry: StaggeredCarry) -> Snapshot:
        stages = range(self.model.num_stages)
        params = tuple(self._newest(carry, j)[0] for j in stages)
        state = mean_over_workers(tuple(carry.held[f"state{j}"] for j in stages))
        return Snapshot(carry.first_step + jnp.maximum(carry.calls - 1, 0), params, state)

    def _gather(self, carry: StaggeredCarry) -> TrainState:
        """The state that ``init`` was given."""
        newest = [self._newest(carry, j) for j in range(self.model.num_stages)]
        return self._state(carry, carry.held, *(tuple(parts) for parts in zip(*newest, strict=True)))

    def _drained(self, carry: StaggeredCarry, memory: Memory) -> tuple[TrainState, Metrics]:
        """theta_t from where each sum arrives first, theta_{t+1} by the sum that the drain brought there."""
        params, previous, opt_state = [], [], []
        for j, e in enumerate(self.ring.first_users):
            theta, _, state = self._newest(carry, j)
            final = jax.tree.map(lambda leaf, e=e: leaf[e], memory[f"final{j}"])
            new, state = self._update(final, state, theta)
            params.append(new)
            previous.append(theta)
            opt_state.append(state)
        state = self._state(carry, memory, tuple(params), tuple(previous), tuple(opt_state))
        return state, self._metrics(self._losses(memory))

    def _state(self, carry: StaggeredCarry, memory: Memory, params: Any, previous: Any, opt_state: Any) -> TrainState:
        model_state = tuple(memory[f"state{j}"] for j in range(self.model.num_stages))
        return TrainState(carry.first_step + carry.calls, carry.key, params, previous, opt_state, model_state)

    def _metrics(self, losses: Memory) -> Metrics:
        return Metrics(losses["loss"], losses["loss_step"])

    # ---- what is in flight ----------------------------------------------------------------------------------

    def _flight(self) -> Memory:
        payload = jax.eval_shape(partial(self.format.full, 0.0))
        structs = flight_structs(self.ops, self._traced[1])
        structs |= {f"box{q}": payload for q in range(len(self.ring.beats))}
        structs |= {f"handed{c}": payload for c in range(max(self.ring.boxes) + 1)}
        return jax.tree.map(lambda struct: filled(struct, self.num_workers, self.fill), structs)

    # ---- the step -------------------------------------------------------------------------------------------

    def _run(self, carry: StaggeredCarry, batch: Batch | None) -> Memory:
        """One period on one device: N blocks. Without a batch it drains."""
        memory: Memory = jax.tree.map(lambda leaf: leaf[0], {**carry.held, **(carry.flight or {})})
        memory = in_turn(memory)
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
            self._traced,
        )
        period = Period(plan, Clock(carry.calls, carry.first_step, carry.key), batch)
        blocks = jnp.arange(self.rule.num_workers, dtype=jnp.int32)
        memory, _ = jax.lax.scan(lambda memory, b: (period.block(memory, b), None), memory, blocks)
        return jax.tree.map(lambda leaf: leaf[None], memory)


def _where(condition: jax.Array, first: PyTree, second: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), first, second)
