"""The tables that have a name. Each function returns ``(num_workers, num_stages, program, period, offset)``."""

import math
from collections.abc import Sequence

import numpy as np

from cyclic_jax.balance import balance
from cyclic_jax.schedule.ops import BACKWARD, FORWARD, Op, Slot

Table = tuple[int, int, tuple[Slot, ...], int, int]


def ops_in_order(num_stages: int) -> list[Op]:
    """F0 … F(S−1), B(S−1) … B0."""
    return [Op(FORWARD, j) for j in range(num_stages)] + [Op(BACKWARD, j) for j in reversed(range(num_stages))]


def _one_a_tick(num_stages: int) -> tuple[Slot, ...]:
    return tuple(Slot(op, tick) for tick, op in enumerate(ops_in_order(num_stages)))


def _positive(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name}={value}: at least 1 is needed")


def cyclic(num_workers: int, num_stages: int) -> Table:
    """One op a tick, offset 2S/N."""
    _positive(num_workers=num_workers, num_stages=num_stages)
    if 2 * num_stages % num_workers:
        fits = [n for n in range(1, 2 * num_stages + 1) if 2 * num_stages % n == 0]
        raise ValueError(
            f"num_workers={num_workers} does not divide 2*num_stages={2 * num_stages}, so neighbours cannot be evenly apart: "
            f"with {num_stages} stages take one of {fits} workers"
        )
    return num_workers, num_stages, _one_a_tick(num_stages), 2 * num_stages, 2 * num_stages // num_workers


def simultaneous(num_workers: int, num_stages: int) -> Table:
    """No offset: plain data parallelism."""
    _positive(num_workers=num_workers, num_stages=num_stages)
    return num_workers, num_stages, _one_a_tick(num_stages), 2 * num_stages, 0


def accumulation(num_workers: int, num_stages: int) -> Table:
    """The next worker begins when the one before has ended."""
    _positive(num_workers=num_workers, num_stages=num_stages)
    return num_workers, num_stages, _one_a_tick(num_stages), 2 * num_stages * num_workers, 2 * num_stages


def spread(num_workers: int, num_stages: int) -> Table:
    """Ops N / gcd(N, 2S) ticks long, so that 2S/N ops between neighbours are a whole number of ticks."""
    _positive(num_workers=num_workers, num_stages=num_stages)
    length = num_workers // math.gcd(num_workers, 2 * num_stages)
    program = tuple(Slot(slot.op, length * slot.start, length) for slot in _one_a_tick(num_stages))
    period = 2 * num_stages * length
    return num_workers, num_stages, program, period, period // num_workers


def pipeline(num_workers: int) -> Table:
    """F_j at tick j, B_j over ticks 3N − 2 − 2j and the next; period 3N, offset 3."""
    _positive(num_workers=num_workers)
    N = num_workers
    forwards = [Slot(Op(FORWARD, j), j) for j in range(N)]
    backwards = [Slot(Op(BACKWARD, j), 3 * N - 2 - 2 * j, 2) for j in reversed(range(N))]
    return N, N, (*forwards, *backwards), 3 * N, 3


def gpipe(num_micro_batches: int, num_stages: int) -> Table:
    """The backward of the first micro-batch starts when the last forward has ended."""
    _positive(num_micro_batches=num_micro_batches, num_stages=num_stages)
    M, S = num_micro_batches, num_stages
    backwards = [Slot(Op(BACKWARD, j), M + 2 * S - 2 - j) for j in reversed(range(S))]
    return M, S, (*_one_a_tick(S)[:S], *backwards), 2 * (M + S - 1), 1


def one_f_one_b(num_micro_batches: int, num_stages: int) -> Table:
    """The cyclic table's program with offset 2, but the next step waits for the last micro-batch."""
    _positive(num_micro_batches=num_micro_batches, num_stages=num_stages)
    M, S = num_micro_batches, num_stages
    return M, S, _one_a_tick(S), 2 * M + 2 * S - 2, 2


def balanced(
    num_workers: int, forward_costs: Sequence[float], backward_costs: Sequence[float], ticks_per_offset: int
) -> Table:
    """Pack the ops, in order, into k·N ticks of the least possible largest cost."""
    S = len(forward_costs)
    if len(backward_costs) != S or not S:
        raise ValueError(f"{S} forward and {len(backward_costs)} backward costs: one of each is needed for every stage")
    _positive(num_workers=num_workers, ticks_per_offset=ticks_per_offset)
    costs = np.array([*forward_costs, *reversed(backward_costs)], dtype=float)
    if not (np.isfinite(costs).all() and (costs > 0).all()):
        raise ValueError(f"costs must be finite and positive, got {costs.tolist()}")
    ticks = ticks_per_offset * num_workers
    bounds = balance(costs, min(ticks, 2 * S))
    starts = [tick for tick, (first, stop) in enumerate(bounds) for _ in range(first, stop)]
    program = tuple(Slot(op, start) for op, start in zip(ops_in_order(S), starts, strict=True))
    return num_workers, S, program, ticks, ticks_per_offset
