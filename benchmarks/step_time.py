"""Step time of the executors and of the baselines, in one process, on the same model and data.

``python -m benchmarks.step_time --model residual_mlp --width 256 --batch-per-worker 2048``. Measurements take turns; times are
medians, with the least beside them, and the ratio is that of the medians to the first row's. A step of ``gpipe 4N`` has four times
the micro-batches, so all times are those of one micro-batch of B rows: the step's divided by its micro-batches.

``gpipe`` and ``1f1b`` flush after N or 4N micro-batches; ``dp-mp`` is N copies of a model cut over N devices, one micro-batch each,
on N² devices; ``zero1`` and ``fsdp`` are plain data parallelism with sharded states, by collectives. The makespan is what the table
promises for one micro-batch if all meet at each tick and B = 2F: 3.0 is the ideal.

With more simulated devices than cores the wall time is total work; pinned to one core (``taskset -c 0``) it is exactly that, and
cannot see waiting. With two workers, two cores and ``--one-thread`` (no threads inside an op) it can. The CPU time is total work in
either case, and other programs on the machine disturb it less.
"""

import dataclasses
import os
import statistics
import sys
import time

import tyro

import cyclic_jax as cj
from benchmarks.contenders import Contender, Setting, check_name, contender, num_devices


@dataclasses.dataclass(frozen=True)
class Config(Setting):
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
    """In this order; a table and an executor ("v2 pipeline", "one-op pipeline"), or dp, zero1, fsdp, dp-mp, "gpipe N", "gpipe 4N",
    "1f1b N", "1f1b 4N"."""
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
    try:
        for name in config.executors:
            check_name(name)
        cj.simulate_devices(max(num_devices(name, config.num_workers) for name in config.executors))
        runs = {name: Timed(contender(name, config)) for name in config.executors}
    except ValueError as error:
        sys.exit(f"error: {error}")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(config.repeats):
        for name, run in runs.items():
            times[name].append(run.measure(config.steps))
    print(table(config, runs, times))


def table(config: Config, runs: "dict[str, Timed]", times: dict[str, list[tuple[float, float]]]) -> str:
    """Markdown; times (wall, CPU) are those of one micro-batch, memory that of one device."""
    head = ["executor", "devices", f"ms per micro-batch of {config.batch_per_worker} rows", "least", "CPU ms", "ratio"]
    head += ["makespan (F)", "micro-batches a step", "compile s", "argument MB", "temp MB"]
    medians = {name: statistics.median(wall for wall, _ in found) for name, found in times.items()}
    lines, base = [head, ["---"] * len(head)], medians[config.executors[0]]
    for name, run in runs.items():
        cells = [name, str(num_devices(name, config.num_workers)), f"{1e3 * medians[name]:.1f}"]
        least, work = min(wall for wall, _ in times[name]), statistics.median(cpu for _, cpu in times[name])
        cells += [f"{1e3 * least:.1f}", f"{1e3 * work:.1f}", f"{medians[name] / base:.2f}"]
        cells += [f"{run.makespan:.2f}", str(run.micro_batches)]
        cells += [f"{run.compile_seconds:.1f}", f"{run.argument_bytes / 1e6:.1f}", f"{run.temp_bytes / 1e6:.1f}"]
        lines.append(cells)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


class Timed:
    """A compiled step with its carry."""

    def __init__(self, one: Contender):
        import jax

        self.makespan, self.micro_batches, self.executor = one.makespan, one.micro_batches, one.executor
        self.batch = jax.device_put(one.batch, one.executor.batch_sharding)
        carry = one.executor.init(one.state)
        begin = time.perf_counter()
        compiled = one.executor.lower(carry, one.batch).compile()
        self.compile_seconds = time.perf_counter() - begin
        memory = compiled.memory_analysis()
        self.argument_bytes, self.temp_bytes = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        self.carry, _ = one.executor.step(carry, self.batch)
        self.measure(2)

    def measure(self, steps: int) -> tuple[float, float]:
        """Seconds per micro-batch: on the clock, and of all cores together."""
        import jax

        begin, work = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.carry, metrics = self.executor.step(self.carry, self.batch)
        jax.block_until_ready((self.carry, metrics))
        wall, work = time.perf_counter() - begin, time.process_time() - work
        return wall / (steps * self.micro_batches), work / (steps * self.micro_batches)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
