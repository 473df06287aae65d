"""Layers to contiguous stages, balanced exactly.

The smallest possible largest stage is found by dynamic programming over the cut points; among the partitions that reach
it, the one with the least sum of squares is taken, so that the other stages are even too.
"""

from collections.abc import Sequence

import numpy as np

from cyclic_jax.costs import layer_costs
from cyclic_jax.stages.layer import Layer, PyTree
from cyclic_jax.stages.staged import Stage, StagedModel, check_layers

STRATEGIES = ("flops", "params", "layers")


def partition(
    layers: Sequence[Layer],
    num_stages: int,
    *,
    example: PyTree,
    by: str = "flops",
    boundaries: Sequence[tuple[int, int]] | None = None,
) -> StagedModel:
    """Cut a list of layers in ``num_stages`` contiguous stages.

    Args:
        layers: what any of the ``from_*`` functions returns.
        num_stages: S.
        example: an input of one micro-batch (arrays or ``jax.ShapeDtypeStruct``), leading axis B.
        by: what to balance: ``"flops"`` of a forward pass, ``"params"``, or the number of ``"layers"``.
        boundaries: the layers ``[start, stop)`` of each stage, instead of balancing.

    Returns:
        A :class:`StagedModel` whose ``describe()`` says what each stage costs.

    Raises:
        ValueError: for fewer layers than stages, an unknown ``by``, boundaries that skip or repeat a layer, or a layer
            that does not take what the one before gives.

    Examples:
        >>> import jax.numpy as jnp
        >>> from cyclic_jax.stages import from_functions
        >>> double = (lambda key, x: jnp.ones(()), lambda params, x: 2 * params * x)
        >>> partition(from_functions([double] * 5), 2, example=jnp.ones((4, 3)), by="layers").boundaries
        ((0, 2), (2, 5))
    """
    layers = tuple(layers)
    if by not in STRATEGIES:
        raise ValueError(f"by={by!r} is unknown: expected one of {', '.join(STRATEGIES)}")
    if not 1 <= num_stages <= len(layers):
        raise ValueError(
            f"num_stages={num_stages} does not fit a model of {len(layers)} layers: 1 to {len(layers)} would"
        )
    structs = check_layers(layers, example)
    if boundaries is not None:
        ranges = _checked_boundaries(boundaries, num_stages, len(layers))
    elif by == "layers":
        ranges = balance([1.0] * len(layers), num_stages)
    else:
        ranges = balance([getattr(cost, by) for cost in layer_costs(layers, structs)], num_stages)
    stages = tuple(
        Stage(j, start, layers[start:stop], structs[start], structs[stop]) for j, (start, stop) in enumerate(ranges)
    )
    return StagedModel(stages, structs)


def balance(costs: Sequence[float], num_stages: int) -> tuple[tuple[int, int], ...]:
    """Contiguous, non-empty ranges with the smallest possible largest sum, then the least sum of squares.

    Args:
        costs: one non-negative cost per layer.
        num_stages: S, at most ``len(costs)``.

    Returns:
        S ranges ``(start, stop)`` that cover every layer once.

    Raises:
        ValueError: for a negative or non-finite cost, or more stages than costs.

    Examples:
        >>> balance([1, 1, 1, 3], 2)
        ((0, 3), (3, 4))
    """
    values = np.asarray(costs, dtype=float)
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise ValueError(f"costs must be finite and not negative, got {list(costs)}")
    if not 1 <= num_stages <= len(values):
        raise ValueError(f"num_stages={num_stages} does not fit {len(values)} costs")
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    sums = prefix[None, :] - prefix[:, None]  # sums[a, b]: cost of layers a .. b-1
    largest = _best_cuts(sums, num_stages, np.maximum)[0]
    allowed = np.where(sums <= largest * (1 + 1e-12), sums**2, np.inf)
    return _best_cuts(allowed, num_stages, np.add)[1]


def _best_cuts(cost: np.ndarray, num_stages: int, combine: np.ufunc) -> tuple[float, tuple[tuple[int, int], ...]]:
    """Least ``combine`` of the stages' costs over all contiguous cuts, and the cuts that reach it."""
    length = cost.shape[0] - 1
    best, choice = np.full(length + 1, np.inf), []
    best[0] = 0.0
    for _ in range(num_stages):
        table = combine(best[:, None], cost)
        table[np.tril_indices(length + 1)] = np.inf  # a stage has at least one layer
        choice.append(table.argmin(axis=0))
        best = table.min(axis=0)
    ranges, stop = [], length
    for cuts in reversed(choice):
        ranges.append((int(cuts[stop]), stop))
        stop = int(cuts[stop])
    return float(best[length]), tuple(reversed(ranges))


def _checked_boundaries(
    boundaries: Sequence[tuple[int, int]], num_stages: int, num_layers: int
) -> tuple[tuple[int, int], ...]:
    ranges = tuple((int(start), int(stop)) for start, stop in boundaries)
    if len(ranges) != num_stages:
        raise ValueError(f"boundaries name {len(ranges)} stages, but num_stages={num_stages}")
    expected = 0
    for j, (start, stop) in enumerate(ranges):
        if start != expected:
            what = "skipped" if start > expected else "repeated"
            raise ValueError(
                f"stage {j} starts at layer {start} instead of {expected}: layer {min(start, expected)} is {what}"
            )
        if stop <= start:
            raise ValueError(f"stage {j} holds no layer: [{start}, {stop})")
        expected = stop
    if expected != num_layers:
        what = f"layer {expected} is skipped" if expected < num_layers else "the model has no such layer"
        raise ValueError(f"the last stage ends at layer {expected} instead of {num_layers}: {what}")
    return ranges
