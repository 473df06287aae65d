"""One period of the interleaved executor: every worker's ops, one after the other, with all phases known when it is traced.

Buffers have names: ``now{j}``, ``before{j}``, ``optimizer{j}`` and ``sum{j}`` of a stage; ``x{i}``, ``cotangent{i}`` and
``targets{i}`` of a worker's micro-batch; ``state{i}/{j}`` and ``residuals{i}/{j}`` of both. A buffer that has been used for the
last time leaves the memory, so what is left at the end of a period is exactly what is in flight.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyclic_jax.executors.base import Batch
from cyclic_jax.executors.guard import Memory
from cyclic_jax.executors.stage_op import Inputs, StageOp
from cyclic_jax.executors.turns import Turn, turns, updated_late
from cyclic_jax.schedule import FORWARD, Op, Schedule
from cyclic_jax.stages import worker_key
from cyclic_jax.state import Metrics

PyTree = Any
Update = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


@dataclass(frozen=True)
class Plan:
    """What is fixed before anything runs.

    Attributes:
        schedule: the table.
        ops: forward and backward of each stage, traced.
        update: ``update(gradient, optimizer state, params) -> (params, optimizer state)`` of one stage.
        fresh: the rule's mask, bool ``[N, S]``.
        ordered: keep the compiler from changing the order of the ops.
    """

    schedule: Schedule
    ops: list[StageOp]
    update: Update
    fresh: np.ndarray
    ordered: bool


class Period:
    """The ops of one period; c is the training step that begins in it.

    ``batch`` is ``None`` when draining: no worker begins a step. ``started`` is false in the first period: nothing is late. Which
    of theta_c, theta_{c-1} and theta_{c-2} an op needs is known by then, and so is which of them ``now`` and ``before`` are.
    """

    def __init__(self, plan: Plan, key: jax.Array, step: jax.Array, batch: Batch | None, started: bool):
        self.plan, self.key, self.step, self.batch, self.started = plan, key, step, batch, started
        self.N, self.S = plan.fresh.shape
        late = updated_late(plan.schedule)
        self.newest = [-1 if started and late[j] else 0 for j in range(self.S)]  # ``now`` is theta_{c + newest}
        self.losses: dict[int, tuple[jax.Array, jax.Array]] = {}
        self.last: list[str] = []  # buffers that the turn before wrote

    def run(self, memory: Memory) -> tuple[Memory, Metrics]:
        """The memory at the end, and the losses that were finished."""
        memory = dict(memory)
        for turn in turns(self.plan.schedule):
            if self.started if turn.late else self.batch is not None:
                (self.forward if turn.op.kind == FORWARD else self.backward)(memory, turn)
        if self.batch is not None:
            self.keep_targets(memory)
        nothing = jnp.zeros(()), jnp.full((), -1, jnp.int32)
        loss, step = zip(*(self.losses.get(i, nothing) for i in range(self.N)), strict=True)
        return memory, Metrics(jnp.stack(loss), jnp.stack(step))

    def forward(self, memory: Memory, turn: Turn) -> None:
        """Run a stage and keep its residuals."""
        i, j, op = turn.worker, turn.op.stage, self.plan.ops[turn.op.stage]
        if j == 0:
            memory[f"x{i}"] = self.micro_batch(i, 0)
        if op.loss and not turn.late:
            memory[f"targets{i}"] = self.micro_batch(i, 1)
        reads = [self.version(turn), f"x{i}", f"state{i}/{j}", *([f"targets{i}"] if op.loss else [])]
        self.wait(memory, reads)
        step = self.step - 1 if turn.late else self.step
        targets = memory.pop(f"targets{i}") if op.loss else None
        inputs = Inputs(memory.pop(f"x{i}"), memory[f"state{i}/{j}"], worker_key(self.key, step, i), targets)
        y, memory[f"state{i}/{j}"], memory[f"residuals{i}/{j}"] = op.forward(memory[reads[0]], inputs)
        self.last = [f"state{i}/{j}", f"residuals{i}/{j}"]
        if op.loss:
            self.losses[i] = y, step
            memory[f"cotangent{i}"] = jnp.ones_like(y)
        else:
            memory[f"x{i}"] = y
            self.last.append(f"x{i}")

    def backward(self, memory: Memory, turn: Turn) -> None:
        """Add this worker's gradient to the stage's sum; after the last worker, update the stage."""
        i, j = turn.worker, turn.op.stage
        reads = [self.version(turn), f"residuals{i}/{j}", f"cotangent{i}", *([f"sum{j}"] if i else [])]
        self.wait(memory, reads)
        residuals, cotangent = memory.pop(f"residuals{i}/{j}"), memory.pop(f"cotangent{i}")
        gradient, cotangent = self.plan.ops[j].backward(memory[reads[0]], residuals, cotangent)
        memory[f"sum{j}"] = jax.tree.map(jnp.add, memory[f"sum{j}"], gradient) if i else gradient
        self.last = [f"sum{j}"]
        if j:
            memory[f"cotangent{i}"] = cotangent
            self.last.append(f"cotangent{i}")
        if i == self.N - 1:
            self.update(memory, j)

    def update(self, memory: Memory, j: int) -> None:
        """theta_{t+1} of one stage, from the mean gradient."""
        mean = jax.tree.map(lambda total: total / self.N, memory.pop(f"sum{j}"))
        now = memory[f"now{j}"]
        memory[f"before{j}"] = now
        with jax.named_scope(f"update{j}"):
            memory[f"now{j}"], memory[f"optimizer{j}"] = self.plan.update(mean, memory[f"optimizer{j}"], now)
        self.newest[j] += 1
        self.last += [f"now{j}", f"optimizer{j}"]
        self.last.remove(f"sum{j}")

    def version(self, turn: Turn) -> str:
        """The buffer that holds the version of the stage that this op's worker sees."""
        j = turn.op.stage
        wanted = (-1 if turn.late else 0) - (0 if self.plan.fresh[turn.worker, j] else 1)
        return {self.newest[j]: f"now{j}", self.newest[j] - 1: f"before{j}"}[wanted]

    def keep_targets(self, memory: Memory) -> None:
        """Of micro-batches whose loss comes in the next period."""
        last = Op(FORWARD, self.S - 1)
        for i in range(self.N):
            if self.plan.schedule.start(last, i) >= self.plan.schedule.period:
                memory[f"targets{i}"] = self.micro_batch(i, 1)

    def micro_batch(self, i: int, part: int) -> PyTree:
        """Rows ``[iB, (i+1)B)`` of inputs (part 0) or targets (part 1)."""

        def rows(leaf: jax.Array) -> jax.Array:
            size = leaf.shape[0] // self.N
            return leaf[i * size : (i + 1) * size]

        assert self.batch is not None
        return jax.tree.map(rows, self.batch[part])

    def wait(self, memory: Memory, reads: Iterable[str]) -> None:
        """Nothing that is read next is there before all that the turn before wrote is there."""
        if self.plan.ordered:
            names = [*dict.fromkeys((*reads, *self.last))]
            memory |= jax.lax.optimization_barrier({name: memory[name] for name in names})
