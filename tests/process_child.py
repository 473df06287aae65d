"""What each process of tests/test_processes.py does: train every executor on its own rows, and write down what it sees."""

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import cyclic_jax as cj
from tests import problems
from tests.quick_compile import compile_quickly

STEPS, ROWS, DEVICES = 3, 2, 4  # devices of each process


def mesh(*rings: tuple[int, ...]) -> Mesh:
    """Of some of all processes' devices, by number; rings are data groups."""
    return Mesh(np.asarray(jax.devices())[np.asarray(rings)], ("data", "cyclic"))


def cases() -> dict[str, tuple[str, int, Mesh | None]]:
    """Executor, N and mesh. Of eight devices the first four are process 0's; rings cross from one process to the other."""
    crossing = mesh((0, 4, 1, 5), (6, 2, 7, 3))
    return {
        "synchronous": ("synchronous", 4, crossing),
        "fewer devices": ("synchronous", 4, mesh((5, 0))),
        "replicated": ("replicated", 4, crossing),
        "zero": ("zero", 4, crossing),
        "pipeline": ("pipeline", 4, crossing),
        "model parallel": ("model_parallel", 3, mesh((0, 1, 2, 4, 5, 6))),
        "moved": ("synchronous", 3, mesh((7, 0, 4))),  # goes on from what the six devices hold
        "wrong rows": ("synchronous", 4, crossing),
    }


@functools.cache
def make(name: str, n: int, on: Mesh | None) -> Any:
    model, optimizer = problems.model(n), problems.OPTIMIZERS["sgd"]
    return cj.make_executor(name, model, problems.loss, optimizer, rule=cj.UpdateRule.cdp_v2(n), mesh=on)


def start(executor: Any) -> cj.TrainState:
    """A fresh start, but for a previous version of its own."""
    state = problems.fresh_start(executor.model, "sgd", executor.num_workers)
    previous = jax.tree.map(lambda leaf: leaf * 1.05, state.params)
    return cj.TrainState(**{**vars(state), "previous_params": previous})


def train(executor: Any, state: cj.TrainState, wrong_rows: bool = False) -> tuple[cj.TrainState, list[cj.Metrics]]:
    """A few steps on this process's rows alone (or, wrongly, on as many others), and the metrics of all workers."""
    carry, seen = executor.init(state), []
    for t in range(STEPS):
        (inputs, targets), rows = problems.batch(t, executor.num_workers), ROWS * executor.num_workers
        own = (cj.local_rows(executor, rows) + ROWS * wrong_rows) % rows
        batch = inputs[own], targets[own]
        if len(executor.batch_sharding.device_set) < executor.mesh.size:
            batch = cj.global_batch(executor, batch, rows=rows)
        carry, metrics = executor.step(carry, batch)
        seen.append(metrics)
    state, last = executor.drain(carry)
    return state, cj.read_metrics([*seen, last])


def leaves(state: cj.TrainState, metrics: list[cj.Metrics]) -> list[np.ndarray]:
    state = cj.TrainState(**{**vars(state), "key": jax.random.key_data(state.key)})
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state, metrics))]


def refusals() -> dict[str, str]:
    """What is refused, by every process alike and before anything runs."""
    parallel = make("model_parallel", 3, mesh((0, 1, 2, 4, 5, 6)))
    carry, batch = parallel.init(start(parallel)), problems.batch(0, 3)
    own = jax.tree.map(lambda leaf: leaf[cj.local_rows(parallel, 6)], batch)
    tries = {
        "idle": lambda: make("pipeline", 4, None),
        "idle one": lambda: make("interleaved", 4, None),
        "idle mesh": lambda: make("synchronous", 4, mesh((0, 1))),
        "unknown rows": lambda: parallel.step(carry, own),
        "wrong rows": lambda: cj.global_batch(parallel, tuple(leaf[:1] for leaf in batch), rows=6),
        "odd rows": lambda: cj.global_batch(parallel, own, rows=7),
        "odd own rows": lambda: make("synchronous", 4, mesh((0, 4, 1, 5), (6, 2, 7, 3))).step(
            None, problems.batch(0, 5, rows=1)
        ),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
        except ValueError as error:
            found[name] = str(error)
    return found


def everything() -> Iterator[tuple[str, list[np.ndarray]]]:
    """Each case's final state and metrics, leaf by leaf."""
    state = None
    for case, (name, n, on) in cases().items():
        executor = make(name, n, on)
        state, metrics = train(executor, state if case == "moved" else start(executor), case == "wrong rows")
        yield case, leaves(state, metrics)


def main(process: int, processes: int, port: int, out: Path) -> None:
    cj.simulate_devices(DEVICES)
    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=process)
    for case, found in everything():
        np.savez(out / f"{case}-{process}.npz", *found)
    (out / f"refusals-{process}.json").write_text(json.dumps(refusals()))


if __name__ == "__main__":
    compile_quickly()
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
