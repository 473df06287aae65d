"""Memory of a device with adamw, as compiled: plain data parallelism, sharded by collectives, and sharded point to point.

``python -m benchmarks.state_memory --models resnet50 vit_b16 --num-workers 4 8``. Nothing runs: each program is compiled for
simulated devices, in a process of its own, and the compiler says what it takes as arguments and allocates beside them. Stages are
balanced by parameters.

``states`` are parameters and optimizer state, streams of parameters between two steps included. The formula beside them, with P the
bytes of all parameters and p those of the largest stage: 3 P for ``dp``, P + 2 P/N for ``zero1``, 3 P/N for ``fsdp``, and 3 p + 2 p
for the ZeRO executor, what the owner of the largest stage has and two stages in flight.
"""

import dataclasses
import json
import math
import subprocess
import sys
import time
from typing import Any

import tyro

KINDS = ("dp", "zero1", "fsdp", "v1 zero", "v2 zero")


@dataclasses.dataclass(frozen=True)
class Config:
    """What is compiled."""

    models: tuple[str, ...] = ("resnet50", "vit_b16")
    """Keys of cyclic_jax.models.MODELS."""
    num_workers: tuple[int, ...] = (4, 8)
    """N; as many stages."""
    image_size: int = 224
    """H = W; 3 channels."""
    num_classes: int = 1000
    """Outputs."""
    batch_per_worker: int = 8
    """B."""
    kinds: tuple[str, ...] = KINDS
    """Of dp, zero1, fsdp, v1 zero, v2 zero."""


def main(config: Config) -> None:
    """One row a program."""
    unknown = set(config.kinds) - set(KINDS)
    if unknown:
        sys.exit(f"error: kinds are {', '.join(KINDS)}, got {', '.join(sorted(unknown))}")
    print("| model | N | program | states MiB | formula MiB | argument MiB | temp MiB | sum MiB | compile s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for model in config.models:
        for N in config.num_workers:
            for kind in config.kinds:
                print(row(config, model, N, kind), flush=True)


def row(config: Config, model: str, num_workers: int, kind: str) -> str:
    """Markdown, from a process of its own: it needs as many simulated devices as workers."""
    code = (
        "import json, sys; from benchmarks.state_memory import *; "
        "print(json.dumps(measure(Config(**json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3]), sys.argv[4])))"
    )
    command = [sys.executable, "-c", code, json.dumps(dataclasses.asdict(config)), model, str(num_workers), kind]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {model}, N = {num_workers}, {kind}: {done.stderr.strip().splitlines()[-1]}")
    found = json.loads(done.stdout.splitlines()[-1])
    sizes = [found[name] / 2**20 for name in ("states", "formula", "arguments", "temporaries")]
    cells = [f"{size:.1f}" for size in (*sizes, sizes[2] + sizes[3])]
    return f"| {model} | {num_workers} | {kind} | {' | '.join(cells)} | {found['seconds']:.0f} |"


def measure(config: Config, model: str, num_workers: int, kind: str) -> dict[str, float]:
    """Bytes of a device, and the seconds it took to compile."""
    import cyclic_jax as cj

    cj.simulate_devices(num_workers)
    machine, carry, batch = build(config, model, num_workers, kind)
    begin = time.perf_counter()
    memory = machine.lower(carry, batch).compile().memory_analysis()
    return {
        "states": held(carry),
        "formula": formula(machine.model, num_workers, kind),
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "seconds": time.perf_counter() - begin,
    }


def build(config: Config, name: str, num_workers: int, kind: str) -> tuple[Any, Any, Any]:
    """``(machine, carry, batch)``, of structs."""
    import jax
    import numpy as np
    import optax

    import cyclic_jax as cj
    from benchmarks.data_parallel import DataParallel
    from benchmarks.sharded import Sharded

    N, shape, optimizer = num_workers, (config.image_size, config.image_size, 3), optax.adamw(1e-3)
    layers = cj.models.build(name, num_classes=config.num_classes, image_shape=shape)
    example = jax.ShapeDtypeStruct((config.batch_per_worker, *shape), np.float32)
    model = cj.partition(layers, N, by="params", example=example)

    def loss(outputs: jax.Array, targets: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()

    machine: Any
    if kind == "dp":
        machine = DataParallel(model, loss, optimizer, N)
    elif kind in ("zero1", "fsdp"):
        machine = Sharded(model, loss, optimizer, N, fully=kind == "fsdp")
    else:
        rule = cj.UpdateRule.cdp_v1(N, N) if kind == "v1 zero" else cj.UpdateRule.cdp_v2(N, N)
        machine = cj.make_executor("zero", model, loss, optimizer, rule=rule)
    state = jax.eval_shape(lambda: cj.TrainState.create(model, optimizer, jax.random.key(0), num_workers=N))
    rows = N * config.batch_per_worker
    batch = (np.zeros((rows, *shape), np.float32), np.zeros(rows, np.int32))
    return machine, machine.carry_struct(state), batch


def held(carry: Any) -> int:
    """Bytes on one device of parameters and optimizer state, in a carry of structs."""
    import jax

    if hasattr(carry, "held"):
        states: Any = [part for name, part in carry.held.items() if name.startswith(("master", "optimizer", "stream"))]
    else:
        states = (carry.params, carry.opt_state, getattr(carry, "shards", ()))
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(states)
    )


def formula(model: Any, num_workers: int, kind: str) -> float:
    """See the module's text."""
    import jax

    stages = jax.eval_shape(model.init, jax.random.key(0))[0]
    each = [sum(p.size * p.dtype.itemsize for p in jax.tree.leaves(stage)) for stage in stages]
    whole, N = sum(each), num_workers
    return {"dp": 3 * whole, "zero1": whole + 2 * whole / N, "fsdp": 3 * whole / N}.get(kind, 5 * max(each))


if __name__ == "__main__":
    main(tyro.cli(Config))
