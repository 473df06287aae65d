"""One period of the ZeRO executor on one device: its ops, the parameters that pass by, and the stages that it owns."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from cyclic_jax.executors.base import Batch
from cyclic_jax.executors.clock import Clock
from cyclic_jax.executors.guard import TURN, Memory, when
from cyclic_jax.executors.mesh import CYCLIC, DATA
from cyclic_jax.executors.payload import Payload, PayloadFormat
from cyclic_jax.executors.ring import HandOff
from cyclic_jax.executors.route import permute, routed
from cyclic_jax.executors.shares import Shares
from cyclic_jax.executors.stage_op import StageOp
from cyclic_jax.executors.streams import Streams
from cyclic_jax.executors.worker_ops import WorkerOps
from cyclic_jax.schedule import FORWARD

PyTree = Any


@dataclass(frozen=True)
class Plan:
    """What is fixed before anything runs.

    Attributes:
        streams: the table, arranged.
        ops: forward and backward of each stage.
        params: structs of each stage's parameters.
        carried: how parameters lie in a stream's box.
        summed: how gradients lie in a payload.
        shares: for each rank, what an owner has.
        groups: D.
        structs: ``(inputs, targets)`` of one micro-batch.
    """

    streams: Streams
    ops: list[StageOp]
    params: tuple[PyTree, ...]
    carried: PayloadFormat
    summed: PayloadFormat
    shares: tuple[Shares, ...]
    groups: int
    structs: Batch


class Period:
    """The body of one period's blocks on one device.

    ``i`` is the device's place in the ring, ``t`` its own step since the start; below 0 it has not begun, and all but the streams
    is a bubble. Draining (``batch`` is ``None``) no worker begins a step, and owners keep the version before the last.
    """

    def __init__(self, plan: Plan, clock: Clock, batch: Batch | None):
        self.plan, self.clock, self.streams, self.ring = plan, clock, plan.streams, plan.streams.ring
        self.N, self.draining = plan.streams.num_workers, batch is None
        self.i = jax.lax.axis_index(CYCLIC)
        worker = jax.lax.axis_index(DATA) * self.N + self.i
        self.ops = WorkerOps(plan.ops, plan.structs, clock, batch, worker)

    def block(self, memory: Memory, b: jax.Array) -> Memory:
        """All beats of one block: this device's op in each, then what it sends. ``b`` counts from the start of the run."""
        t, k = jnp.divmod(b - self.i, self.N)
        for beat, late in enumerate(self.ring.late):
            if late:
                memory = self.send(memory, beat, b - 1)
        for beat, ops in enumerate(self.ring.beats):
            for block, op in enumerate(ops):
                if op is not None:
                    run = self.forward if op.kind == FORWARD else self.backward
                    memory = run(memory, op.stage, beat, t, (k == block) & (t >= 0))
            for hand_off in self.ring.hand_offs(beat):
                memory = self.hand_off(memory, beat, hand_off, b)
            if not self.ring.late[beat]:
                memory = self.send(memory, beat, b)
        return memory

    # ---- ops ------------------------------------------------------------------------------------------------

    def forward(self, memory: Memory, j: int, beat: int, t: jax.Array, mine: jax.Array) -> Memory:
        """The owner brings its stage up to date first."""
        memory = self.own(memory, j, beat, t, mine)
        run = lambda m: self.ops.forward(m, j, self.read(m, j, beat), t)  # noqa: E731
        return when(self.begun(mine, t), run, memory, self.ops.forward_changes(j))

    def backward(self, memory: Memory, j: int, beat: int, t: jax.Array, mine: jax.Array) -> Memory:
        """Add this worker's gradient to the sum that came around; worker N−1 turns it into the mean."""
        box, last, summed = f"sum{beat}", self.i == self.N - 1, self.plan.summed
        if self.streams.swapped[j]:
            here = mine & (self.i == self.streams.owners[j])
            memory = when(here, lambda m: self.swap(m, j, beat), memory, [f"stream{beat}"])

        def body(memory: Memory) -> Memory:
            gradient, memory = self.ops.backward(memory, j, self.read(memory, j, beat))

            def add(before: jax.Array, leaf: jax.Array) -> jax.Array:
                # never by multiplying: what the first worker finds in the box may be anything
                total = jnp.where(self.i == 0, 0, before) + leaf
                return jnp.where(last, total / self.N, total)

            memory = {**memory, box: summed.change(j, memory[box], add, gradient)}
            if self.plan.groups == 1:
                return memory
            # only the groups' workers N−1 take part: the predicate is the same for all of them
            return when(last, lambda m: {**m, box: jax.lax.pmean(m[box], DATA)}, memory, [box])

        return when(self.begun(mine, t), body, memory, [box, *self.ops.backward_changes(j)])

    def begun(self, mine: jax.Array, t: jax.Array) -> jax.Array:
        """Draining, a step that would begin does not."""
        return mine & (t < self.clock.calls) if self.draining else mine

    def read(self, memory: Memory, j: int, beat: int) -> PyTree:
        """The parameters of stage j that pass by."""
        params = self.plan.carried.unpack(j, memory[f"stream{beat}"])
        return jax.tree.map(lambda leaf, struct: leaf.astype(struct.dtype), params, self.plan.params[j])

    # ---- the owner ------------------------------------------------------------------------------------------

    def own(self, memory: Memory, j: int, beat: int, t: jax.Array, mine: jax.Array) -> Memory:
        """Before its forward the owner applies the finished sum of the step before, and swaps the stage in."""
        rank, owner = self.streams.ranks[j], self.streams.owners[j]
        changes = [f"master{rank}", f"optimizer{rank}", *([f"previous{rank}"] if self.draining else [])]

        def body(memory: Memory) -> Memory:
            memory = when(t >= 1, partial(self.update, j), memory, changes)
            return self.swap(memory, j, beat) if self.streams.swapped[j] else memory

        swapped = [f"stream{beat}"] if self.streams.swapped[j] else []
        return when(mine & (self.i == owner), body, memory, [*changes, *swapped])

    def update(self, j: int, memory: Memory) -> Memory:
        """theta_t from theta_{t−1} and the finished sum of step t − 1."""
        rank = self.streams.ranks[j]
        master, optimizer, handed = f"master{rank}", f"optimizer{rank}", memory[f"handed{self.ring.boxes[j]}"]
        kept = {f"previous{rank}": memory[master]} if self.draining else {}
        new, state = self.plan.shares[rank].update(j, handed, memory[master], memory[optimizer])
        return {**memory, **kept, master: new, optimizer: state}

    def swap(self, memory: Memory, j: int, beat: int) -> Memory:
        """The owner's version replaces what passes by."""
        box = f"stream{beat}"
        return {**memory, box: self.plan.carried.put(j, self.master(memory, j), memory[box])}

    def master(self, memory: Memory, j: int) -> PyTree:
        """The parameters of stage j, at their owner."""
        rank = self.streams.ranks[j]
        return self.plan.shares[rank].params(j, memory[f"master{rank}"])

    # ---- messages -------------------------------------------------------------------------------------------

    def send(self, memory: Memory, beat: int, b: jax.Array) -> Memory:
        """What block b's beat has read and summed goes one worker on, to be used one block later."""
        blocks, block, first = range(self.N), b % self.N, b + 1 < self.N
        sums = [self.streams.sums(beat, k) for k in blocks]
        if any(sums):
            memory = {**memory, f"sum{beat}": routed(sums, block, memory[f"sum{beat}"])}
        box, hops = f"stream{beat}", [self.streams.from_owner(beat, k) for k in blocks]
        memory, hop = self.from_owner(memory, hops, block)
        riding = [self.streams.riding(beat, k, first) for first in (False, True) for k in blocks]
        memory = {**memory, box: routed(riding, block + self.N * first, memory[box])}
        if hop is None:
            return memory
        due = jnp.asarray([stage is not None for stage in hops])[block] & (self.i == 0) & ~first
        return when(due, lambda m: {**m, box: hop}, memory, [box])

    def from_owner(self, memory: Memory, stages: list[int | None], block: jax.Array) -> tuple[Memory, Payload | None]:
        """What worker 0 gets from the owner of the stage that it needs one block later, if any stage needs it."""
        if all(stage is None for stage in stages):
            return memory, None
        masters = {f"master{rank}": memory[f"master{rank}"] for rank in set(self.streams.ranks)}

        def branch(j: int | None, masters: Memory, turn: jax.Array) -> tuple[jax.Array, Payload]:
            payload = self.plan.carried.full(0.0)
            if j is not None:
                payload = self.plan.carried.put(j, self.master(masters, j), payload)
                payload = permute([(self.streams.owners[j], 0)] if self.streams.owners[j] else [], payload)
            return turn + 1, payload

        turn, hop = jax.lax.switch(block, [partial(branch, j) for j in stages], masters, memory[TURN])
        return {**memory, TURN: turn}, hop

    def hand_off(self, memory: Memory, beat: int, hand_off: HandOff, b: jax.Array) -> Memory:
        """Worker N−1's finished sum goes to the stage's owner, who may need it in the very next tick."""
        pair = [(self.N - 1, hand_off.receiver)] if hand_off.receiver != self.N - 1 else []
        box, handed = f"sum{beat}", f"handed{hand_off.box}"
        now = b % self.N == hand_off.block
        return when(now, lambda m: {**m, handed: permute(pair, m[box])}, memory, [handed])
