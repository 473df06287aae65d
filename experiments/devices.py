"""How many devices one stage a device takes, and how busy they are: data times model parallelism, and the cyclic schedule.

``python -m experiments.devices`` runs a small model for a few steps on simulated devices in three ways:

- DP x MP: N copies of the model, each cut over N devices, one micro-batch each: N² devices.
- CDP x MP: the model-parallel executor, where a device holds one micro-batch's activations too: N(N+1)/2 devices.
- CDP pipeline: the pipeline executor: N devices, and up to N micro-batches' activations on each.

Every op that runs tells its device, tick, stage and micro-batch, from inside its guard (``experiments/noted_run.py``). Devices,
activation slots and utilisation are counted in these notes and stand beside the formulas; if they differ, the command fails. A
backward takes the time of two forwards.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import tyro

import cyclic_jax as cj
from cyclic_jax.plot import COLOURS
from cyclic_jax.schedule import BACKWARD, FORWARD
from experiments.noted_run import LENGTH, WAYS, Event, make, run_noted

matplotlib.use("Agg")
FORMULAS = {
    "DP x MP": lambda n: (n * n, 1, n * n, 1 / n),
    "CDP x MP": lambda n: (n * (n + 1) // 2, 1, n * (n + 1) // 2, 2 / (n + 1)),
    "CDP pipeline": lambda n: (n, n, n * (n + 1) // 2, 1.0),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Devices, activation slots and utilisation of three ways to run one stage a device."""

    num_workers: tuple[int, ...] = (2, 3, 4)
    """N: micro-batches, and stages."""
    steps: int = 3
    """Training steps to run; the first one, in which the cyclic schedule starts, is not counted."""
    out: Path = Path("runs/devices")
    """Folder for devices.json and devices.png."""


# ---- counting -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Count:
    """What was counted, or what a formula says.

    Attributes:
        devices: on which anything ran.
        slots: micro-batches whose activations one device holds at a time, between forward and backward; the most of any device.
        all_slots: of all devices together.
        utilisation: part of the devices' time in which they do an op.
    """

    devices: int
    slots: int
    all_slots: int
    utilisation: float


def count(events: Sequence[Event], first_tick: int, last_tick: int) -> Count:
    """Count ticks ``first_tick`` (inclusive) to ``last_tick`` of a run.

    Raises:
        RuntimeError: if a device did two ops at a time, or an op ran before what it needs.
    """
    check(events)
    devices = sorted({event.device for event in events})
    live, busy = np.zeros((len(devices), last_tick), int), np.zeros((len(devices), last_tick), int)
    ends = {(e.device, e.stage, e.micro_batch): e.end for e in events if e.kind == BACKWARD}
    for e in events:
        row = devices.index(e.device)
        busy[row, e.tick : e.end] += 1
        if e.kind == FORWARD:
            live[row, e.tick : ends.get((e.device, e.stage, e.micro_batch), last_tick)] += 1
    live, busy = live[:, first_tick:], busy[:, first_tick:]
    return Count(len(devices), int(live.max()), int(live.sum(axis=0).max()), float(busy.mean()))


def check(events: Sequence[Event]) -> None:
    """Refuse notes that no real run could have made; arguments and errors as in :func:`count`."""
    free: dict[int, int] = {}
    for e in sorted(events):
        if e.tick < free.get(e.device, 0):
            raise RuntimeError(f"device {e.device} does two ops at tick {e.tick}: {e} is one of them")
        free[e.device] = e.end
    done = {(e.kind, e.stage, e.micro_batch): e for e in events}
    if len(done) != len(events):
        raise RuntimeError(f"{len(events) - len(done)} ops ran twice")
    last = max(e.stage for e in events)
    for e in events:
        before = (FORWARD, e.stage - 1) if e.kind == FORWARD else (BACKWARD, e.stage + 1)
        needs = [] if before == (FORWARD, -1) else [(FORWARD, last) if before == (BACKWARD, last + 1) else before]
        needs += [(FORWARD, e.stage)] if e.kind == BACKWARD else []
        for need in needs:
            other = done.get((*need, e.micro_batch))
            if other is None or other.end > e.tick:
                raise RuntimeError(f"{e} ran before {need[0]}{need[1]} of its micro-batch had ended")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    way: str
    num_workers: int
    counted: Count
    formula: Count


def row(way: str, num_workers: int, steps: int) -> tuple[Row, list[Event]]:
    """Run, count, and what the formulas say; the first step is not counted."""
    executor = make(way, num_workers)
    events = run_noted(executor, num_workers, steps)
    period = round(executor.schedule.makespan(*LENGTH.values(), moving="activations"))
    counted = count(events, period, steps * period)
    return Row(way, num_workers, counted, Count(*FORMULAS[way](num_workers))), events


def check_rows(rows: Sequence[Row]) -> None:
    """Counted and predicted must be the same.

    Raises:
        RuntimeError: naming the first row where they are not.
    """
    for r in rows:
        a, b = dataclasses.astuple(r.counted), dataclasses.astuple(r.formula)
        if not np.allclose(a, b, rtol=0, atol=1e-9):
            raise RuntimeError(f"{r.way}, N = {r.num_workers}: counted {r.counted}, the formulas say {r.formula}")


# ---- showing ------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """Markdown; each cell is what was counted, and in brackets what the formula says."""
    head = ["N", "way", "devices", "slots of a device", "slots of all devices", "utilisation"]
    lines = [head, ["---"] * len(head)]
    for r in rows:
        pairs = list(zip(dataclasses.astuple(r.counted), dataclasses.astuple(r.formula), strict=True))
        cells = [f"{a} ({b})" for a, b in pairs[:3]] + [f"{a:.3f} ({b:.3f})" for a, b in pairs[3:]]
        lines.append([str(r.num_workers), r.way, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(runs: Sequence[tuple[str, list[Event]]], num_workers: int, path: Path) -> None:
    """What every device does over the last step of each run: one colour a micro-batch, empty where it waits."""
    import matplotlib.pyplot as plt

    heights = [len({e.device for e in events}) + 1.5 for _, events in runs]
    figure, panels = plt.subplots(
        len(runs), 1, figsize=(8, 1 + 0.26 * sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for (way, events), axes in zip(runs, panels[:, 0], strict=True):
        end = 3 * num_workers * (1 + max(e.tick for e in events) // (3 * num_workers))
        begin, devices = end - 6 * num_workers, len({e.device for e in events})
        for e in events:
            worker = e.micro_batch[0] if way == "DP x MP" else e.micro_batch[1] % num_workers
            box = {"color": COLOURS[worker], "edgecolor": "white", "alpha": 1.0 if e.kind == FORWARD else 0.75}
            axes.barh(e.device, LENGTH[e.kind], left=e.tick - begin, height=0.9, **box)
            if begin <= e.tick < end:
                middle = e.tick - begin + LENGTH[e.kind] / 2
                axes.text(middle, e.device, f"{e.kind}{e.stage}", ha="center", va="center", clip_on=True)
        axes.set(xlim=(0, end - begin), ylim=(devices - 0.4, -0.6), yticks=range(devices), ylabel="device")
        axes.set_title(f"{way}, N = {num_workers}: {devices} devices", fontsize=10)
    panels[-1, 0].set_xlabel("tick (two training steps; one colour a worker's micro-batch)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def run(config: Config) -> str:
    """The table; JSON and a picture of N = 3 (or the first N) go to ``config.out``.

    Raises:
        RuntimeError: if what was counted differs from the formulas.
        ValueError: for fewer than two steps, or an N other than 2, 3 or 4.
    """
    rows, drawn = list[Row](), list[tuple[str, list[Event]]]()
    shown = 3 if 3 in config.num_workers else config.num_workers[0]
    for n in config.num_workers:
        for way in WAYS:
            one, events = row(way, n, config.steps)
            rows.append(one)
            if n == shown:
                drawn.append((way, events))
    config.out.mkdir(parents=True, exist_ok=True)
    (config.out / "devices.json").write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1))
    draw(drawn, shown, config.out / "devices.png")
    check_rows(rows)
    return table(rows) + "\n\ncounted in a run (and by formula)"


def check_config(config: Config) -> None:
    """Refuse what cannot be run.

    Raises:
        ValueError: naming the option and its value.
    """
    if not config.num_workers or not all(2 <= n <= 4 for n in config.num_workers):
        raise ValueError(f"num_workers={config.num_workers}: some of 2, 3 and 4 are expected")
    if config.steps < 3:
        raise ValueError(f"steps={config.steps}: at least 3 are needed, of which the first is not counted")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    config = tyro.cli(Config, args=argv, description=__doc__)
    try:
        check_config(config)
        cj.simulate_devices(max(config.num_workers) ** 2)
        print(run(config))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
