"""What to run on a machine: bytes on each device, traffic and time of every executor and baseline, predicted.

``python -m experiments.plan --model vit_b16 --devices 16 --memory 80 --bandwidth 100 --latency 10`` says what fits, which
is best, and why, and draws the step time against the number of devices. Nothing is run or compiled: bytes come from shapes,
times from latency, bandwidth and the schedule (``cyclic_jax/planning``). FSDP is an estimate.

All times are for one micro-batch of B rows a device. A model of L layers gives at most L stages; on more devices, rings of n stages
run side by side. Of all n that divide the devices each way takes the fastest that fits; where none does, some devices are idle.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import tyro

import cyclic_jax as cj
from cyclic_jax.costs import layer_costs
from cyclic_jax.planning import Choice, Machine, Work, best, choices, seconds
from cyclic_jax.planning.ways import WorkFor
from cyclic_jax.plot import COLOURS

matplotlib.use("Agg")
OPTIMIZERS = {"sgd": optax.sgd(0.1, momentum=0.9), "adamw": optax.adamw(1e-3)}


@dataclasses.dataclass(frozen=True)
class Config:
    """Plan the training of one model on one machine."""

    model: str = "vit_b16"
    """A key of cyclic_jax.models.MODELS."""
    devices: int = 16
    """How many, all alike."""
    memory: float = 80.0
    """GiB of each device."""
    flops: float = 100.0
    """TFLOP/s that a device reaches on this model (not its peak)."""
    bandwidth: float = 25.0
    """GB/s that a device sends."""
    latency: float = 10.0
    """Microseconds of a message."""
    image_size: int = 224
    """H = W; images have 3 channels."""
    num_classes: int = 1000
    """Outputs."""
    batch_per_worker: int = 32
    """B: rows of a micro-batch; one micro-batch a device."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; parameters are float32."""
    optimizer: Literal["sgd", "adamw"] = "adamw"
    """sgd has momentum."""
    partition: Literal["flops", "params", "layers", "activations", "pipeline_memory"] = "flops"
    """What the stages are balanced by."""
    out: Path = Path("runs/plan")
    """Folder for plan.json and plan.png."""

    @property
    def machine(self) -> Machine:
        """In bytes and seconds."""
        units = self.memory * 2**30, self.flops * 1e12, self.bandwidth * 1e9, self.latency * 1e-6
        return Machine(self.devices, *units)


def prepare(config: Config) -> tuple[WorkFor, int]:
    """How the model is cut in so many stages (each cut traced once), and the number of its layers."""
    shape = (config.image_size, config.image_size, 3)
    dtype = None if config.dtype == "float32" else jnp.dtype(config.dtype)
    layers = cj.models.build(config.model, num_classes=config.num_classes, image_shape=shape, dtype=dtype)
    images = jax.ShapeDtypeStruct((config.batch_per_worker, *shape), np.float32)
    batch = images, jax.ShapeDtypeStruct((config.batch_per_worker,), np.int32)
    costs = layer_costs(layers, cj.partition(layers, 1, example=images, by="layers").structs)

    @functools.cache
    def work_for(num_stages: int) -> Work:
        optimizer = OPTIMIZERS[config.optimizer]
        return Work.of(layers, num_stages, _loss, optimizer, batch, by=config.partition, costs=costs)

    return work_for, len(layers)


def _loss(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()


def table(found: Sequence[Choice], machine: Machine) -> str:
    """Markdown; the fastest first, then those that do not fit."""
    N = machine.devices
    head = [
        "way",
        "devices",
        "rings x stages",
        "states",
        "activations",
        "payloads",
        "total (GiB)",
        "sent at a time (MiB)",
    ]
    head += ["compute", "bubble", "exposed", f"ms for {N} micro-batches", "fits"]
    lines = [head, ["---"] * len(head)]
    for c in sorted(found, key=lambda c: (not c.fits, seconds(c, machine) if c.timing else 0.0)):
        cells = [c.name, str(c.devices), f"{c.groups} x {c.ring}" if c.ring > 1 else "-"]
        if c.footprint and c.timing:
            f, share = c.footprint, seconds(c, machine) / c.timing.step
            cells += [f"{size / 2**30:.3g}" for size in (f.states, f.activations, f.payloads, f.total)]
            cells.append(f"{c.timing.tick_bytes / 2**20:.3g}")
            times = c.timing.compute, c.timing.bubble, c.timing.exposed, c.timing.step
            cells += [f"{1e3 * share * time:.1f}" for time in times]
        cells += ["-"] * (len(head) - 1 - len(cells))
        lines.append([*cells, c.reason or "yes"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def verdict(found: Sequence[Choice], machine: Machine) -> str:
    """Which is best, and why the others are not."""
    first = best(found, machine)
    if first is None:
        possible = [c for c in found if c.footprint]
        least = min(possible, key=lambda c: c.footprint.total if c.footprint else 0)
        return (
            f"Nothing fits. {least.name} comes nearest: it {least.reason}. Take a smaller micro-batch or more devices."
        )
    assert first.footprint
    lines = [
        f"Best: {first.name}{_where(first)}, {1e3 * seconds(first, machine):.1f} ms, {_gib(first)} on each device."
    ]
    if first.timing and first.timing.micro_batches > first.devices:
        lines.append(f"Its steps are larger: {first.timing.micro_batches} micro-batches each.")
    faster = [c for c in found if c.timing and not c.fits and seconds(c, machine) < seconds(first, machine)]
    lines += [f"{c.name} would be faster but {c.reason}." for c in faster]
    rest = sorted((c for c in found if c.fits and c is not first), key=lambda c: seconds(c, machine))
    lines += [
        f"{c.name} takes {seconds(c, machine) / seconds(first, machine):.2f} times as long: {_why(c)}."
        for c in rest[:3]
    ]
    light = min((c for c in found if c.fits and c.footprint), key=lambda c: c.footprint.total if c.footprint else 0)
    if light is not first:
        lines.append(f"The least memory: {light.name}, {_gib(light)}.")
    return "\n".join(lines)


def _where(c: Choice) -> str:
    return f" in {c.groups} ring(s) of {c.ring}" if c.ring > 1 else ""


def _gib(c: Choice) -> str:
    assert c.footprint
    return f"{c.footprint.total / 2**30:.3g} GiB"


def _why(c: Choice) -> str:
    assert c.timing
    parts = {"computing": c.timing.compute, "waiting": c.timing.bubble, "messages": c.timing.exposed}
    return ", ".join(f"{time / c.timing.step:.0%} {name}" for name, time in parts.items())


def sweep(work_for: WorkFor, num_layers: int, machine: Machine) -> dict[int, list[Choice]]:
    """Choices for 1, 2, 4, … devices, up to 1024 or the machine's, whichever is more."""
    counts = [2**k for k in range(11)]
    counts = sorted({*counts, machine.devices})
    return {n: choices(work_for, num_layers, dataclasses.replace(machine, devices=n)) for n in counts}


def draw(found: dict[int, list[Choice]], machine: Machine, path: Path) -> None:
    """Time for one micro-batch a device against the devices; hollow where it does not fit.

    Without the synchronous executor, which takes as long as plain data parallelism, and the interleaved one, on one device.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    names = [c.name for c in next(iter(found.values())) if c.name not in ("interleaved", "synchronous")]
    for k, name in enumerate(names):
        line = [(n, c) for n, some in found.items() for c in some if c.name == name and c.timing]
        points = [(n, 1e3 * seconds(c, dataclasses.replace(machine, devices=n)), c.fits) for n, c in line]
        colour, style = COLOURS[k % len(COLOURS)], "-" if k < len(COLOURS) else "--"
        axes.plot([p[0] for p in points], [p[1] for p in points], style, color=colour, label=name, linewidth=1.5)
        for fits, face in ((True, colour), (False, "white")):
            some = [p for p in points if p[2] == fits]
            axes.scatter([p[0] for p in some], [p[1] for p in some], s=22, color=colour, facecolor=face, zorder=3)
    axes.set(xlabel="devices N", ylabel="ms for N micro-batches (hollow: does not fit)")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(config: Config) -> str:
    """The table and the verdict; JSON and a picture go to ``config.out``.

    Raises:
        ValueError: for numbers that are not positive, or an unknown model.
    """
    machine = config.machine
    for name in ("batch_per_worker", "image_size", "num_classes"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)}: at least 1 is needed")
    work_for, num_layers = prepare(config)
    found = sweep(work_for, num_layers, machine)
    here = found[machine.devices]
    config.out.mkdir(parents=True, exist_ok=True)
    rows = {n: [dataclasses.asdict(c) for c in some] for n, some in found.items()}
    (config.out / "plan.json").write_text(json.dumps(rows, indent=1))
    draw(found, machine, config.out / "plan.png")
    heading = f"{config.model}: {num_layers} layers, {sum(work_for(1).params_bytes) / 2**30:.3g} GiB of parameters"
    return f"{heading}\n\n{table(here, machine)}\n\n{verdict(here, machine)}"


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    config = tyro.cli(Config, args=argv, description=__doc__)
    try:
        print(run(config))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
