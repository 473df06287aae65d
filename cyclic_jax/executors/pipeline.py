"""The pipeline executor: N devices, one stage each; micro-batches rotate through them and never flush.

Device j owns stage j: its parameters in two versions at most, its optimizer state, and the residuals of the N − j micro-batches
that wait there for their backward. Activations and cotangents go to the neighbours, one partial permutation a tick; a stage is
updated where it lives, as soon as the step's last micro-batch has passed, so gradients do not travel at all. With D data groups
the finished sum of a stage is averaged over its D copies.

By default the table is the period-3 one, for a backward that takes two forwards; one op a tick runs as well.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cyclic_jax.executors.base import Batch, Loss
from cyclic_jax.executors.guard import Memory
from cyclic_jax.executors.lanes import Lanes
from cyclic_jax.executors.mesh import CYCLIC, DATA, ring_mesh
from cyclic_jax.executors.slots import Slots, Vectors, per_stage
from cyclic_jax.executors.stage_op import split
from cyclic_jax.executors.stage_work import Clock, Plan, StageWork
from cyclic_jax.executors.staggered import Staggered, StaggeredCarry
from cyclic_jax.rules import UpdateRule
from cyclic_jax.schedule import FORWARD, Schedule
from cyclic_jax.stages import StagedModel
from cyclic_jax.state import Metrics, Snapshot, TrainState, mean_over_workers

PyTree = Any
DEVICES = PartitionSpec((DATA, CYCLIC))


class PipelineExecutor(Staggered):
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
        schedule = schedule or Schedule.pipeline(rule.num_workers)
        self.mesh = ring_mesh(mesh, rule.num_workers)
        self.lanes = Lanes(schedule)
        self.groups = self.mesh.shape[DATA]
        self.num_workers = rule.num_workers * self.groups
        super().__init__(model, loss, optimizer, rule=rule, schedule=schedule, residuals=residuals, fill=fill)
        params, states = self.structs
        self.versions, self.states = per_stage(params, 2), per_stage(states, rule.num_workers)
        self.gradients = per_stage(params)
        self.opt_states = per_stage([jax.eval_shape(self.optimizer.init, p) for p in params])
        self.batch_sharding = self._batch_layout = NamedSharding(self.mesh, DEVICES)
        self._compile(DEVICES)

    # ---- canonical state <-> carry --------------------------------------------------------------------------

    def _spread(self, state: TrainState) -> StaggeredCarry:
        """theta_T in slot 0, theta_{T−1} in slot 1: where steps 0 and −1 of this run belong."""
        N, devices = self.rule.num_workers, []
        for j in range(N):
            versions = self.versions.write(j, self.versions.full(0.0), state.params[j], 0)
            versions = self.versions.write(j, versions, state.previous_params[j], 1)
            optimizer = self.opt_states.write(j, self.opt_states.full(0.0), state.opt_state[j])
            devices.append({"versions": versions, "optimizer": optimizer})
        held = jax.tree.map(lambda *parts: jnp.tile(jnp.stack(parts), (self.groups, 1)), *devices)
        groups = [self._spread_statistics(state, d) for d in range(self.groups)]
        held["state"] = jax.tree.map(lambda *parts: jnp.concatenate(parts), *groups)
        return StaggeredCarry(state.step, jnp.zeros((), jnp.int32), state.key, held, None)

    def _spread_statistics(self, state: TrainState, group: int) -> Vectors:
        """``[N, …]``: device j holds the statistics that each worker has of stage j."""
        N, devices = self.rule.num_workers, []
        for j in range(N):
            vectors = self.states.full(0.0)
            for i in range(N):
                own = jax.tree.map(lambda leaf, w=group * N + i: leaf[w], state.model_state[j])
                vectors = self.states.write(j, vectors, own, i)
            devices.append(vectors)
        return jax.tree.map(lambda *parts: jnp.stack(parts), *devices)

    def _gather(self, carry: StaggeredCarry) -> TrainState:
        t = carry.calls
        params, previous = (self._version(carry, step % 2) for step in (t, t - 1))
        optimizer = tuple(self.opt_states.read(j, self._device(carry, "optimizer", j)) for j in range(len(self.ops)))
        step = carry.first_step + carry.calls
        return TrainState(step, carry.key, params, previous, optimizer, self._statistics(carry))

    def _snapshot(self, carry: StaggeredCarry) -> Snapshot:
        t = jnp.maximum(carry.calls - 1, 0)
        params, state = self._version(carry, t % 2), mean_over_workers(self._statistics(carry))
        return Snapshot(carry.first_step + t, params, state)

    def _device(self, carry: StaggeredCarry, name: str, j: int, group: int = 0) -> Vectors:
        return jax.tree.map(lambda leaf: leaf[group * self.rule.num_workers + j], carry.held[name])

    def _version(self, carry: StaggeredCarry, slot: jax.Array) -> tuple[PyTree, ...]:
        stages = range(len(self.ops))
        return tuple(self.versions.read(j, self._device(carry, "versions", j), slot) for j in stages)

    def _statistics(self, carry: StaggeredCarry) -> tuple[PyTree, ...]:
        """``[D·N, …]`` for each stage."""
        stages = []
        for j in range(len(self.ops)):
            devices = [self._device(carry, "state", j, d) for d in range(self.groups)]
            each = [self.states.read(j, device, i) for device in devices for i in range(self.rule.num_workers)]
            stages.append(jax.tree.map(lambda *leaves: jnp.stack(leaves), *each))
        return tuple(stages)

    # ---- what is in flight ----------------------------------------------------------------------------------

    @property
    def residual_slots(self) -> Slots:
        """Residuals of each device: N − j micro-batches' of stage j."""
        return per_stage([op.residual_structs for op in self.ops], self.lanes.slots)

    @property
    def messages(self) -> Slots:
        """What travels: activations with the targets, then cotangents."""
        leaving = [op.output_struct for op in self.ops[:-1]]
        return per_stage([*((y, self._traced[1]) for y in leaving), *(split(y)[0] for y in leaving)])

    def _flight(self) -> Memory:
        one = {
            "gradient": self.gradients.full(self.fill),
            "residuals": self.residual_slots.full(self.fill),
            "out": self.messages.full(self.fill),
            "mail": self.messages.full(self.fill),
        }
        return jax.tree.map(lambda leaf: jnp.tile(leaf, (self.mesh.size, 1)), one)

    # ---- the step -------------------------------------------------------------------------------------------

    def _plan(self) -> Plan:
        return Plan(
            ops=self.ops,
            fresh=self.rule.fresh,
            groups=self.groups,
            update=self._update,
            versions=self.versions,
            optimizer=self.opt_states,
            states=self.states,
            gradients=self.gradients,
            residuals=self.residual_slots,
            messages=self.messages,
        )

    def _run(self, carry: StaggeredCarry, batch: Batch | None) -> Memory:
        memory: Memory = jax.tree.map(lambda leaf: leaf[0], {**carry.held, **(carry.flight or {})})
        N, loss = self.rule.num_workers, self.ops[-1].output_struct
        memory["loss"], memory["loss_step"] = jnp.zeros(N, loss.dtype), jnp.full(N, -1, jnp.int32)
        memory["inputs"] = self._nothing() if batch is None else batch
        work = StageWork(self._plan(), Clock(carry.calls, carry.first_step, carry.key), jax.lax.axis_index(DATA))
        begun = None if batch is not None else carry.calls * N
        blocks = carry.calls * N + jnp.arange(N, dtype=jnp.int32)
        memory, _ = jax.lax.scan(lambda memory, b: (self._block(work, memory, b, begun), None), memory, blocks)
        return jax.tree.map(lambda leaf: leaf[None], memory)

    def _nothing(self) -> Batch:
        """Draining, no micro-batch begins, and anything of its shape serves."""
        return jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), self._traced)

    def _block(self, work: StageWork, memory: Memory, b: jax.Array, begun: jax.Array | None) -> Memory:
        """One block on this device: in each phase its op, then what leaves; last, the inputs move one device down."""
        device = jax.lax.axis_index(CYCLIC)
        for turns, pairs in zip(self.lanes.turns, self.lanes.pairs, strict=True):
            for turn in turns:
                m = b - turn.age
                mine = (device == turn.op.stage) & (m >= 0) & (True if begun is None else m < begun)
                run = work.forward if turn.op.kind == FORWARD else work.backward
                memory = run(memory, turn.op.stage, m, mine)
            if pairs:
                memory = {**memory, "mail": jax.lax.ppermute(memory["out"], CYCLIC, pairs)}
        down = [(k + 1, k) for k in range(self.rule.num_workers - 1)]
        return {**memory, "inputs": jax.lax.ppermute(memory["inputs"], CYCLIC, down)} if down else memory

    def _metrics(self, losses: Memory) -> Metrics:
        """The last device of each group has them all."""
        shape = (self.groups, self.rule.num_workers, self.rule.num_workers)
        loss, step = (losses[name].reshape(shape)[:, -1].reshape(-1) for name in ("loss", "loss_step"))
        return Metrics(loss, step)
