"""Pipelines that flush, the baselines: GPipe and 1F1B with M micro-batches a step, and model parallelism alone (M = 1).

One stage a device, the same ops, buffers and guards as the pipeline executor; one version of the parameters, and bubbles do no
work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import cyclic_jax as cj
from cyclic_jax.executors.clock import Clock
from cyclic_jax.executors.guard import Memory
from cyclic_jax.executors.lanes import Lanes, Turn
from cyclic_jax.executors.mesh import CYCLIC, DATA
from cyclic_jax.executors.slots import per_stage
from cyclic_jax.executors.stage_op import StageOp, split, trace_ops
from cyclic_jax.executors.stage_work import Plan, StageWork
from cyclic_jax.schedule import BACKWARD, FORWARD, Op

DEVICES, GROUPS, EVERYWHERE = PartitionSpec((DATA, CYCLIC)), PartitionSpec(DATA), PartitionSpec()
Phases = Sequence[tuple[Sequence[Turn], Sequence[tuple[int, int]]]]


class OneVersion(StageWork):
    """All micro-batches of a step see the same parameters, so one version is enough."""

    def seen(self, memory: Memory, j: int, t: jax.Array, i: jax.Array) -> Any:
        return self.plan.versions.read(j, memory["versions"])

    def update(self, memory: Memory, j: int, t: jax.Array, gradient: Any) -> Memory:
        plan = self.plan
        theta = plan.versions.read(j, memory["versions"])
        new, state = plan.update(gradient, plan.optimizer.read(j, memory["optimizer"]), theta)
        versions = plan.versions.write(j, memory["versions"], new)
        return {**memory, "versions": versions, "optimizer": plan.optimizer.write(j, memory["optimizer"], state)}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carry:
    step: jax.Array
    key: jax.Array
    memory: Memory


class FlushedPipeline:
    """``step`` takes ``groups * micro_batches`` micro-batches; their order in the batch is free, the gradient is their mean."""

    work: type[OneVersion] = OneVersion

    def __init__(
        self,
        model: cj.StagedModel,
        loss: Any,
        optimizer: optax.GradientTransformation,
        micro_batches: int,
        order: Literal["gpipe", "1f1b"] = "gpipe",
        groups: int = 1,
    ):
        self.model, self.optimizer, self.order = model, optimizer, order
        self.S, self.M, self.groups = model.num_stages, micro_batches, groups
        if self.M > 1 and self.M % self.S:
            raise ValueError(f"{self.M} micro-batches do not spread evenly over {self.S} devices")
        devices = np.asarray(jax.devices()[: groups * self.S]).reshape(groups, self.S)
        self.mesh = Mesh(devices, (DATA, CYCLIC))
        last, platform = self.S - 1, devices.flat[0].platform
        self.ops = [StageOp(s, loss if s.index == last else None, "save", platform) for s in model.stages]
        self.batch_sharding = NamedSharding(self.mesh, DEVICES if self.M > 1 else GROUPS)
        specs: Any = Carry(EVERYWHERE, EVERYWHERE, DEVICES)  # type: ignore[arg-type]
        step = jax.shard_map(
            self._step,
            mesh=self.mesh,
            in_specs=(specs, self.batch_sharding.spec),
            out_specs=(specs, DEVICES),
            check_vma=False,
        )
        self._jitted = jax.jit(step, donate_argnums=0)
        self._plan: Plan | None = None

    def prepare(self, batch: Any) -> None:
        """Learn the shapes of a micro-batch."""
        rows = jax.tree.leaves(batch)[0].shape[0] // (self.M * self.groups)

        def struct(leaf: Any) -> Any:
            return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)

        self._structs = jax.tree.map(struct, batch)
        trace_ops(self.model, self.ops, *self._structs)
        params, states = jax.eval_shape(self.model.init, jax.random.key(0))
        leaving = [op.output_struct for op in self.ops[:-1]]
        waiting = [self.M] * self.S if self.order == "gpipe" else [min(self.M, n) for n in self._lanes().slots]
        self._plan = Plan(
            ops=self.ops,
            fresh=np.ones((self.M, self.S), bool),
            groups=self.groups,
            update=self._update,
            versions=per_stage(params),
            optimizer=per_stage([jax.eval_shape(self.optimizer.init, p) for p in params]),
            states=per_stage(states, self.M),
            gradients=per_stage(params),
            residuals=per_stage([op.residual_structs for op in self.ops], waiting),
            messages=per_stage([*((y, self._structs[1]) for y in leaving), *(split(y)[0] for y in leaving)]),
            replicas=(1,) * self.S,
        )

    def init(self, state: cj.TrainState) -> Carry:
        """Spread over the devices; every micro-batch starts from the first worker's statistics."""
        plan = self._plan
        assert plan is not None, "prepare(batch) comes first"

        def spread(state: cj.TrainState) -> Carry:
            stages = []
            for j in range(self.S):
                statistics = plan.states.full(0.0)
                for i in range(self.M):
                    own = jax.tree.map(lambda leaf: leaf[0], state.model_state[j])
                    statistics = plan.states.write(j, statistics, own, i)
                stages.append(
                    {
                        "versions": plan.versions.write(j, plan.versions.full(0.0), state.params[j]),
                        "optimizer": plan.optimizer.write(j, plan.optimizer.full(0.0), state.opt_state[j]),
                        "state": statistics,
                        "gradient": plan.gradients.full(0.0),
                        "residuals": plan.residuals.full(0.0),
                        "out": plan.messages.full(0.0),
                        "mail": plan.messages.full(0.0),
                    }
                )
            memory = jax.tree.map(lambda *parts: jnp.tile(jnp.stack(parts), (self.groups, 1)), *stages)
            return Carry(state.step, state.key, memory)

        everywhere, each = NamedSharding(self.mesh, EVERYWHERE), NamedSharding(self.mesh, DEVICES)
        return jax.jit(spread, out_shardings=Carry(everywhere, everywhere, each))(state)  # type: ignore[arg-type]

    def step(self, carry: Carry, batch: Any) -> tuple[Carry, jax.Array]:
        """One training step: all micro-batches through all stages and back, then the update."""
        return self._jitted(carry, batch)

    def lower(self, carry: Carry, batch: Any) -> jax.stages.Lowered:
        """The step, lowered."""
        return self._jitted.lower(carry, jax.device_put(batch, self.batch_sharding))

    def params(self, carry: Carry) -> tuple[Any, ...]:
        """The parameters, one pytree a stage."""
        assert self._plan is not None
        vectors = carry.memory["versions"]
        return tuple(self._plan.versions.read(j, {k: v[j] for k, v in vectors.items()}) for j in range(self.S))

    def _update(self, gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = self.optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    @property
    def schedule(self) -> cj.Schedule:
        """What it runs: workers are the micro-batches of a step. 1F1B takes the period-3 table of the pipeline executor."""
        if self.order == "gpipe":
            return cj.Schedule.gpipe(self.M, self.S)
        program = cj.Schedule.pipeline(self.S).program
        return cj.Schedule(self.M, self.S, program, period=3 * (self.M + self.S - 1), offset=3, name="1f1b, period 3")

    # ---- the step -------------------------------------------------------------------------------------------

    def _lanes(self) -> Lanes:
        return Lanes(cj.Schedule.pipeline(self.S))

    def _step(self, carry: Carry, batch: Any) -> tuple[Carry, jax.Array]:
        plan = self._plan
        assert plan is not None
        memory: Memory = jax.tree.map(lambda leaf: leaf[0], carry.memory)
        kept = list(memory)
        memory["loss"], memory["loss_step"] = jnp.zeros(self.M), jnp.full(self.M, -1, jnp.int32)
        slots = max(1, self.M // self.S)
        stacked = jax.tree.map(lambda leaf: leaf.reshape(slots, -1, *leaf.shape[1:]), batch)
        zero = jnp.zeros((), jnp.int32)
        # the clock of the step in progress: micro-batches count from 0 in each
        work = self.work(plan, Clock(zero, carry.step, carry.key), jax.lax.axis_index(DATA))
        for phases in self._programs():
            blocks = jnp.arange(self.M + self.S - 1, dtype=jnp.int32)
            run = lambda c, b, phases=phases: (self._block(work, phases, *c, b), None)  # noqa: E731
            (memory, stacked), _ = jax.lax.scan(run, (memory, stacked), blocks)
        new = jax.tree.map(lambda leaf: leaf[None], {name: memory[name] for name in kept})
        return Carry(carry.step + 1, carry.key, new), memory["loss"][None]

    def _programs(self) -> list[Phases]:
        """Phases of a block, for each sweep over the micro-batches."""
        S = self.S
        if self.order == "1f1b":
            lanes = self._lanes()
            return [list(zip(lanes.turns, lanes.pairs, strict=True))]
        forward = [Turn(Op(FORWARD, j), j) for j in range(S)], [(j, j + 1) for j in range(S - 1)]
        backward = [Turn(Op(BACKWARD, j), S - 1 - j) for j in range(S)], [(j + 1, j) for j in range(S - 1)]
        return [[forward], [backward]]

    def _block(self, work: StageWork, phases: Phases, memory: Memory, stacked: Any, b: jax.Array) -> tuple[Memory, Any]:
        device, place = jax.lax.axis_index(CYCLIC), jnp.minimum(b // self.S, max(1, self.M // self.S) - 1)
        memory["inputs"] = jax.tree.map(lambda leaf: leaf[place], stacked)
        for turns, pairs in phases:
            for turn in turns:
                m = b - turn.age
                mine = (device == turn.op.stage) & (m >= 0) & (m < self.M)
                run = work.forward if turn.op.kind == FORWARD else work.backward
                memory = run(memory, turn.op.stage, m, mine)
            if pairs:
                memory = {**memory, "mail": jax.lax.ppermute(memory["out"], CYCLIC, pairs)}
        inputs = memory.pop("inputs")
        if self.M > 1 and any(turn.op == Op(FORWARD, 0) for turns, _ in phases for turn in turns):
            down = [(k + 1, k) for k in range(self.S - 1)]
            moved = jax.lax.ppermute(inputs, CYCLIC, down)
            stacked = jax.tree.map(lambda leaf, new: leaf.at[place].set(new), stacked, moved)
        return memory, stacked
