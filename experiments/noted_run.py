"""Executors that take notes: every op that runs tells its device, tick, stage and micro-batch, from inside its guard.

Bubbles tell nothing. A tick is the time of a forward; a backward takes two.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax

import cyclic_jax as cj
from benchmarks.flushed_pipeline import FlushedPipeline, OneVersion, Phases
from cyclic_jax.executors.guard import Memory
from cyclic_jax.executors.mesh import CYCLIC
from cyclic_jax.executors.model_parallel import ModelParallelExecutor
from cyclic_jax.executors.one_stage import OneStage
from cyclic_jax.executors.pipeline import PipelineExecutor
from cyclic_jax.executors.stage_work import StageWork
from cyclic_jax.schedule import BACKWARD, FORWARD

LENGTH = {FORWARD: 1, BACKWARD: 2}  # ticks
WAYS = ("DP x MP", "CDP x MP", "CDP pipeline")


@dataclasses.dataclass(frozen=True, order=True)
class Event:
    """An op that ran. ``tick`` is its first; ``micro_batch`` is (data group, number since the start)."""

    device: int
    tick: int
    kind: str
    stage: int
    micro_batch: tuple[int, int]

    @property
    def end(self) -> int:
        """The first tick after it."""
        return self.tick + LENGTH[self.kind]


class NotedWork(StageWork):
    """Tells of every op that runs. ``tick`` is set before each; ``seen`` is called by an op once, and only if it runs."""

    events: list[Event]
    tick: jax.Array
    kind: str

    def forward(self, memory: Memory, j: int, m: jax.Array, mine: jax.Array) -> Memory:
        """As it is."""
        self.kind = FORWARD
        return super().forward(memory, j, m, mine)

    def backward(self, memory: Memory, j: int, m: jax.Array, mine: jax.Array) -> Memory:
        """As it is."""
        self.kind = BACKWARD
        return super().backward(memory, j, m, mine)

    def seen(self, memory: Memory, j: int, t: jax.Array, i: jax.Array) -> Any:
        """Take a note, then read the parameters."""
        kind, events = self.kind, self.events

        def note(device: Any, tick: Any, stage: Any, group: Any, m: Any) -> None:
            events.append(Event(int(device), int(tick), kind, int(stage), (int(group), int(m))))

        device = self.group * jax.lax.axis_size(CYCLIC) + jax.lax.axis_index(CYCLIC)
        jax.debug.callback(note, device, self.tick, self.stage(j), self.group, self.step(t) * self.N + i)
        return super().seen(memory, j, t, i)

    def step(self, t: jax.Array) -> jax.Array:
        """Steps since the start."""
        return t


class NotedVersion(NotedWork, OneVersion):
    """Its clock begins anew in each step."""

    def step(self, t: jax.Array) -> jax.Array:
        """Steps since the start, which is that of the state."""
        return self.clock.first_step


class _NotedOneStage(OneStage):
    def _phase(self, work: StageWork, memory: Memory, phase: int, b: jax.Array, begun: jax.Array) -> Memory:
        assert isinstance(work, NotedWork)
        work.tick = b * self.lanes.offset + phase
        return super()._phase(work, memory, phase, b, begun)


class NotedPipeline(_NotedOneStage, PipelineExecutor):
    """The pipeline executor."""


class NotedModelParallel(_NotedOneStage, ModelParallelExecutor):
    """The model-parallel executor."""


class NotedCopies(FlushedPipeline):
    """Forwards, then backwards: a step takes 3(M + S − 1) ticks."""

    def _block(
        self, work: StageWork, phases: Phases, carry: tuple[Memory, Any], b: jax.Array
    ) -> tuple[tuple[Memory, Any], None]:
        assert isinstance(work, NotedVersion)
        sweep, ((turns, _),) = self.M + self.S - 1, phases
        place = b if turns[0].op.kind == FORWARD else sweep + 2 * b
        work.tick = work.clock.first_step * 3 * sweep + place
        return super()._block(work, phases, carry, b)


def make(way: str, num_workers: int) -> Any:
    """The executor of a way, without data yet. What it notes is in ``work.events``."""
    rows, width, N = 2, 4, num_workers
    layers = cj.models.residual_mlp(3, in_features=width, width=width, depth=N)
    model = cj.partition(layers, N, example=jax.ShapeDtypeStruct((rows, width), np.float32), by="layers")
    optimizer, events = optax.sgd(0.1), list[Event]()
    if way == "DP x MP":
        copies = NotedCopies(model, _loss, optimizer, micro_batches=1, groups=N)
        copies.work = type("Work", (NotedVersion,), {"events": events})
        return copies
    kind: Any = NotedModelParallel if way == "CDP x MP" else NotedPipeline
    executor = kind(model, _loss, optimizer, rule=cj.UpdateRule.cdp_v2(N), schedule=cj.Schedule.pipeline(N))
    executor.work = type("Work", (NotedWork,), {"events": events})
    return executor


def _loss(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()


def run_noted(executor: Any, num_workers: int, steps: int) -> list[Event]:
    """Train for some steps; the events of them all, by device and tick."""
    model = executor.model
    struct, rng = model.structs[0], np.random.default_rng(0)
    rows = num_workers * struct.shape[0]
    batch = rng.normal(size=(rows, *struct.shape[1:])).astype(np.float32), rng.integers(0, 3, rows).astype(np.int32)
    if isinstance(executor, FlushedPipeline):
        executor.prepare(batch)
    carry = executor.init(cj.TrainState.create(model, optax.sgd(0.1), jax.random.key(0), num_workers=num_workers))
    placed = jax.device_put(batch, executor.batch_sharding)
    for _ in range(steps):
        carry, metrics = executor.step(carry, placed)
        jax.block_until_ready((carry, metrics))
    jax.effects_barrier()
    return sorted(executor.work.events)
