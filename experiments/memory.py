"""Activation memory over one training step: all micro-batches at once against the cyclic schedule.

``python -m experiments.memory`` prints the peaks for ResNet-50 and ViT-B/16, writes them as JSON, and draws the curves. The bytes
are the residuals of each stage's own backward; nothing is executed or compiled.

The cyclic table needs S stages with N a divisor of 2S. With ``--granularity stage``, S is N, or the largest such S that the model
has layers for. Where there is none, and with ``--granularity layer``, every layer is a stage of its own, each op takes the same
time, and workers are spread evenly over it: finer than any partition, and possible for every N.

``--measure`` compiles the interleaved executor and prints the compiler's peak beside the prediction; choose a small setting.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import tyro

import cyclic_jax as cj
from cyclic_jax import memory, plot
from cyclic_jax.executors.interleaved import InterleavedExecutor
from cyclic_jax.executors.interleaved_memory import predicted_bytes

matplotlib.use("Agg")


@dataclasses.dataclass(frozen=True)
class Config:
    """Activation memory of some models, dtypes and numbers of workers."""

    models: tuple[str, ...] = ("resnet50", "vit_b16")
    """Keys of cyclic_jax.models.MODELS."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Of the computation; parameters are float32."""
    num_workers: tuple[int, ...] = (4, 8, 32)
    """N."""
    image_size: int = 224
    """H = W; images have 3 channels."""
    num_classes: int = 1000
    """Outputs."""
    batch_per_worker: int = 32
    """B."""
    partition: Literal["flops", "params", "layers", "activations"] = "flops"
    """What the stages are balanced by."""
    granularity: Literal["stage", "layer"] = "stage"
    """One op a stage, or one op a layer."""
    measure: bool = False
    """Compile the interleaved executor for each row too."""
    out: Path = Path("runs/memory")
    """Folder for memory.json, memory.png and schedule.png."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table; bytes of all N micro-batches together, of B rows each."""

    model: str
    dtype: str
    num_workers: int
    granularity: str
    num_stages: int
    dp_bytes: float
    cdp_bytes: float
    ratio: float
    uniform_ratio: float
    unevenness: float
    cdp_curve: list[float]
    dp_curve: list[float]
    accumulation_bytes: float
    compiled_bytes: int | None = None
    predicted_bytes: int | None = None


def stages_for(num_workers: int, num_layers: int) -> int | None:
    """N if the model has as many layers, else the largest S ≤ L with N a divisor of 2S, if there is one."""
    if num_workers <= num_layers:
        return num_workers
    return max((s for s in range(1, num_layers + 1) if 2 * s % num_workers == 0), default=None)


def row(config: Config, name: str, dtype: str, num_workers: int) -> Row:
    """The peaks of one setting."""
    shape = (config.image_size, config.image_size, 3)
    layers = cj.models.build(
        name, num_classes=config.num_classes, image_shape=shape, dtype=None if dtype == "float32" else jnp.dtype(dtype)
    )
    S = stages_for(num_workers, len(layers)) if config.granularity == "stage" else None
    fine = S is None
    stages = len(layers) if S is None else S
    example = jax.ShapeDtypeStruct((config.batch_per_worker, *shape), np.float32)
    model = cj.partition(layers, stages, by="layers" if fine else config.partition, example=example)
    schedule = (cj.Schedule.spread if fine else cj.Schedule.cyclic)(num_workers, stages)
    sizes = memory.stage_bytes(model, _loss, jax.ShapeDtypeStruct((config.batch_per_worker,), np.int32))
    found = memory.peaks(schedule, sizes)
    measured = _measure(model, schedule, config) if config.measure else {}
    return Row(
        model=name,
        dtype=dtype,
        num_workers=num_workers,
        granularity="layer" if fine else "stage",
        num_stages=stages,
        dp_bytes=found.dp,
        cdp_bytes=found.cdp,
        ratio=found.ratio,
        uniform_ratio=(num_workers + 1) / (2 * num_workers),
        unevenness=found.unevenness,
        cdp_curve=memory.curve(schedule, sizes).tolist(),
        dp_curve=memory.curve(cj.Schedule.simultaneous(num_workers, stages), sizes).tolist(),
        accumulation_bytes=memory.peaks(cj.Schedule.accumulation(num_workers, stages), sizes).cdp,
        **measured,
    )


def _loss(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()


def _measure(model: cj.StagedModel, schedule: cj.Schedule, config: Config) -> dict[str, int]:
    """The compiler's peak of the interleaved step, and the prediction."""
    N, B, optimizer = schedule.num_workers, config.batch_per_worker, optax.sgd(0.1)
    rule = cj.UpdateRule.freshest(schedule)
    executor = InterleavedExecutor(model, _loss, optimizer, rule=rule, schedule=schedule)
    state = jax.eval_shape(lambda: cj.TrainState.create(model, optimizer, jax.random.key(0), num_workers=N))
    struct = model.structs[0]
    images = jax.ShapeDtypeStruct((N * B, *struct.shape[1:]), struct.dtype)
    carry, batch = executor.carry_struct(state), (images, jax.ShapeDtypeStruct((N * B,), np.int32))
    compiled = memory.compiled_bytes(executor.lower(carry, batch).compile())
    predicted = predicted_bytes(schedule, executor.ops, carry, batch, state.params)
    return {"compiled_bytes": compiled, "predicted_bytes": predicted}


def table(rows: Sequence[Row]) -> str:
    """Markdown; bytes of N micro-batches."""
    unit, size = _unit(rows)
    head = [
        "model",
        "dtype",
        "N",
        "S",
        f"peak dp ({unit})",
        f"peak cdp ({unit})",
        "ratio",
        "(N+1)/2N",
        "max/mean of cdp",
    ]
    measured = any(r.compiled_bytes for r in rows)
    head += [f"step as predicted ({unit})", f"as compiled ({unit})"] if measured else []
    lines = [head, ["---"] * len(head)]
    for r in rows:
        cells: list[Any] = [r.model, r.dtype, r.num_workers]
        cells.append(r.num_stages if r.granularity == "stage" else f"{r.num_stages} (layers)")
        cells += [f"{peak / size:.2f}" for peak in (r.dp_bytes, r.cdp_bytes)]
        cells += [f"{value:.3f}" for value in (r.ratio, r.uniform_ratio, r.unevenness)]
        if r.compiled_bytes and r.predicted_bytes:
            cells += [f"{peak / size:.2f}" for peak in (r.predicted_bytes, r.compiled_bytes)]
        lines.append(list(map(str, cells)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _unit(rows: Sequence[Row]) -> tuple[str, int]:
    return ("GiB", 2**30) if max(r.dp_bytes for r in rows) >= 2**30 else ("MiB", 2**20)


def draw(rows: Sequence[Row], path: Path) -> None:
    """One panel a model and N, of the first dtype."""
    import matplotlib.pyplot as plt

    first = [r for r in rows if r.dtype == rows[0].dtype]
    models, counts = (list(dict.fromkeys(getattr(r, name) for r in first)) for name in ("model", "num_workers"))
    size = (1 + 3.6 * len(counts), 0.6 + 2.8 * len(models))
    figure, grid = plt.subplots(len(models), len(counts), figsize=size, squeeze=False, layout="constrained")
    for r in first:
        axes = grid[models.index(r.model)][counts.index(r.num_workers)]
        curves = {"all at once": np.array(r.dp_curve), "cyclic": np.array(r.cdp_curve)}
        plot.memory_curves(curves, axes, _unit(rows)[0])
        axes.set_title(f"{r.model}, N = {r.num_workers}: ratio {r.ratio:.2f}", fontsize=10)
        axes.set(xlabel="", ylabel="")
        axes.get_legend().remove()
    handles, names = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=2, frameon=False)
    figure.supxlabel("part of a training step")
    figure.supylabel(f"activations of all micro-batches ({_unit(rows)[0]}), {rows[0].dtype}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_schedule(path: Path, num_workers: int = 4) -> None:
    """The cyclic grid with the delayed pairs of cdp-v2."""
    import matplotlib.pyplot as plt

    axes = plot.schedule_grid(cj.Schedule.cyclic(num_workers), cj.UpdateRule.cdp_v2(num_workers), periods=2)
    axes.figure.savefig(path, dpi=120)
    plt.close(axes.figure)


def run(config: Config) -> str:
    """The table; JSON and pictures go to ``config.out``.

    Raises:
        ValueError: for nothing to compute, or numbers that are not positive.
    """
    for name in ("models", "dtypes", "num_workers"):
        if not getattr(config, name):
            raise ValueError(f"{name} is empty")
    for value, name in ((min(config.num_workers), "num_workers"), (config.batch_per_worker, "batch_per_worker")):
        if value < 1:
            raise ValueError(f"{name}={value}: at least 1 is needed")
    rows = [row(config, m, d, n) for m in config.models for d in config.dtypes for n in config.num_workers]
    config.out.mkdir(parents=True, exist_ok=True)
    (config.out / "memory.json").write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1))
    draw(rows, config.out / "memory.png")
    draw_schedule(config.out / "schedule.png")
    fine = [r for r in rows if r.granularity == "layer"]
    note = (
        "\n\nS (layers): every layer is a stage, all ops equally long, workers spread evenly over them." if fine else ""
    )
    return table(rows) + note


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    config = tyro.cli(Config, args=argv, description=__doc__)
    try:
        print(run(config))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
