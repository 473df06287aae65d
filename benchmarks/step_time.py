"""Step time of the executors against plain data parallelism, in one process, on the same model and data.

``python -m benchmarks.step_time --model residual_mlp --width 256 --batch-per-worker 2048``. Steps of the executors alternate, and
the ratio is that of the medians. With more simulated devices than cores the wall time is total work; pinned to one core
(``taskset -c 0``) it is exactly that, and cannot see waiting. With two workers, two cores and ``--one-thread`` (no threads inside
an op) it can.
"""

import dataclasses
import os
import statistics
import time
from typing import Any

import tyro

import cyclic_jax as cj


@dataclasses.dataclass(frozen=True)
class Config:
    """What is timed."""

    model: str = "residual_mlp"
    """A key of cyclic_jax.models.MODELS."""
    width: int = 256
    """Of residual_mlp."""
    depth: int = 6
    """Blocks of residual_mlp."""
    num_workers: int = 4
    """N; as many stages."""
    batch_per_worker: int = 2048
    """B."""
    executors: tuple[str, ...] = ("dp", "v1 replicated", "v2 replicated", "balanced replicated")
    """dp must be among them."""
    repeats: int = 7
    """Timed rounds; in each, every executor makes one measurement."""
    steps: int = 2
    """Steps of one measurement."""
    one_thread: bool = False
    """No threads inside an op."""


def main(config: Config) -> None:
    """Print one row per executor."""
    if config.one_thread:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    cj.simulate_devices(config.num_workers)
    runs = {name: start(name, config) for name in config.executors}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(config.repeats):
        for name, run in runs.items():
            times[name].append(run.measure(config.steps))
    base = statistics.median(times["dp"])
    print(
        f"{'executor':20} {'ms/step':>9} {'ratio':>6} {'compile s':>9} {'argument MB':>11} {'temp MB':>8} {'lockstep/ideal':>14}"
    )
    for name, run in runs.items():
        middle = statistics.median(times[name])
        memory = f"{run.argument_bytes / 1e6:11.1f} {run.temp_bytes / 1e6:8.1f}"
        print(
            f"{name:20} {1e3 * middle:9.1f} {middle / base:6.2f} {run.compile_seconds:9.2f} {memory} {run.makespan:14.2f}"
        )


class Timed:
    """A compiled step with its carry."""

    def __init__(self, executor: Any, state: cj.TrainState, batch: Any, makespan: float):
        import jax

        self.makespan, self.batch = makespan, jax.device_put(batch, executor.batch_sharding)
        carry = executor.init(state)
        begin = time.perf_counter()
        compiled = executor.lower(carry, batch).compile()
        self.compile_seconds = time.perf_counter() - begin
        memory = compiled.memory_analysis()
        self.argument_bytes, self.temp_bytes = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        self.executor = executor
        self.carry, _ = executor.step(carry, self.batch)
        self.measure(2)

    def measure(self, steps: int) -> float:
        """Seconds per step."""
        import jax

        begin = time.perf_counter()
        for _ in range(steps):
            self.carry, metrics = self.executor.step(self.carry, self.batch)
        jax.block_until_ready((self.carry, metrics))
        return (time.perf_counter() - begin) / steps


def start(name: str, config: Config) -> Timed:
    """Compile one executor's step and run it a few times."""
    import jax
    import numpy as np
    import optax

    N, B, rng = config.num_workers, config.batch_per_worker, np.random.default_rng(0)
    is_mlp = config.model == "residual_mlp"
    shape = (8, 8, 1) if is_mlp else (32, 32, 3)
    options = {"width": config.width, "depth": config.depth} if is_mlp else {}
    layers = cj.models.build(config.model, num_classes=10, image_shape=shape, **options)
    balanced = name.startswith("balanced")
    stages = min(2 * N, len(layers)) if balanced else N
    model = cj.partition(layers, stages, example=jax.ShapeDtypeStruct((B, *shape), np.float32))
    optimizer = optax.sgd(0.01, momentum=0.9)
    state = cj.TrainState.create(model, optimizer, jax.random.key(0), num_workers=N)
    batch = (rng.normal(size=(N * B, *shape)).astype(np.float32), rng.integers(0, 10, N * B).astype(np.int32))

    def loss(outputs: jax.Array, targets: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()

    if name == "dp":
        from benchmarks.data_parallel import DataParallel

        return Timed(DataParallel(model, loss, optimizer, N), state, batch, 1.0)
    table, kind = name.split()
    schedule = make_schedule(table, kind, N, stages)
    rule = cj.UpdateRule.cdp_v1(N, stages) if table == "v1" else cj.UpdateRule.freshest(schedule)
    executor = cj.make_executor(kind, model, loss, optimizer, rule=rule, schedule=schedule)
    moving = "gradients" if kind == "replicated" else "activations"
    return Timed(executor, state, batch, schedule.makespan(1, 2, moving=moving) / schedule.ideal(1, 2, moving=moving))


def make_schedule(table: str, kind: str, num_workers: int, num_stages: int) -> cj.Schedule:
    """``balanced`` or the executor's own table; ``one-op`` asks for one op a tick."""
    if table == "balanced":
        return cj.Schedule.balanced(num_workers, [1] * num_stages, [2] * num_stages)
    if kind == "pipeline" and table != "one-op":
        return cj.Schedule.pipeline(num_workers)
    return cj.Schedule.cyclic(num_workers)


if __name__ == "__main__":
    main(tyro.cli(Config))
