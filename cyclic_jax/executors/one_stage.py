"""What the executors with one stage on each device share: how a canonical state lies on the devices, and what is in flight.

Stage j lives on ``replicas[j]`` devices in a row (one, in the pipeline); micro-batch m = tN + i is on replica m mod
``replicas[j]`` from its forward to its backward.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cyclic_jax.executors.alike import alike
from cyclic_jax.executors.base import Batch, Loss
from cyclic_jax.executors.clock import Clock
from cyclic_jax.executors.guard import Memory, in_turn
from cyclic_jax.executors.lanes import Lanes, Turn
from cyclic_jax.executors.mesh import CYCLIC, DATA
from cyclic_jax.executors.slots import Slots, Vectors, per_stage
from cyclic_jax.executors.stage_op import split
from cyclic_jax.executors.stage_work import Plan, StageWork
from cyclic_jax.executors.staggered import Staggered, StaggeredCarry
from cyclic_jax.rules import UpdateRule
from cyclic_jax.schedule import FORWARD, Op, Schedule
from cyclic_jax.stages import StagedModel
from cyclic_jax.state import Metrics, Snapshot, TrainState, mean_over_workers

PyTree = Any
DEVICES = PartitionSpec((DATA, CYCLIC))


class OneStage(Staggered):
    """See the module's text. A subclass sets ``mesh`` and says what a block does.

    ``work`` is what does the ops; one that also takes notes may stand in its place.
    """

    work: type[StageWork] = StageWork

    def __init__(
        self,
        model: StagedModel,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        *,
        rule: UpdateRule,
        schedule: Schedule | None,
        mesh: Mesh,
        replicas: tuple[int, ...],
        residuals: str | Callable[..., bool],
        fill: float,
    ):
        schedule = schedule or Schedule.pipeline(rule.num_workers)
        self.mesh, self.replicas, self.lanes = mesh, replicas, Lanes(schedule)
        self.groups = mesh.shape[DATA]
        self.num_workers = rule.num_workers * self.groups
        super().__init__(model, loss, optimizer, rule=rule, schedule=schedule, residuals=residuals, fill=fill)
        params, states = self.structs
        self.versions, self.states = per_stage(params, 2), per_stage(states, rule.num_workers)
        self.gradients = per_stage(params)
        self.opt_states = per_stage([jax.eval_shape(self.optimizer.init, p) for p in params])
        self.first = np.concatenate([[0], np.cumsum(replicas)])  # the first device of each stage
        self._batch_layout = NamedSharding(mesh, DEVICES)
        if max(replicas) == 1:
            self._first_layer = jax.ShapeDtypeStruct((), jnp.int32)
        self._compile(DEVICES)

    # ---- canonical state <-> carry --------------------------------------------------------------------------

    def _spread(self, state: TrainState) -> StaggeredCarry:
        """theta_T in slot 0, theta_{T−1} in slot 1: where steps 0 and −1 of this run belong."""
        stages = []
        for j in range(len(self.ops)):
            versions = self.versions.write(j, self.versions.full(0.0), state.params[j], 0)
            versions = self.versions.write(j, versions, state.previous_params[j], 1)
            optimizer = self.opt_states.write(j, self.opt_states.full(0.0), state.opt_state[j])
            stages += [{"versions": versions, "optimizer": optimizer}] * self.replicas[j]
        held = jax.tree.map(lambda *parts: jnp.tile(jnp.stack(parts), (self.groups, 1)), *stages)
        groups = [self._spread_statistics(state, d) for d in range(self.groups)]
        held["state"] = jax.tree.map(lambda *parts: jnp.concatenate(parts), *groups)
        return StaggeredCarry(state.step, jnp.zeros((), jnp.int32), state.key, held, None)

    def _spread_statistics(self, state: TrainState, group: int) -> Vectors:
        """``[devices, …]``: each device has room for every worker's statistics of its stage."""
        N, devices = self.rule.num_workers, []
        for j in range(len(self.ops)):
            vectors = self.states.full(0.0)
            for i in range(N):
                own = jax.tree.map(lambda leaf, w=group * N + i: leaf[w], state.model_state[j])
                vectors = self.states.write(j, vectors, own, i)
            devices += [vectors] * self.replicas[j]
        return jax.tree.map(lambda *parts: jnp.stack(parts), *devices)

    def _gather(self, carry: StaggeredCarry) -> TrainState:
        t = carry.calls
        where = t * self.rule.num_workers - 1  # the last micro-batch, whose backward completed the sum
        params, previous = (self._version(carry, step % 2, where) for step in (t, t - 1))
        optimizer = tuple(
            self.opt_states.read(j, self._device(carry, "optimizer", j, where)) for j in range(len(self.ops))
        )
        statistics = self._statistics(carry, drained=True)
        return TrainState(carry.first_step + t, carry.key, params, previous, optimizer, statistics)

    def _snapshot(self, carry: StaggeredCarry) -> Snapshot:
        t = jnp.maximum(carry.calls - 1, 0)
        params = self._version(carry, t % 2, t * self.rule.num_workers - 1)
        return Snapshot(carry.first_step + t, params, mean_over_workers(self._statistics(carry, drained=False)))

    def _device(self, carry: StaggeredCarry, name: str, j: int, m: Any, group: int = 0) -> Vectors:
        """A buffer of the device that has micro-batch m at stage j."""
        device = group * int(self.first[-1]) + int(self.first[j]) + m % self.replicas[j]
        return jax.tree.map(lambda leaf: leaf[device], carry.held[name])

    def _version(self, carry: StaggeredCarry, slot: jax.Array, m: jax.Array) -> tuple[PyTree, ...]:
        stages = range(len(self.ops))
        return tuple(self.versions.read(j, self._device(carry, "versions", j, m), slot) for j in stages)

    def _statistics(self, carry: StaggeredCarry, drained: bool) -> tuple[PyTree, ...]:
        """``[D·N, …]`` for each stage; a worker's are where its next micro-batch will be."""
        N, stages = self.rule.num_workers, []
        for j in range(len(self.ops)):
            age = self.lanes.age(Op(FORWARD, j))
            each = []
            for d in range(self.groups):
                for i in range(N):
                    done = carry.calls if drained or i + age < N else jnp.maximum(carry.calls - 1, 0)
                    device = self._device(carry, "state", j, done * N + i, d)
                    each.append(self.states.read(j, device, i))
            stages.append(jax.tree.map(lambda *leaves: jnp.stack(leaves), *each))
        return tuple(stages)

    # ---- what is in flight ----------------------------------------------------------------------------------

    @property
    def slots(self) -> tuple[int, ...]:
        """How many micro-batches wait on each device of a stage between forward and backward."""
        return tuple(-(-n // k) for n, k in zip(self.lanes.slots, self.replicas, strict=True))

    @property
    def residual_slots(self) -> Slots:
        """Room for their residuals."""
        return per_stage([op.residual_structs for op in self.ops], self.slots)

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
        if max(self.replicas) > 1:
            one["finished"] = self.gradients.full(self.fill)
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
            replicas=self.replicas,
            alike=self.alike,
        )

    @property
    def alike(self) -> tuple[int, ...] | None:
        """For each stage the first one that runs the same program; ``None`` where a stage has several devices."""
        return alike(self.ops, self.structs[0]) if self._first_layer is not None else None

    def _run(self, carry: StaggeredCarry, batch: Batch | None) -> Memory:
        memory: Memory = jax.tree.map(lambda leaf: leaf[0], {**carry.held, **(carry.flight or {})})
        N, loss = self.rule.num_workers, self.ops[-1].output_struct
        memory = in_turn(memory)
        memory["loss"], memory["loss_step"] = jnp.zeros(N, loss.dtype), jnp.full(N, -1, jnp.int32)
        memory["inputs"] = self._nothing() if batch is None else batch
        work = self.work(self._plan(), Clock(carry.calls, carry.first_step, carry.key), jax.lax.axis_index(DATA))
        begun = (carry.calls + (1 if batch is not None else 0)) * N
        blocks = carry.calls * N + jnp.arange(N, dtype=jnp.int32)
        memory, _ = jax.lax.scan(lambda memory, b: (self._block(work, memory, b, begun), None), memory, blocks)
        return jax.tree.map(lambda leaf: leaf[None], memory)

    def _nothing(self) -> Batch:
        """Draining, no micro-batch begins, and anything of its shape serves."""
        return jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), self._traced)

    def _block(self, work: StageWork, memory: Memory, b: jax.Array, begun: jax.Array) -> Memory:
        """One block on this device. Micro-batches below 0 and from ``begun`` on do not exist."""
        raise NotImplementedError

    def _phase(self, work: StageWork, memory: Memory, phase: int, b: jax.Array, begun: jax.Array) -> Memory:
        """This device's op of a phase, if it has one; stages that are alike have one program together."""
        shares, programs = work.plan.alike or range(len(self.ops)), defaultdict[tuple[str, int], list[Turn]](list)
        for turn in self.lanes.turns[phase]:
            programs[turn.op.kind, shares[turn.op.stage]].append(turn)
        device = jax.lax.axis_index(CYCLIC)
        for (kind, _), turns in programs.items():
            j, (m, here) = turns[0].op.stage, self._turn(turns, device, b)
            run = work.forward if kind == FORWARD else work.backward
            memory = run(memory, j, m, here & (m >= 0) & (m < begun))
        return memory

    def _turn(self, turns: Sequence[Turn], device: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The micro-batch of block b's turn on a device, and whether there is one."""
        if len(turns) == 1:
            m = b - turns[0].age
            j = turns[0].op.stage
            return m, device == int(self.first[j]) + m % self.replicas[j]
        ages, here = np.zeros(len(self.ops), np.int32), np.zeros(len(self.ops), bool)
        for turn in turns:
            ages[turn.op.stage], here[turn.op.stage] = turn.age, True
        return b - jnp.asarray(ages)[device], jnp.asarray(here)[device]

    def _metrics(self, losses: Memory) -> Metrics:
        """The last device of each group has them all."""
        shape = (self.groups, -1, self.rule.num_workers)
        loss, step = (losses[name].reshape(shape)[:, -1].reshape(-1) for name in ("loss", "loss_step"))
        return Metrics(loss, step)

    def _leaving(self, losses: Memory) -> Metrics:
        """Arrays over the last devices alone, made of what lies there."""
        last = self.mesh.devices[:, -1]
        sharding = NamedSharding(Mesh(last, (DATA,)), PartitionSpec(DATA))

        def there(leaf: jax.Array) -> jax.Array:
            shards = [shard.data for shard in leaf.addressable_shards if shard.device in last]
            return jax.make_array_from_single_device_arrays((self.num_workers,), sharding, shards, dtype=leaf.dtype)

        return Metrics(there(losses["loss"]), there(losses["loss_step"]))
