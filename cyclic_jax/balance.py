"""Contiguous groups, balanced exactly: layers to stages, ops to ticks. No jax.

The smallest possible largest group is found by dynamic programming over the cut points; among the cuts that reach it, those with
the least sum of squares are taken, so that the other groups are even too.
"""

from collections.abc import Sequence

import numpy as np


def balance(
    costs: Sequence[float] | np.ndarray, num_groups: int, factors: Sequence[float] | None = None
) -> tuple[tuple[int, int], ...]:
    """Contiguous, non-empty ranges with the smallest possible largest sum, then the least sum of squares.

    Args:
        costs: non-negative costs, in order.
        num_groups: at most ``len(costs)``.
        factors: what each group's sum counts, by default 1.

    Returns:
        Ranges ``(start, stop)`` that cover every cost once.

    Raises:
        ValueError: for a negative or non-finite cost, more groups than costs, or other than one positive factor a group.

    Examples:
        >>> balance([1, 1, 1, 3], 2)
        ((0, 3), (3, 4))
        >>> balance([1, 1, 1, 1, 1, 1], 2, factors=[2, 1])
        ((0, 2), (2, 6))
    """
    values = np.asarray(costs, dtype=float)
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise ValueError(f"costs must be finite and not negative, got {list(costs)}")
    if not 1 <= num_groups <= len(values):
        raise ValueError(f"num_groups={num_groups} does not fit {len(values)} costs")
    factor = np.ones(num_groups) if factors is None else np.asarray(factors, dtype=float)
    if factor.shape != (num_groups,) or not (np.isfinite(factor) & (factor > 0)).all():
        raise ValueError(f"factors={factors!r}: expected a positive one for each of {num_groups} groups")
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    sums = prefix[None, :] - prefix[:, None]  # sums[a, b]: costs a .. b-1 together
    loads = [sums * one for one in factor]
    largest = _best_cuts(loads, np.maximum)[0]
    allowed = [np.where(load <= largest * (1 + 1e-12), load**2, np.inf) for load in loads]
    return _best_cuts(allowed, np.add)[1]


def _best_cuts(costs: Sequence[np.ndarray], combine: np.ufunc) -> tuple[float, tuple[tuple[int, int], ...]]:
    """Least ``combine`` of the groups' costs (``costs[g][a, b]`` of group g) over all contiguous cuts, and those cuts."""
    length = costs[0].shape[0] - 1
    best, choice = np.full(length + 1, np.inf), []
    best[0] = 0.0
    for cost in costs:
        table = combine(best[:, None], cost)
        table[np.tril_indices(length + 1)] = np.inf  # a group has at least one member
        choice.append(table.argmin(axis=0))
        best = table.min(axis=0)
    ranges, stop = [], length
    for cuts in reversed(choice):
        ranges.append((int(cuts[stop]), stop))
        stop = int(cuts[stop])
    return float(best[length]), tuple(reversed(ranges))
