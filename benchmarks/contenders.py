"""What the benchmark of step times runs: executors and baselines by name, with their data and their makespan."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
import optax

import cyclic_jax as cj
from benchmarks.data_parallel import DataParallel
from benchmarks.flushed_pipeline import FlushedPipeline
from benchmarks.sharded import Sharded

TABLES = {
    "replicated": ("v1", "v2", "balanced"),
    "zero": ("v1", "v2", "balanced"),
    "pipeline": ("v1", "v2", "one-op"),
    "model_parallel": ("v1", "v2", "one-op"),
    "synchronous": ("v1", "v2"),
    "interleaved": ("v1", "v2"),
}
FLUSHED = ("gpipe N", "gpipe 4N", "1f1b N", "1f1b 4N")
TOGETHER = ("dp", "zero1", "fsdp")
NAMES = (*TOGETHER, "dp-mp", *FLUSHED, *(f"{table} {kind}" for kind, tables in TABLES.items() for table in tables))


@dataclass(frozen=True)
class Setting:
    """A model and its data: N workers of B rows; ``width`` and ``depth`` are those of residual_mlp."""

    model: str
    width: int
    depth: int
    num_workers: int
    batch_per_worker: int
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """With momentum 0.9; or with two moments."""
    partition: Literal["flops", "params"] = "flops"
    """What the stages are balanced by."""


@dataclass(frozen=True)
class Contender:
    """Something with ``init``, ``step`` and ``lower``.

    Attributes:
        executor: on its devices.
        state: where training begins.
        batch: of one step.
        micro_batches: of B rows, in one step.
        makespan: time of a micro-batch in the steady state, all meeting at each tick, B = 2F; unit: a forward of one of N stages.
    """

    executor: Any
    state: cj.TrainState
    batch: Any
    micro_batches: int
    makespan: float


def check_name(name: str) -> None:
    """Refuse an unknown name.

    Raises:
        ValueError: with the known ones.
    """
    if name not in NAMES:
        raise ValueError(f"unknown executor {name!r}: expected one of {', '.join(NAMES)}")


def num_devices(name: str, num_workers: int) -> int:
    """Devices that a contender takes."""
    N = num_workers
    if name == "dp-mp":
        return N * N
    return {"model_parallel": N * (N + 1) // 2, "interleaved": 1}.get(name.split()[-1], N)


def contender(name: str, setting: Setting) -> Contender:
    """By name, ready to be compiled."""
    if name in TOGETHER:
        return _data_parallel(name, setting)
    if name == "dp-mp" or name in FLUSHED:
        return _flushed(name, setting)
    return _executor(name, setting)


def _data_parallel(name: str, setting: Setting) -> Contender:
    N = setting.num_workers
    model, optimizer = _model(setting, N), _optimizer(setting)
    if name == "dp":
        executor: Any = DataParallel(model, _loss, optimizer, N)
    else:
        executor = Sharded(model, _loss, optimizer, N, fully=name == "fsdp")
    makespan = cj.Schedule.simultaneous(N, N).makespan(1, 2) / N
    return Contender(executor, _state(setting, model, N), _batch(model, N), N, makespan)


def _flushed(name: str, setting: Setting) -> Contender:
    N = setting.num_workers
    model = _model(setting, N)
    order, _, times = name.partition(" ")
    M, groups = (1, N) if name == "dp-mp" else (4 * N if times == "4N" else N, 1)
    executor = FlushedPipeline(model, _loss, _optimizer(setting), M, "1f1b" if order == "1f1b" else "gpipe", groups)
    batch = _batch(model, M * groups)
    executor.prepare(batch)
    makespan = executor.schedule.makespan(1, 2, moving="activations") / (M * groups)
    return Contender(executor, _state(setting, model, M), batch, M * groups, makespan)


def _executor(name: str, setting: Setting) -> Contender:
    N = setting.num_workers
    table, kind = name.split()
    model = _model(setting, 2 * N if table == "balanced" else N)
    schedule = _schedule(table, kind, N, model.num_stages)
    rule = cj.UpdateRule.cdp_v1(*schedule.feasible.shape) if table == "v1" else cj.UpdateRule.freshest(schedule)
    executor = cj.make_executor(kind, model, _loss, _optimizer(setting), rule=rule, schedule=schedule)
    return Contender(executor, _state(setting, model, N), _batch(model, N), N, _makespan(kind, schedule))


def _schedule(table: str, kind: str, num_workers: int, num_stages: int) -> cj.Schedule:
    """``balanced`` or the executor's own table; ``one-op`` asks for one op a tick."""
    if table == "balanced":
        return cj.Schedule.balanced(num_workers, [1] * num_stages, [2] * num_stages)
    if kind in ("pipeline", "model_parallel") and table != "one-op":
        return cj.Schedule.pipeline(num_workers)
    return cj.Schedule.cyclic(num_workers)


def _makespan(kind: str, schedule: cj.Schedule) -> float:
    """Of one of N micro-batches; with more stages than workers each is the shorter."""
    N, S = schedule.num_workers, schedule.num_stages
    if kind == "synchronous":
        schedule = cj.Schedule.simultaneous(N, S)
    if kind == "interleaved":
        schedule = cj.Schedule.accumulation(N, S)  # one op at a time, whatever the order
    moving: Any = "activations" if kind in ("pipeline", "model_parallel") else "gradients"
    return schedule.makespan(N / S, 2 * N / S, moving=moving) / N


# ---- the model and its data ---------------------------------------------------------------------------------


def _model(setting: Setting, num_stages: int) -> cj.StagedModel:
    is_mlp = setting.model == "residual_mlp"
    shape = (8, 8, 1) if is_mlp else (32, 32, 3)
    options = {"width": setting.width, "depth": setting.depth} if is_mlp else {}
    layers = cj.models.build(setting.model, num_classes=10, image_shape=shape, **options)
    example = jax.ShapeDtypeStruct((setting.batch_per_worker, *shape), np.float32)
    return cj.partition(layers, min(num_stages, len(layers)), by=setting.partition, example=example)


def _optimizer(setting: Setting) -> optax.GradientTransformation:
    return optax.adamw(1e-4) if setting.optimizer == "adamw" else optax.sgd(0.01, momentum=0.9)


def _loss(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()


def _state(setting: Setting, model: cj.StagedModel, num_workers: int) -> cj.TrainState:
    return cj.TrainState.create(model, _optimizer(setting), jax.random.key(0), num_workers=num_workers)


def _batch(model: cj.StagedModel, micro_batches: int) -> Any:
    rng, (rows, *shape) = np.random.default_rng(0), model.structs[0].shape
    rows *= micro_batches
    return rng.normal(size=(rows, *shape)).astype(np.float32), rng.integers(0, 10, rows).astype(np.int32)
