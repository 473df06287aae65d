"""A layer: a pure ``init`` and a pure ``apply``. A model is a list of them; a stage is a run of neighbours.

Whatever library a layer was written in, the rest of the package sees only these two functions, so schedules, rules and
executors know nothing of modules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

PyTree = Any
Key = jax.Array


@dataclass(frozen=True)
class Layer:
    """One layer of a model, as pure functions.

    Attributes:
        name: shown in errors and in ``StagedModel.describe()``.
        init: ``init(key, x) -> (params, state)``: parameters, and what the layer changes in its forward pass without
            a gradient (BatchNorm statistics); ``{}`` where there is none.
        apply: ``apply(params, state, x, *, key, train) -> (y, state)``. ``key`` may be ``None`` when ``train`` is
            false.
    """

    name: str
    init: Callable[[Key, PyTree], tuple[PyTree, PyTree]]
    apply: Callable[..., tuple[PyTree, PyTree]]


SimpleLayer = tuple[Callable[[Key, PyTree], PyTree], Callable[[PyTree, PyTree], PyTree]]


def from_functions(layers: Sequence[SimpleLayer | Layer]) -> tuple[Layer, ...]:
    """Layers from plain functions.

    Args:
        layers: for each layer a pair ``(init, apply)`` with ``init(key, x) -> params`` and ``apply(params, x) -> y``,
            or the longer form, a :class:`Layer`, which adds state, a key and ``train``. ``x`` and ``y`` are pytrees.

    Returns:
        A tuple of :class:`Layer`.

    Raises:
        TypeError: if an entry is neither.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> scale = (lambda key, x: jnp.ones(x.shape[-1]), lambda params, x: params * x)
        >>> [layer.name for layer in from_functions([scale, scale])]
        ['layer0', 'layer1']
    """
    return tuple(_as_layer(index, entry) for index, entry in enumerate(layers))


def _as_layer(index: int, entry: SimpleLayer | Layer) -> Layer:
    if isinstance(entry, Layer):
        return entry
    if not (isinstance(entry, tuple) and len(entry) == 2 and all(callable(part) for part in entry)):
        raise TypeError(f"layer {index} is {entry!r}: expected a pair of functions (init, apply) or a Layer")
    simple_init, simple_apply = entry

    def init(key: Key, x: PyTree) -> tuple[PyTree, PyTree]:
        return simple_init(key, x), {}

    def apply(params: PyTree, state: PyTree, x: PyTree, *, key: Key | None, train: bool) -> tuple[PyTree, PyTree]:
        del key, train
        return simple_apply(params, x), state

    return Layer(f"layer{index}", init, apply)
