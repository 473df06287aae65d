"""The model-parallel executor: N(N+1)/2 devices that hold one micro-batch's activations of one stage each.

Stage j has N − j replicas; micro-batch m is on replica m mod (N − j) from its forward to its backward. Data parallelism with every
copy cut over N devices takes N² devices for that (arXiv 2403.08837). Activations and cotangents go to the replica that has the
micro-batch at the next stage: the permutation of a tick repeats after lcm(1 … N) blocks and is chosen by a switch over the
message alone. The running sum of a stage's gradient, and the finished one after it, go around the stage's replicas, one a block.
"""

from collections.abc import Callable
from functools import partial
from math import lcm
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from cyclic_jax.executors.base import Loss
from cyclic_jax.executors.guard import Memory, when
from cyclic_jax.executors.lanes import Pairs, receiver
from cyclic_jax.executors.mesh import CYCLIC, DATA, ring_mesh
from cyclic_jax.executors.one_stage import DEVICES, OneStage
from cyclic_jax.executors.stage_work import StageWork
from cyclic_jax.rules import UpdateRule
from cyclic_jax.schedule import BACKWARD, FORWARD, Op, Schedule
from cyclic_jax.stages import StagedModel

PyTree = Any
MAX_WORKERS = 4


class ModelParallelExecutor(OneStage):
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
        N = rule.num_workers
        if N > MAX_WORKERS:
            raise ValueError(
                f"the model-parallel executor runs up to {MAX_WORKERS} workers, got {N}: its routing repeats after "
                f"lcm(1 … {N}) = {lcm(*range(1, N + 1))} blocks, each a program of its own; use the pipeline executor"
            )
        super().__init__(
            model,
            loss,
            optimizer,
            rule=rule,
            schedule=schedule,
            mesh=ring_mesh(mesh, N * (N + 1) // 2),
            replicas=tuple(range(N, 0, -1)),
            residuals=residuals,
            fill=fill,
        )
        # micro-batch i begins on replica i of stage 0; the devices of later stages hold no rows
        self.batch_sharding = NamedSharding(Mesh(self.mesh.devices[:, :N], (DATA, CYCLIC)), DEVICES)
        self.repeats = lcm(*range(1, N + 1))

    # ---- the step -------------------------------------------------------------------------------------------

    def _block(self, work: StageWork, memory: Memory, b: jax.Array, begun: jax.Array) -> Memory:
        """In each phase this device's op, then what leaves; last, sums and statistics go to the next replicas."""
        for phase, sends in enumerate(self.lanes.sends):
            memory = self._phase(work, memory, phase, b, begun)
            if sends:
                with jax.named_scope("send/messages"):
                    memory = {**memory, "mail": self._routed(memory["out"], b, partial(self._route, phase))}
        if len(self.replicas) > 1:
            for name, route in (("gradient", self._partial_sums), ("finished", self._finished_sums)):
                with jax.named_scope(f"send/{name}"):
                    memory = {**memory, name: self._routed(memory[name], b, route)}
        return self._move_statistics(work, memory, b, begun)

    def _routed(self, payload: PyTree, b: jax.Array, route: Callable[[int], Pairs]) -> PyTree:
        """``payload`` along the pairs of block b, which repeat after ``repeats`` blocks."""
        branches = [partial(_permute, route(k)) for k in range(self.repeats)]
        return jax.lax.switch(b % self.repeats, branches, payload)

    def _at(self, j: int, m: int) -> int:
        return int(self.first[j]) + m % self.replicas[j]

    def _route(self, phase: int, b: int) -> Pairs:
        """Activations and cotangents when a phase of block b ends."""
        ends = [(turn.op, b - turn.age) for turn in self.lanes.sends[phase]]
        return tuple(sorted((self._at(op.stage, m), self._at(receiver(op), m)) for op, m in ends))

    def _partial_sums(self, b: int) -> Pairs:
        """To the replica that does the next backward, until the sum is complete; a lone one keeps its sum."""
        return self._to_next(b, lambda i, replicas: i < self.rule.num_workers - 1)

    def _finished_sums(self, b: int) -> Pairs:
        """From the replica that completes the sum, once to each other one."""
        return self._to_next(
            b, lambda i, replicas: replicas > 1 and (i == self.rule.num_workers - 1 or i <= replicas - 3)
        )

    def _to_next(self, b: int, goes: Callable[[int, int], bool]) -> Pairs:
        pairs = []
        for j, replicas in enumerate(self.replicas):
            m = b - self.lanes.age(Op(BACKWARD, j))
            if goes(m % self.rule.num_workers, replicas):
                pairs.append((self._at(j, m), self._at(j, m + 1)))
        return tuple(pairs)

    # ---- statistics -----------------------------------------------------------------------------------------

    def _move_statistics(self, work: StageWork, memory: Memory, b: jax.Array, begun: jax.Array) -> Memory:
        """A worker's statistics go where its next micro-batch will be."""
        moving = [j for j in range(len(self.ops)) if self.rule.num_workers % self.replicas[j]]
        moving = [j for j in moving if self.states.used_bytes(j)]
        for j in moving:
            m = b - self.lanes.age(Op(FORWARD, j))
            worker = m % self.rule.num_workers
            with jax.named_scope(f"send/statistics{j}"):
                sent = self._routed(self.states.read(j, memory["state"], worker), b, partial(self._statistics_route, j))
            to = int(self.first[j]) + (m + self.rule.num_workers) % self.replicas[j]
            mine = (jax.lax.axis_index(CYCLIC) == to) & (m >= 0) & (m < begun)
            memory = when(mine, partial(self._store_statistics, j, sent, worker), memory, ["state"])
        return memory

    def _statistics_route(self, j: int, b: int) -> Pairs:
        m = b - self.lanes.age(Op(FORWARD, j))
        return ((self._at(j, m), self._at(j, m + self.rule.num_workers)),)

    def _store_statistics(self, j: int, sent: PyTree, worker: jax.Array, memory: Memory) -> Memory:
        return {**memory, "state": self.states.write(j, memory["state"], sent, worker)}


def _permute(pairs: Pairs, payload: PyTree) -> PyTree:
    return jax.lax.ppermute(payload, CYCLIC, pairs) if pairs else payload
