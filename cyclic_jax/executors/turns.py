"""The order in which one device runs the ops of all workers: by ticks, and within a tick what frees memory first.

Ops that share a tick of the table run at the same time on N devices, so on one device any order of them is the schedule's order.
Workers that begin the tick with a backward go first: their residuals are gone before the others' arrive. With one op a tick and
S = N this holds N²/2 stages' activations between ops (N even), where N devices together hold N(N+1)/2 (derived).
"""

from dataclasses import dataclass

from cyclic_jax.schedule import BACKWARD, FORWARD, Op, Schedule


@dataclass(frozen=True)
class Turn:
    """One op of one worker, somewhere in a period that begins when worker 0 begins its training step c.

    Attributes:
        tick: within the period, in which the op starts.
        worker: whose micro-batch.
        op: which one.
        late: it belongs to the training step before, c − 1.
    """

    tick: int
    worker: int
    op: Op
    late: bool


def turns(schedule: Schedule) -> tuple[Turn, ...]:
    """All ops that start in one period of the steady state, in order: 2S of each worker.

    Examples:
        >>> " ".join(f"{turn.op}({turn.worker}){chr(39) * turn.late}" for turn in turns(Schedule.cyclic(2)))
        "B1(1)' F0(0) B0(1)' F1(0) B1(0) F0(1) B0(0) F1(1)"
    """
    found = []
    for worker in range(schedule.num_workers):
        begins: dict[int, str] = {}  # the kind of this worker's first op in each tick
        for place, slot in enumerate(schedule.program):
            late, tick = divmod(schedule.start(slot.op, worker), schedule.period)
            kind = begins.setdefault(tick, slot.op.kind)
            found.append(((tick, kind == FORWARD, worker, place), Turn(tick, worker, slot.op, bool(late))))
    return tuple(turn for _, turn in sorted(found, key=lambda pair: pair[0]))


def updated_late(schedule: Schedule) -> tuple[bool, ...]:
    """For each stage: is it updated for step c only after the period that began with step c?

    A stage is updated once worker N−1, the last, has done its backward.
    """
    last = schedule.num_workers - 1
    return tuple(schedule.start(Op(BACKWARD, j), last) >= schedule.period for j in range(schedule.num_stages))
