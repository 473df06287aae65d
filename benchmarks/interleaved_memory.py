"""Peak memory and step time of N micro-batches on one device: interleaved, all at once, and one after the other.

``python -m benchmarks.interleaved_memory --model resnet18 --num-workers 4 --batch-per-worker 16``. All three are plain programs for
the same parameters, optimizer and data; the last two have no delay. The compiler's peak is that of one step (arguments, temporaries
and outputs that reuse no argument). Where the device counts allocations (GPUs), the allocator's peak is printed too; it cannot be
set back, so each program runs in a process of its own.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import tyro

PROGRAMS = ("interleaved", "at_once", "accumulated")


@dataclasses.dataclass(frozen=True)
class Config:
    """What is measured."""

    model: str = "resnet18"
    """A key of cyclic_jax.models.MODELS."""
    image_size: int = 32
    """H = W; 3 channels."""
    num_workers: int = 4
    """N: micro-batches."""
    num_stages: int = 4
    """S of the interleaved executor."""
    batch_per_worker: int = 16
    """B."""
    partition: Literal["flops", "params", "layers", "activations"] = "activations"
    """What the stages are balanced by."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation."""
    steps: int = 5
    """Timed steps, each on its own; the median is printed."""
    programs: tuple[str, ...] = PROGRAMS
    """Of interleaved, at_once and accumulated."""


def main(config: Config) -> None:
    """One row a program."""
    unknown = set(config.programs) - set(PROGRAMS)
    if unknown or config.steps < 1:
        sys.exit(
            f"error: programs are {', '.join(PROGRAMS)} and steps at least 1, got {config.programs}, {config.steps}"
        )
    print(f"{'program':12} {'compiler MiB':>12} {'allocator MiB':>13} {'ms/step':>9} {'compile s':>9}")
    for name in config.programs:
        code = (
            "import json, sys, dataclasses; from benchmarks.interleaved_memory import *; "
            "config = json.loads(sys.argv[1]); print(json.dumps(measure(sys.argv[2], Config(**config))))"
        )
        command = [sys.executable, "-c", code, json.dumps(dataclasses.asdict(config)), name]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"error: {name}: {done.stderr.strip().splitlines()[-1]}")
        found = json.loads(done.stdout.splitlines()[-1])
        allocator = f"{found['allocator'] / 2**20:13.1f}" if found["allocator"] else f"{'-':>13}"
        print(
            f"{name:12} {found['compiler'] / 2**20:12.1f} {allocator} {1e3 * found['step']:9.1f} {found['compile']:9.2f}"
        )


def measure(name: str, config: Config) -> dict[str, Any]:
    """Bytes and seconds of one program."""
    import jax

    from cyclic_jax.memory import compiled_bytes

    step, lower, carry, batch = build(name, config)
    begin = time.perf_counter()
    compiler = compiled_bytes(lower().compile())
    seconds, compile_time = [], time.perf_counter() - begin
    for _ in range(config.steps + 2):  # two of them compile
        begin = time.perf_counter()
        carry, metrics = step(carry, batch)
        jax.block_until_ready((carry, metrics))
        seconds.append(time.perf_counter() - begin)
    allocated = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "compiler": compiler,
        "allocator": allocated,
        "step": statistics.median(seconds[2:]),
        "compile": compile_time,
    }


def build(name: str, config: Config) -> tuple[Callable[..., Any], Callable[[], Any], Any, Any]:
    """``(step, lower, carry, batch)`` of one program; ``lower`` is called before the first step."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import cyclic_jax as cj

    N, B, S = config.num_workers, config.batch_per_worker, config.num_stages
    shape, optimizer = (config.image_size, config.image_size, 3), optax.sgd(0.01, momentum=0.9)
    dtype = None if config.dtype == "float32" else jnp.bfloat16
    layers = cj.models.build(config.model, num_classes=10, image_shape=shape, dtype=dtype)
    model = cj.partition(layers, S, by=config.partition, example=jax.ShapeDtypeStruct((B, *shape), np.float32))
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(N * B, *shape)).astype(np.float32), rng.integers(0, 10, N * B).astype(np.int32)
    batch = jax.device_put((images, labels), jax.devices()[0])
    create = jax.jit(lambda: cj.TrainState.create(model, optimizer, jax.random.key(0), num_workers=N))

    def loss(outputs: jax.Array, targets: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()

    if name == "interleaved":
        executor = cj.make_executor(name, model, loss, optimizer, rule=cj.UpdateRule.cdp_v2(N, S))
        carry = executor.init(create())
        struct = executor.carry_struct(jax.eval_shape(create))
        return executor.step, lambda: executor.lower(struct, batch), carry, batch
    state = create()
    carry = state.params, state.opt_state, state.model_state
    step = jax.jit(plain_step(name, model, loss, optimizer, N), donate_argnums=0)
    structs = jax.eval_shape(lambda: (carry, batch))
    return step, lambda: step.lower(*structs), carry, batch


def plain_step(name: str, model: Any, loss: Any, optimizer: Any, N: int) -> Callable[..., Any]:
    """One step of plain data parallelism on one device: ``vmap`` over micro-batches, or a ``scan``."""
    import jax
    import jax.numpy as jnp
    import optax

    from cyclic_jax.optimizer import by_stage

    def one(params: Any, state: Any, x: Any, targets: Any) -> tuple[jax.Array, Any]:
        outputs, state = model.apply(params, state, x, key=jax.random.key(0), train=True)
        return loss(outputs, targets), state

    def at_once(params: Any, state: Any, batch: Any) -> Any:
        def mean(params: Any) -> tuple[jax.Array, Any]:
            losses, new = jax.vmap(one, in_axes=(None, 0, 0, 0))(params, state, *batch)
            return losses.mean(), new

        return jax.value_and_grad(mean, has_aux=True)(params)

    def accumulated(params: Any, state: Any, batch: Any) -> Any:
        def body(total: Any, x: Any) -> tuple[Any, Any]:
            aux, gradient = jax.value_and_grad(one, has_aux=True)(params, x[0], *x[1])
            return jax.tree.map(jnp.add, total, gradient), aux

        total, (losses, new) = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), (state, batch))
        return (losses.mean(), new), jax.tree.map(lambda g: g / N, total)

    def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state, state = carry
        batch = jax.tree.map(lambda leaf: leaf.reshape(N, -1, *leaf.shape[1:]), batch)
        (value, state), gradient = (at_once if name == "at_once" else accumulated)(params, state, batch)
        updates, opt_state = by_stage(optimizer, params).update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, state), value

    return step


if __name__ == "__main__":
    main(tyro.cli(Config))
