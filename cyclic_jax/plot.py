"""Pictures of schedules and of memory. matplotlib (the ``experiments`` extra) is imported when a function is called."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from cyclic_jax.rules import UpdateRule
from cyclic_jax.schedule import FORWARD, Schedule

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#ee8866")


def schedule_grid(schedule: Schedule, rule: UpdateRule | None = None, periods: int = 1, axes: Any = None) -> Any:
    """Stage against tick in the steady state: one colour a micro-batch, an arrow up for a forward, down for a backward.

    Args:
        schedule: any table; where several ops share a stage and a tick, they share the cell.
        rule: if given, the forwards of delayed pairs (they see theta_{t-1}) are hatched.
        periods: training steps to draw.
        axes: matplotlib's; made if not given.

    Returns:
        The axes.

    Raises:
        ValueError: for a rule that the schedule cannot run, or ``periods`` below 1.
    """
    if periods < 1:
        raise ValueError(f"periods={periods}: at least 1 is needed")
    if rule is not None:
        rule.check(schedule)
    if axes is None:
        import matplotlib.pyplot as plt

        size = (1 + 0.45 * schedule.period * periods, 1 + 0.45 * schedule.num_stages)
        _, axes = plt.subplots(figsize=size, layout="constrained")
    for tick in range(schedule.period * periods):
        for j, cell in enumerate(_users(schedule, tick)):
            for place, (worker, kind, late) in enumerate(cell):
                delayed = kind == FORWARD and rule is not None and not rule.fresh[worker, j]
                _draw_op(axes, (tick + place / len(cell), j, 1 / len(cell)), worker, kind, late, delayed)
    _frame(schedule, periods, rule is not None, axes)
    return axes


def _users(schedule: Schedule, tick: int) -> list[list[tuple[int, str, bool]]]:
    """For each stage, ``(worker, kind, of the step before)`` of all that use it in a tick of the steady state."""
    users: list[list[tuple[int, str, bool]]] = [[] for _ in range(schedule.num_stages)]
    for worker in range(schedule.num_workers):
        for op, step in schedule.ops_at(tick + schedule.period, worker):
            users[op.stage].append((worker, op.kind, step - 1 < tick // schedule.period))
    return users


def _draw_op(axes: Any, cell: tuple[float, float, float], worker: int, kind: str, late: bool, delayed: bool) -> None:
    from matplotlib.patches import Rectangle

    x, y, width = cell
    colour = COLOURS[worker % len(COLOURS)]
    axes.add_patch(Rectangle((x, y), width, 1, facecolor=colour, edgecolor="white", linewidth=1.5))
    if delayed:
        veil = (1, 1, 1, 0.45)
        axes.add_patch(Rectangle((x, y), width, 1, facecolor="none", edgecolor=veil, linewidth=0, hatch="///"))
    mark = ("↑" if kind == FORWARD else "↓") + ("'" if late else "")
    axes.text(x + width / 2, y + 0.5, mark, ha="center", va="center", color="white", fontweight="bold", fontsize=11)


def _frame(schedule: Schedule, periods: int, marks_delayed: bool, axes: Any) -> None:
    from matplotlib.patches import Patch

    ticks, S = schedule.period * periods, schedule.num_stages
    axes.set(xlim=(0, ticks), ylim=(0, S), xlabel="tick", ylabel="stage", title=schedule.name)
    axes.set_xticks(np.arange(ticks) + 0.5, [str(tick) for tick in range(ticks)])
    axes.set_yticks(np.arange(S) + 0.5, [str(j) for j in range(S)])
    axes.tick_params(length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    for period in range(1, periods):
        axes.plot([period * schedule.period] * 2, [0, S], color="black", linewidth=2)
    workers = range(min(schedule.num_workers, len(COLOURS)))
    handles = [Patch(color=COLOURS[i], label=f"micro-batch {i}") for i in workers]
    if marks_delayed:
        handles.append(Patch(facecolor="grey", edgecolor="white", hatch="///", label="sees θ one step late"))
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def memory_curves(curves: Mapping[str, np.ndarray], axes: Any = None, unit: str = "GiB") -> Any:
    """Bytes live over one training step, one line a curve; periods of other lengths are drawn over the same width.

    Args:
        curves: by name, ``[period]`` bytes.
        axes: matplotlib's; made if not given.
        unit: ``"KiB"``, ``"MiB"`` or ``"GiB"``.

    Returns:
        The axes.

    Raises:
        ValueError: for no curve, an empty one, or an unknown unit.
    """
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    if unit not in units:
        raise ValueError(f"unit={unit!r} is unknown: expected one of {', '.join(units)}")
    if not curves or not all(len(curve) for curve in curves.values()):
        raise ValueError("there is nothing to draw: every curve needs at least one tick")
    if axes is None:
        import matplotlib.pyplot as plt

        _, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for k, (name, curve) in enumerate(curves.items()):
        edges = np.linspace(0, 1, len(curve) + 1)
        line = {"color": COLOURS[k % len(COLOURS)], "linewidth": 2, "baseline": None}
        axes.stairs(np.asarray(curve) / units[unit], edges, label=name, **line)
    axes.set(xlabel="part of a training step", ylabel=f"activations, all micro-batches ({unit})", xlim=(0, 1))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return axes
