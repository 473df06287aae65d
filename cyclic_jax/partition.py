"""Layers to contiguous stages, balanced exactly."""

from collections.abc import Sequence

from cyclic_jax.balance import balance
from cyclic_jax.costs import layer_costs
from cyclic_jax.stages.layer import Layer, PyTree
from cyclic_jax.stages.staged import Stage, StagedModel, Struct, check_layers

STRATEGIES = ("flops", "params", "layers", "activations", "pipeline_memory")


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
        by: what to balance: ``"flops"`` of a forward pass, ``"params"``, the number of ``"layers"``, or ``"activations"``: the
            bytes that each layer keeps from its forward to its backward; ``"pipeline_memory"``: (S − j) times the activation bytes
            of stage j, which is what its device holds in the pipeline executor, where all devices allocate the largest.
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
    else:
        ranges = balance(_weights(layers, structs, by), num_stages, _factors(num_stages, by))
    stages = tuple(
        Stage(j, start, layers[start:stop], structs[start], structs[stop]) for j, (start, stop) in enumerate(ranges)
    )
    return StagedModel(stages, structs)


def _weights(layers: Sequence[Layer], structs: Sequence[Struct], by: str) -> Sequence[float]:
    if by == "layers":
        return [1.0] * len(layers)
    if by in ("activations", "pipeline_memory"):
        from cyclic_jax.memory import layer_bytes  # needs the executors' ops, which the other strategies do not

        return layer_bytes(layers, structs)
    return [getattr(cost, by) for cost in layer_costs(layers, structs)]


def _factors(num_stages: int, by: str) -> list[float] | None:
    """How many micro-batches wait at each stage, where that matters."""
    return [float(num_stages - j) for j in range(num_stages)] if by == "pipeline_memory" else None


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
