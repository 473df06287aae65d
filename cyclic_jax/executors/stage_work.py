"""One stage's work on the device that owns it: forward, backward, and the update at the end of each training step.

Both of a stage's versions lie in slots by the parity of their step: theta_t in slot t mod 2. A forward or backward of step t uses
theta_t where the rule says fresh, else theta_{t−1}, and the update at the end of step t replaces theta_{t−1}, which nobody
needs any more by theta_{t+1} (derived; ``docs/method.md``).

Where a stage has several replicas, micro-batch m is on replica m mod K. The running sum goes from one to the next; the replica that
completes it is the one that needs the new version first, and the finished sum goes on from there, one replica a block: each
updates with it after the backward that it does in that block (derived).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyclic_jax.executors.clock import Clock
from cyclic_jax.executors.guard import Memory, when
from cyclic_jax.executors.mesh import CYCLIC, DATA
from cyclic_jax.executors.slots import Slots
from cyclic_jax.executors.stage_op import Inputs, StageOp
from cyclic_jax.stages import worker_key

PyTree = Any


@dataclass(frozen=True)
class Plan:
    """What is fixed before anything runs. Slots by what they hold.

    Attributes:
        ops: forward and backward of each stage.
        fresh: the rule's mask, bool ``[N, S]``.
        groups: D.
        update: ``update(gradient, optimizer state, params) -> (params, optimizer state)`` of one stage.
        versions: parameters, two slots.
        optimizer: the optimizer's state.
        states: statistics, a slot for each worker of the ring.
        gradients: the running sum of a step.
        residuals: from a micro-batch's forward to its backward.
        replicas: of each stage.
        alike: for each stage the one whose program it shares (:mod:`.alike`); ``None`` where a stage has several devices.
        messages: what leaves a stage: entry j for the activation that enters stage j + 1, with the targets; entry S − 1 + j for the
            cotangent of what enters stage j + 1.
    """

    ops: list[StageOp]
    fresh: np.ndarray
    groups: int
    update: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
    versions: Slots
    optimizer: Slots
    states: Slots
    gradients: Slots
    residuals: Slots
    messages: Slots
    replicas: tuple[int, ...]
    alike: tuple[int, ...] | None = None

    @property
    def last(self) -> int:
        """The last stage."""
        return len(self.ops) - 1


class StageWork:
    """The ops of stage j for micro-batch m; m counts from the start of the run, m = tN + i for worker i in step t.

    Where stages are alike, j is one of them, and what runs is the device's own.

    Buffers: ``versions``, ``optimizer``, ``state``, ``gradient``, ``residuals``; ``mail`` holds what has arrived, ``out`` what
    will be sent; ``inputs`` is the next micro-batch, ``(inputs, targets)``; ``loss`` and ``loss_step`` are ``[N]``.
    """

    def __init__(self, plan: Plan, clock: Clock, group: jax.Array):
        self.plan, self.clock, self.group, self.N = plan, clock, group, len(plan.fresh)

    def forward(self, memory: Memory, j: int, m: jax.Array, mine: jax.Array) -> Memory:
        """Run stage j on what has arrived; the last stage gives the loss."""
        op, plan = self.plan.ops[j], self.plan
        changes = ["residuals", *(["state"] if plan.states.used_bytes(j) else [])]
        changes += ["loss", "loss_step"] if op.loss else ["out"]

        def body(memory: Memory) -> Memory:
            t, i = jnp.divmod(m, self.N)
            x, targets = plan.messages.read(j - 1, memory["mail"]) if j else memory["inputs"]
            key = worker_key(self.clock.key, self.clock.first_step + t, self.group * self.N + i)
            state, targets_here = plan.states.read(j, memory["state"], i), targets if op.loss else None
            inputs = Inputs(x, state, key, targets_here, self.first_layer())
            y, state, residuals = op.forward(self.seen(memory, j, t, i), inputs)
            changed = {
                "residuals": plan.residuals.write(j, memory["residuals"], residuals, self.slot(j, m)),
                "state": plan.states.write(j, memory["state"], state, i),
            }
            if op.loss:
                changed["loss"] = memory["loss"].at[i].set(y)
                changed["loss_step"] = memory["loss_step"].at[i].set(self.clock.first_step + t)
            else:
                changed["out"] = plan.messages.write(j, memory["out"], (y, targets))
            return {**memory, **changed}

        return when(mine, body, memory, changes)

    def backward(self, memory: Memory, j: int, m: jax.Array, mine: jax.Array) -> Memory:
        """Add the gradient of stage j to the step's sum, and update after the step's last micro-batch."""
        op, plan = self.plan.ops[j], self.plan
        changes = ["gradient", "versions", "optimizer", *(["out"] if j else [])]
        changes += ["finished"] if plan.replicas[j] > 1 else []

        def body(memory: Memory) -> Memory:
            t, i = jnp.divmod(m, self.N)
            residuals = plan.residuals.read(j, memory["residuals"], self.slot(j, m))
            cotangent = jnp.ones_like(memory["loss"][0]) if op.loss else self.arrived_cotangent(memory, j)
            gradient, cotangent = op.backward(self.seen(memory, j, t, i), residuals, cotangent)
            # never by multiplying: what the first worker finds in the sum may be anything
            add = lambda before, g: jnp.where(i == 0, 0, before) + g  # noqa: E731
            memory = {**memory, "gradient": plan.gradients.change(j, memory["gradient"], add, gradient)}
            if j:
                memory["out"] = plan.messages.write(plan.last + j - 1, memory["out"], cotangent)
            return self.finish(memory, j, t, i)

        return when(mine, body, memory, changes)

    def stage(self, j: int) -> jax.Array | int:
        """Which of the stages like j is at work: with one device a stage, it has the device's number."""
        shared = self.plan.alike is not None and self.plan.alike.count(self.plan.alike[j]) > 1
        return jax.lax.axis_index(CYCLIC) if shared else j

    def first_layer(self) -> jax.Array | None:
        """The number of the first layer of this device's stage, if programs are shared."""
        if self.plan.alike is None:
            return None
        return jnp.asarray([op.stage.start for op in self.plan.ops], jnp.int32)[jax.lax.axis_index(CYCLIC)]

    def slot(self, j: int, m: jax.Array) -> jax.Array | int:
        """Where micro-batch m's residuals wait."""
        counts, stage = self.plan.residuals.counts, self.stage(j)
        if isinstance(stage, int):
            return m % counts[j] if counts[j] > 1 else 0
        return m % jnp.asarray(counts, m.dtype)[stage]

    def seen(self, memory: Memory, j: int, t: jax.Array, i: jax.Array) -> PyTree:
        """The version of stage j that worker i sees in step t."""
        delayed = jnp.asarray(~self.plan.fresh)[i, self.stage(j)].astype(t.dtype)
        return self.plan.versions.read(j, memory["versions"], (t - delayed) % 2)

    def arrived_cotangent(self, memory: Memory, j: int) -> PyTree:
        """What stage j + 1 sent back."""
        return self.plan.messages.read(self.plan.last + j, memory["mail"])

    def finish(self, memory: Memory, j: int, t: jax.Array, i: jax.Array) -> Memory:
        """The update that is due after a backward: of step t where it completes the sum, of step t − 1 where that sum arrived."""
        plan, complete = self.plan, i == self.N - 1
        if plan.replicas[j] == 1:
            return when(complete, lambda m: self.update(m, j, t, self.mean(m, j)), memory, ["versions", "optimizer"])

        def keep(memory: Memory) -> Memory:
            return {**memory, "finished": plan.gradients.write(j, memory["finished"], self.mean(memory, j))}

        def apply(memory: Memory) -> Memory:
            step = jnp.where(complete, t, t - 1)
            return self.update(memory, j, step, plan.gradients.read(j, memory["finished"]))

        memory = when(complete, keep, memory, ["finished"])
        arrived = (i <= plan.replicas[j] - 2) & (t >= 1)
        return when(complete | arrived, apply, memory, ["versions", "optimizer"])

    def mean(self, memory: Memory, j: int) -> PyTree:
        """The finished sum as a mean. All groups finish it at the same time: they all take part, and nobody else."""
        total = self.plan.gradients.read(j, memory["gradient"])
        mean = jax.tree.map(lambda g: g / self.N, total)
        with jax.named_scope("mean/data"):
            return mean if self.plan.groups == 1 else jax.lax.pmean(mean, DATA)

    def update(self, memory: Memory, j: int, t: jax.Array, gradient: PyTree) -> Memory:
        """theta_{t+1} from theta_t, in the place of theta_{t−1}."""
        plan = self.plan
        theta = plan.versions.read(j, memory["versions"], t % 2)
        with jax.named_scope(f"update{j}"):
            new, state = plan.update(gradient, plan.optimizer.read(j, memory["optimizer"]), theta)
        return {
            **memory,
            "versions": plan.versions.write(j, memory["versions"], new, (t + 1) % 2),
            "optimizer": plan.optimizer.write(j, memory["optimizer"], state),
        }
