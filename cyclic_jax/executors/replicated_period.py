"""One period of the replicated executor on one device: its own ops, the sums that come around, and what it sends."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyclic_jax.executors.base import Batch
from cyclic_jax.executors.clock import Clock
from cyclic_jax.executors.guard import Memory, when
from cyclic_jax.executors.mesh import CYCLIC, DATA
from cyclic_jax.executors.payload import PayloadFormat
from cyclic_jax.executors.ring import HandOff, Ring
from cyclic_jax.executors.stage_op import StageOp
from cyclic_jax.executors.worker_ops import WorkerOps
from cyclic_jax.schedule import FORWARD

PyTree = Any


@dataclass(frozen=True)
class Plan:
    """What is fixed before anything runs.

    Attributes:
        ring: the table, arranged in blocks and beats.
        ops: forward and backward of each stage.
        format: of payloads.
        update: ``update(gradient, optimizer state, params) -> (params, optimizer state)`` of one stage.
        fresh: the rule's mask, bool ``[N, S]``.
        keeps: bool ``[N, S]``: a sum reaches this worker a step before the rule lets it use it.
        groups: D.
        structs: ``(inputs, targets)`` of one micro-batch.
    """

    ring: Ring
    ops: list[StageOp]
    format: PayloadFormat
    update: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
    fresh: np.ndarray
    keeps: np.ndarray
    groups: int
    structs: Batch


class Period:
    """The body of one period's blocks on one device.

    ``i`` is the device's place in the ring, ``t`` its own step since the start; below 0 it has not begun, and everything it
    might do is a bubble. Draining (``batch`` is ``None``) no worker begins a step, and a finished sum is kept where it arrives
    first.
    """

    def __init__(self, plan: Plan, clock: Clock, batch: Batch | None):
        self.plan, self.clock, self.batch, self.N = plan, clock, batch, plan.ring.schedule.num_workers
        self.i = jax.lax.axis_index(CYCLIC)
        worker = jax.lax.axis_index(DATA) * self.N + self.i
        self.ops = WorkerOps(plan.ops, plan.structs, clock, batch, worker)

    def block(self, memory: Memory, b: jax.Array) -> Memory:
        """All beats of one block: this device's op in each, then what it sends."""
        t, k = jnp.divmod(self.clock.calls * self.N + b - self.i, self.N)
        for beat, late in enumerate(self.plan.ring.late):
            if late:
                memory = self.ride(memory, beat, (b - 1) % self.N)
        for beat, ops in enumerate(self.plan.ring.beats):
            for block, op in enumerate(ops):
                if op is None:
                    continue
                mine = (k == block) & (t >= 0)
                begun = mine & (t < self.clock.calls) if self.batch is None else mine
                if op.kind == FORWARD:
                    memory = self.forward(memory, op.stage, beat, t, begun)
                    if self.batch is None:
                        memory = self.keep_final(memory, op.stage, mine & (t == self.clock.calls))
                else:
                    memory = self.backward(memory, op.stage, beat, begun)
            for hand_off in self.plan.ring.hand_offs(beat):
                memory = self.hand_off(memory, beat, hand_off, b)
            if not self.plan.ring.late[beat]:
                memory = self.ride(memory, beat, b)
        return memory

    # ---- ops ------------------------------------------------------------------------------------------------

    def forward(self, memory: Memory, j: int, beat: int, t: jax.Array, mine: jax.Array) -> Memory:
        """Bring stage j to the version that this step needs, then run it."""
        box = f"box{beat}"
        changes = [f"params{j}", f"optimizer{j}", f"pending{j}", box, *self.ops.forward_changes(j)]

        def body(memory: Memory) -> Memory:
            memory = self.arrive(memory, j, box, t)
            return self.ops.forward(memory, j, memory[f"params{j}"], t)

        return when(mine, body, memory, changes)

    def arrive(self, memory: Memory, j: int, box: str, t: jax.Array) -> Memory:
        """Take the sum that has come around, and update where this step needs a newer version.

        A fresh worker applies the sum at once. A delayed one that sees it before the ring's end keeps it for its next step; one
        that sees it after that applies it at once. In step 1 of a run theta_T itself is what a delayed worker finds pending.
        """
        e, handed = self.plan.ring.first_users[j], f"handed{self.plan.ring.boxes[j]}"
        params, pending, optimizer = f"params{j}", f"pending{j}", f"optimizer{j}"
        fresh, keeps = (jnp.asarray(mask[:, j])[self.i] for mask in (self.plan.fresh, self.plan.keeps))

        def update(memory: Memory, gradient: PyTree) -> Memory:
            with jax.named_scope(f"update{j}"):
                new, state = self.plan.update(gradient, memory[optimizer], memory[params])
            return {**memory, params: new, optimizer: state, "applied": t}

        def arrived(memory: Memory) -> PyTree:
            return self.plan.format.unpack(j, memory[box])

        memory = when((self.i == e) & (t >= 1), lambda m: {**m, box: m[handed]}, memory, [box])
        memory = {**memory, "applied": jnp.full_like(t, -1)}
        if not self.plan.keeps[:, j].all():
            due = (t >= jnp.where(fresh, 1, 2)) & ~keeps
            memory = when(due, lambda m: update(m, arrived(m)), memory, [params, optimizer])
        if not self.plan.fresh[:, j].all():
            start = (t == 1) & ~fresh
            memory = when(start, lambda m: {**m, params: m[pending], "applied": t}, memory, [params, "applied"])
        if self.plan.keeps[:, j].any():
            changes = [params, optimizer, "applied"]
            memory = when((t >= 2) & keeps, lambda m: update(m, m[pending]), memory, changes)
            # asking what was applied orders the two: pending is read before it is replaced, and neither is copied
            replace = keeps & (memory["applied"] == t)
            memory = when(replace, lambda m: {**m, pending: arrived(m)}, memory, [pending])
        return memory

    def backward(self, memory: Memory, j: int, beat: int, mine: jax.Array) -> Memory:
        """Add this worker's gradient to the sum that came around; worker N−1 turns it into the mean."""
        box, last = f"box{beat}", self.i == self.N - 1

        def body(memory: Memory) -> Memory:
            gradient, memory = self.ops.backward(memory, j, memory[f"params{j}"])
            flat = self.plan.format.flatten(j, gradient)
            before = {name: memory[box][name][: vector.size] for name, vector in flat.items()}
            # never by multiplying: what the first worker finds in the box may be anything
            total = {name: jnp.where(self.i == 0, 0, before[name]) + vector for name, vector in flat.items()}
            total = {name: jnp.where(last, vector / self.N, vector) for name, vector in total.items()}
            memory = {**memory, box: self.plan.format.write(total, memory[box])}
            return self.over_data(memory, box, last)

        return when(mine, body, memory, [box, *self.ops.backward_changes(j)])

    def over_data(self, memory: Memory, box: str, last: jax.Array) -> Memory:
        """The mean over data groups. Only the groups' workers N−1 take part: the predicate is the same for all of them."""
        if self.plan.groups == 1:
            return memory
        with jax.named_scope("mean/data"):
            return when(last, lambda m: {**m, box: jax.lax.pmean(m[box], DATA)}, memory, [box])

    def keep_final(self, memory: Memory, j: int, mine: jax.Array) -> Memory:
        """Where the last step's sum of stage j would have been used first."""
        handed = f"handed{self.plan.ring.boxes[j]}"
        here = mine & (self.i == self.plan.ring.first_users[j])
        final = f"final{j}"
        return when(here, lambda m: {**m, final: self.plan.format.unpack(j, m[handed])}, memory, [final])

    # ---- messages -------------------------------------------------------------------------------------------

    def ride(self, memory: Memory, beat: int, b: jax.Array) -> Memory:
        """What block b's beat left in its box goes one worker on, to be used one block later."""
        box, pairs = f"box{beat}", [self.plan.ring.pairs(beat, block) for block in range(self.N)]
        if not any(pairs):
            return memory
        with jax.named_scope("send/gradient"):
            return {**memory, box: jax.lax.switch(b, [partial(_permute, some) for some in pairs], memory[box])}

    def hand_off(self, memory: Memory, beat: int, hand_off: HandOff, b: jax.Array) -> Memory:
        """Worker N−1's finished sum, which may be needed in the very next tick, goes to its first user."""
        pair = ((self.N - 1, hand_off.receiver),) if hand_off.receiver != self.N - 1 else ()
        box, handed = f"box{beat}", f"handed{hand_off.box}"
        with jax.named_scope(f"send/finished{hand_off.stage}"):
            return when(b == hand_off.block, lambda m: {**m, handed: _permute(pair, m[box])}, memory, [handed])


def _permute(pairs: Any, payload: PyTree) -> PyTree:
    return jax.lax.ppermute(payload, CYCLIC, pairs) if pairs else payload
