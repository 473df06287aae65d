"""How long one training step takes in the steady state.

Lockstep (``overlap=False``): all meet at the end of every tick, so a tick lasts as long as its longest worker, and every tick in
which somebody sends lasts one transfer more. An op of several ticks spreads its time evenly over them.

With overlap: an op starts when the resource it runs on (the worker, or the stage's device for ``moving="activations"``) is free and
all it needs has arrived. The steps are replayed until they repeat: such a (max, plus) system becomes periodic, and then the
time per step is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cyclic_jax.schedule.messages import Moving, dependencies
from cyclic_jax.schedule.ops import BACKWARD, FORWARD, Op

if TYPE_CHECKING:
    from cyclic_jax.schedule.table import Schedule

Costs = float | Sequence[float]
Node = tuple[Op, int]  # op and worker
MAX_STEPS = 400


def makespan(
    schedule: Schedule, forward: Costs, backward: Costs, overlap: bool, transfer: float, moving: Moving
) -> float:
    """Time of one training step, in the unit of the costs."""
    S = schedule.num_stages
    cost = {FORWARD: _per_stage("forward", forward, S), BACKWARD: _per_stage("backward", backward, S)}
    if moving not in ("gradients", "activations"):
        raise ValueError(f"moving={moving!r}: expected 'gradients' or 'activations'")
    times = {op: cost[op.kind][op.stage] for op in schedule.slots}
    if overlap:
        return _replay(schedule, times, transfer, moving)
    return _lockstep(schedule, times, transfer, moving)


def _per_stage(name: str, costs: Costs, num_stages: int) -> np.ndarray:
    values = (
        np.broadcast_to(np.asarray(costs, float), (num_stages,)) if np.ndim(costs) == 0 else np.asarray(costs, float)
    )
    if values.shape != (num_stages,) or not (values > 0).all():
        raise ValueError(f"{name}={costs!r}: expected a positive time, or one for each of {num_stages} stages")
    return values


def _lockstep(schedule: Schedule, times: dict[Op, float], transfer: float, moving: Moving) -> float:
    total = 0.0
    for tick in range(schedule.period, 2 * schedule.period):
        busy: dict[int, float] = {}
        for worker in range(schedule.num_workers):
            for op, _ in schedule.ops_at(tick, worker):
                who = op.stage if moving == "activations" else worker
                busy[who] = busy.get(who, 0.0) + times[op] / schedule.slots[op].length
        total += max(busy.values(), default=0.0)
    sending = {message.tick for message in schedule.messages(moving)} if transfer else set()
    return total + transfer * len(sending)


def _replay(schedule: Schedule, times: dict[Op, float], transfer: float, moving: Moving) -> float:
    place = {op: k for k, op in enumerate(schedule.slots)}
    nodes = [(op, worker) for op in schedule.slots for worker in range(schedule.num_workers)]
    nodes.sort(key=lambda node: (schedule.start(*node), place[node[0]]))
    needs: dict[Node, list[tuple[Node, int]]] = {node: [] for node in nodes}
    for d in dependencies(schedule, moving):
        needs[d.needed[:2]].append((d.leaves[:2], d.needed[2] - d.leaves[2]))

    # the table's own order over several steps is one in which all that an op needs comes before it
    in_order = sorted(
        (schedule.start(*node, step), place[node[0]], step, node) for step in range(MAX_STEPS) for node in nodes
    )
    ends: dict[Node, list[float]] = {node: [] for node in nodes}
    free: dict[int, float] = {}
    for _, _, step, node in in_order:
        resource = node[0].stage if moving == "activations" else node[1]
        arrived = [ends[source][step - back] + transfer for source, back in needs[node] if step >= back]
        free[resource] = max([free.get(resource, 0.0), *arrived]) + times[node[0]]
        ends[node].append(free[resource])
    return _period_of(np.array([ends[node] for node in nodes]), schedule.num_workers)


def _period_of(ends: np.ndarray, num_workers: int) -> float:
    """Time per step, once the last steps repeat those before. ``ends`` is ``[ops, steps]``."""
    for cycle in range(1, 2 * num_workers + 1):
        gain = ends[:, -2 * cycle :] - ends[:, -3 * cycle : -cycle]
        if np.allclose(gain, gain[0, 0], rtol=1e-12, atol=0):
            return float(gain[0, 0]) / cycle
    raise RuntimeError(f"the schedule has not become periodic within {ends.shape[1]} steps")
