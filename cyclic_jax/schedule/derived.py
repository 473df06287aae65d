"""Facts read off a table's ticks: who may be fresh, what is live, who uses which stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cyclic_jax.schedule.ops import BACKWARD, FORWARD, Op

if TYPE_CHECKING:
    from cyclic_jax.schedule.table import Schedule


def feasible(schedule: Schedule) -> np.ndarray:
    """Bool ``[N, S]``: the newest version exists when worker i starts the forward of stage j.

    It exists once the last worker's backward of that stage, of the training step before, has ended (derived).
    """
    N, S = schedule.num_workers, schedule.num_stages
    mask = np.empty((N, S), bool)
    for j in range(S):
        done = max(schedule.end(Op(BACKWARD, j), worker) for worker in range(N))
        mask[:, j] = [schedule.start(Op(FORWARD, j), worker, step=1) >= done for worker in range(N)]
    mask.setflags(write=False)
    return mask


def live_activations(schedule: Schedule, stage_bytes: Sequence[float] | None) -> np.ndarray:
    """``[N, period]``, from the start of a stage's forward to the end of its backward."""
    N, S, period = schedule.num_workers, schedule.num_stages, schedule.period
    weights = np.ones(S, int) if stage_bytes is None else np.asarray(stage_bytes)
    if weights.shape != (S,):
        raise ValueError(f"stage_bytes has shape {weights.shape}: one entry for each of {S} stages is needed")
    live = np.zeros((N, period), weights.dtype)
    for worker in range(N):
        for j in range(S):
            ticks = np.arange(schedule.start(Op(FORWARD, j), worker), schedule.end(Op(BACKWARD, j), worker))
            np.add.at(live[worker], ticks % period, weights[j])
    return live


def stage_users(schedule: Schedule) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """``[period][S]`` tuples of workers."""
    steady = schedule.period  # by then every worker has begun
    rows = []
    for tick in range(steady, 2 * steady):
        users: list[list[int]] = [[] for _ in range(schedule.num_stages)]
        for worker in range(schedule.num_workers):
            for op, _ in schedule.ops_at(tick, worker):
                users[op.stage].append(worker)
        rows.append(tuple(map(tuple, users)))
    return tuple(rows)
