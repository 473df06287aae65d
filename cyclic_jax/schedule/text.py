"""The schedule as a grid of text, drawn and read back.

Rows are workers, columns the ticks of one period of the steady state. ``'`` marks an op of the training step before, ``-`` an
op that goes on, ``.`` a tick without an op, ``F0+F1`` two ops that share a tick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cyclic_jax.schedule.build import Table
from cyclic_jax.schedule.ops import FORWARD, Op, Slot

if TYPE_CHECKING:
    from cyclic_jax.schedule.table import Schedule

IDLE, GOES_ON, BEFORE, TOGETHER = ".", "-", "'", "+"


def draw(schedule: Schedule) -> str:
    """The grid."""
    rows = [["tick", *map(str, range(schedule.period))]]
    for worker in range(schedule.num_workers):
        shift = schedule.offset * worker
        cells = [_cell(schedule, (tick - shift) % schedule.period, tick < shift) for tick in range(schedule.period)]
        rows.append([f"worker {worker}", *cells])
    return _align(rows)


def draw_program(schedule: Schedule) -> str:
    """The program's slots, for errors about tables that have no grid."""
    return "  ".join(
        f"{slot.op}@{slot.start}" + (f"+{slot.length}" if slot.length > 1 else "") for slot in schedule.program
    )


def _cell(schedule: Schedule, phase: int, before: bool) -> str:
    here = [slot for slot in schedule.program if slot.start <= phase < slot.start + slot.length]
    if not here:
        return IDLE
    if here[0].start < phase:
        return GOES_ON
    return TOGETHER.join(str(slot.op) for slot in here) + BEFORE * before


def _align(rows: list[list[str]]) -> str:
    head = max(len(row[0]) for row in rows)
    cell = max(len(cell) for row in rows for cell in row[1:])
    lines = (f"{row[0]:{head}}  " + " ".join(f"{text:{cell}}" for text in row[1:]) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def parse(drawing: str) -> Table:
    """The table of a grid.

    Raises:
        ValueError: for ragged rows, an unknown op, or a row that is not worker 0's, shifted by its offset.
    """
    rows = [line.split() for line in drawing.strip().splitlines()]
    if len(rows) < 2 or rows[0][0] != "tick" or any(row[:1] != ["worker"] for row in rows[1:]):
        raise ValueError(f"not a schedule: expected a line 'tick 0 1 …' and lines 'worker 0 …', got\n{drawing}")
    period, grid = len(rows[0]) - 1, [row[2:] for row in rows[1:]]
    for worker, (cells, row) in enumerate(zip(grid, rows[1:], strict=True)):
        if row[1:2] != [str(worker)]:
            raise ValueError(f"row {worker} is headed {' '.join(row[:2])!r} instead of 'worker {worker}':\n{drawing}")
        if len(cells) != period:
            raise ValueError(f"worker {worker} has {len(cells)} cells, the header has {period} ticks:\n{drawing}")
    program = _read_program(grid[0])
    offset = _read_offset(grid)
    num_stages = 1 + max((slot.op.stage for slot in program), default=0)
    table = (len(grid), num_stages, program, period, offset)
    _check_rows(grid, table, drawing)
    return table


def _read_program(cells: list[str]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    for tick, cell in enumerate(cells):
        if cell == IDLE:
            continue
        if cell == GOES_ON:
            if not slots or slots[-1].start + slots[-1].length != tick:
                raise ValueError(f"worker 0, tick {tick}: '-' goes on after no op")
            slots[-1] = Slot(slots[-1].op, slots[-1].start, slots[-1].length + 1)
            continue
        slots += [Slot(Op.parse(name), tick) for name in cell.rstrip(BEFORE).split(TOGETHER)]
    return tuple(slots)


def _read_offset(grid: list[list[str]]) -> int:
    if len(grid) == 1:
        return 0
    first = str(Op(FORWARD, 0))

    def tick_of_first(worker: int) -> int:
        for tick, cell in enumerate(grid[worker]):
            if cell.rstrip(BEFORE).split(TOGETHER)[0] == first:
                return tick
        raise ValueError(f"worker {worker} has no {first}")

    # worker 1's F0 of this step may lie in the next period, its F0 of the step before is then in this one
    return (tick_of_first(1) - tick_of_first(0)) % len(grid[0])


def _check_rows(grid: list[list[str]], table: Table, drawing: str) -> None:
    _, _, _, period, offset = table
    for worker, cells in enumerate(grid):
        for tick, cell in enumerate(cells):
            shift = offset * worker
            want = grid[0][(tick - shift) % period]
            marked = want + BEFORE if tick < shift and want not in (IDLE, GOES_ON) else want
            if cell != marked:
                raise ValueError(
                    f"worker {worker}, tick {tick} is {cell!r}, but worker 0 shifted by {shift} ticks gives {marked!r}:\n{drawing}"
                )
