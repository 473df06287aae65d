"""How long one training step takes in the steady state.

Lockstep (``overlap=False``): all meet at the end of every tick, so a tick lasts as long as its longest worker, and every tick in
which somebody sends lasts one transfer more. An op of several ticks spreads its time evenly over them.

With overlap: an op starts when the resource it runs on (the worker, or the stage's device for ``moving="activations"``) has
finished the op before it in the table and all it needs has arrived, one transfer after it was sent. The time per step is that
of the slowest cycle of such waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

import numpy as np

from cyclic_jax.schedule.cycle_time import cycle_time
from cyclic_jax.schedule.messages import Moving, dependencies
from cyclic_jax.schedule.ops import BACKWARD, FORWARD, Op

if TYPE_CHECKING:
    from cyclic_jax.schedule.table import Schedule

Costs = float | Sequence[float]


def makespan(
    schedule: Schedule, forward: Costs, backward: Costs, overlap: bool, transfer: float, moving: Moving
) -> float:
    """Time of one training step, in the unit of the costs."""
    times = _times(schedule, forward, backward, moving)
    if not 0 <= transfer < np.inf:
        raise ValueError(f"transfer={transfer!r}: expected a finite time, 0 or more")
    return (_overlapped if overlap else _lockstep)(schedule, times, transfer, moving)


def ideal(schedule: Schedule, forward: Costs, backward: Costs, moving: Moving) -> float:
    """Time of the work of the busiest resource."""
    busy: dict[int, float] = {}
    for op, time in _times(schedule, forward, backward, moving).items():
        for worker in range(schedule.num_workers):
            who = _resource(op, worker, moving)
            busy[who] = busy.get(who, 0.0) + time
    return max(busy.values())


def _times(schedule: Schedule, forward: Costs, backward: Costs, moving: Moving) -> dict[Op, float]:
    if moving not in get_args(Moving):
        raise ValueError(f"moving={moving!r}: expected one of {', '.join(get_args(Moving))}")
    S = schedule.num_stages
    cost = {FORWARD: _per_stage("forward", forward, S), BACKWARD: _per_stage("backward", backward, S)}
    return {op: float(cost[op.kind][op.stage]) for op in schedule.slots}


def _resource(op: Op, worker: int, moving: Moving) -> int:
    return op.stage if moving == "activations" else worker


def _per_stage(name: str, costs: Costs, num_stages: int) -> np.ndarray:
    values = np.asarray(costs, float)
    values = np.broadcast_to(values, (num_stages,)) if values.ndim == 0 else values
    if values.shape != (num_stages,) or not ((values > 0) & np.isfinite(values)).all():
        raise ValueError(f"{name}={costs!r}: expected a positive time, or one for each of {num_stages} stages")
    return values


def _lockstep(schedule: Schedule, times: dict[Op, float], transfer: float, moving: Moving) -> float:
    total = 0.0
    for tick in range(schedule.period, 2 * schedule.period):
        busy: dict[int, float] = {}
        for worker in range(schedule.num_workers):
            for op, _ in schedule.ops_at(tick, worker):
                who = _resource(op, worker, moving)
                busy[who] = busy.get(who, 0.0) + times[op] / schedule.slots[op].length
        total += max(busy.values(), default=0.0)
    sending = {message.tick for message in schedule.messages(moving)} if transfer else set()
    return total + transfer * len(sending)


def _overlapped(schedule: Schedule, times: dict[Op, float], transfer: float, moving: Moving) -> float:
    # an event is an op of a worker, a round is one period: which op of which step falls into it does not matter
    place = {op: k for k, op in enumerate(schedule.slots)}
    events = [(op, worker) for op in schedule.slots for worker in range(schedule.num_workers)]
    events.sort(key=lambda event: (schedule.start(*event) % schedule.period, place[event[0]], event[1]))
    number = {event: k for k, event in enumerate(events)}

    edges: list[tuple[int, int, float, int]] = []  # source, target, weight, tokens
    queues: dict[int, list[int]] = {}
    for k, (op, worker) in enumerate(events):
        queues.setdefault(_resource(op, worker, moving), []).append(k)
    for queue in queues.values():
        for before, after in zip([queue[-1], *queue], queue, strict=False):
            edges.append((before, after, times[events[after][0]], int(after <= before)))
    for d in dependencies(schedule, moving):
        rounds = schedule.start(*d.needed) // schedule.period - schedule.start(*d.leaves) // schedule.period
        sent = transfer if d.ends[0] != d.ends[1] else 0.0
        edges.append((number[d.leaves[:2]], number[d.needed[:2]], times[d.needed[0]] + sent, rounds))
    source, target, weight, tokens = (np.array(column) for column in zip(*edges, strict=True))
    return cycle_time(source, target, weight, tokens, len(events))
