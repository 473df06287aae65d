"""The time per round of events that wait for each other: the largest mean over all cycles of what has to pass on the way.

Each edge says that its target ends no earlier than ``weight`` after its source ended ``tokens`` rounds before. In the long run a
round takes as long as the slowest cycle demands: λ = max over cycles of Σ weight / Σ tokens (Baccelli et al., Synchronization and
Linearity, 1992). The maximum is found by Newton's method: as long as some cycle has Σ (weight − λ·tokens) > 0, take λ from it.
The result belongs to a cycle that was found, so it is exact up to the rounding of two sums, whatever the times are. (Replaying the
rounds until they repeat is not: rounded times need not ever repeat, and uneven ones take long.)
"""

import numpy as np

TOLERANCE = 1e-12  # relative; differences below are rounding


def cycle_time(
    source: np.ndarray, target: np.ndarray, weight: np.ndarray, tokens: np.ndarray, num_events: int
) -> float:
    """The largest Σ weight / Σ tokens over all cycles.

    Args:
        source: int ``[edges]``, the event that is waited for.
        target: int ``[edges]``, the event that waits.
        weight: float ``[edges]``, positive, any unit of time.
        tokens: int ``[edges]``, rounds between the two.
        num_events: events are 0 … num_events − 1.

    Raises:
        ValueError: if an event of one round waits for itself.

    Examples:
        Two machines that pass two parts back and forth, and one of them is slow:

        >>> edges = np.array([0, 1, 0]), np.array([1, 0, 0])
        >>> cycle_time(*edges, np.array([1.0, 2.0, 2.5]), np.array([1, 1, 1]), 2)
        2.5
    """
    ratio = 0.0
    while True:
        cycle = _positive_cycle(source, target, weight - ratio * tokens, num_events, TOLERANCE * weight.sum())
        if not cycle:
            return ratio
        rounds = tokens[cycle].sum()
        if rounds <= 0:
            raise ValueError("an op waits for itself: some message is needed before it can be sent")
        larger = float(weight[cycle].sum() / rounds)
        if larger <= ratio:
            return ratio
        ratio = larger


def _positive_cycle(
    source: np.ndarray, target: np.ndarray, gain: np.ndarray, num_events: int, tolerance: float
) -> list[int]:
    """The edges of a cycle whose gains sum to more than nothing; empty if there is none (Bellman and Ford)."""
    height, into = np.zeros(num_events), np.full(num_events, -1)
    for _ in range(num_events):
        reached = height[source] + gain
        best = np.full(num_events, -np.inf)
        np.maximum.at(best, target, reached)
        higher = np.flatnonzero((reached > height[target] + tolerance) & (reached == best[target]))
        if not len(higher):
            return []
        height[target[higher]], into[target[higher]] = reached[higher], higher
    # still rising after as many rounds as there are events: the way back from here must run in a circle
    event = target[higher[0]]
    for _ in range(num_events):
        event = source[into[event]]
    cycle, first = [int(into[event])], event
    while source[cycle[-1]] != first:
        cycle.append(int(into[source[cycle[-1]]]))
    return cycle
