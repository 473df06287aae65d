"""Contiguous groups, balanced exactly: layers to stages, ops to ticks. No jax.

The smallest possible largest group is found by dynamic programming over the cut points; among the cuts that reach it, those with
the least sum of squares are taken, so that the other groups are even too.
"""

from collections.abc import Sequence

import numpy as np


def balance(costs: Sequence[float] | np.ndarray, num_groups: int) -> tuple[tuple[int, int], ...]:
    """Contiguous, non-empty ranges with the smallest possible largest sum, then the least sum of squares.

    Args:
        costs: non-negative costs, in order.
        num_groups: at most ``len(costs)``.

    Returns:
        Ranges ``(start, stop)`` that cover every cost once.

    Raises:
        ValueError: for a negative or non-finite cost, or more groups than costs.

    Examples:
        >>> balance([1, 1, 1, 3], 2)
        ((0, 3), (3, 4))
    """
    values = np.asarray(costs, dtype=float)
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise ValueError(f"costs must be finite and not negative, got {list(costs)}")
    if not 1 <= num_groups <= len(values):
        raise ValueError(f"num_groups={num_groups} does not fit {len(values)} costs")
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    sums = prefix[None, :] - prefix[:, None]  # sums[a, b]: costs a .. b-1 together
    largest = _best_cuts(sums, num_groups, np.maximum)[0]
    allowed = np.where(sums <= largest * (1 + 1e-12), sums**2, np.inf)
    return _best_cuts(allowed, num_groups, np.add)[1]


def _best_cuts(cost: np.ndarray, num_groups: int, combine: np.ufunc) -> tuple[float, tuple[tuple[int, int], ...]]:
    """Least ``combine`` of the groups' costs over all contiguous cuts, and the cuts that reach it."""
    length = cost.shape[0] - 1
    best, choice = np.full(length + 1, np.inf), []
    best[0] = 0.0
    for _ in range(num_groups):
        table = combine(best[:, None], cost)
        table[np.tril_indices(length + 1)] = np.inf  # a group has at least one member
        choice.append(table.argmin(axis=0))
        best = table.min(axis=0)
    ranges, stop = [], length
    for cuts in reversed(choice):
        ranges.append((int(cuts[stop]), stop))
        stop = int(cuts[stop])
    return float(best[length]), tuple(reversed(ranges))
