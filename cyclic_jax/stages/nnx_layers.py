"""Flax NNX modules as layers.

A module is split once into its graph (static), its parameters, its random streams and the rest (BatchNorm statistics).
The parameters and the rest travel as flat dictionaries ``{"conv/kernel": array}``: string keys only, so they survive
any checkpoint format. The random streams are not kept at all: each call seeds them from the key it is given, so the
numbers depend on (step, worker, layer) and on nothing else.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cyclic_jax.stages.layer import Key, Layer, PyTree

Factory = Callable[[nnx.Rngs], nnx.Module]


def from_nnx(modules: Sequence[Factory | nnx.Module | tuple[str, Factory | nnx.Module]]) -> tuple[Layer, ...]:
    """Layers from Flax NNX modules, each called as ``module(x)``.

    Args:
        modules: for each layer a factory ``factory(rngs) -> module``, or a module that exists already, whose parameters
            then are what ``init`` returns (its key is not used); or a pair ``(name, either)``. Training or evaluation
            is set through ``module.train()`` and ``module.eval()``, as BatchNorm and Dropout expect.

    Returns:
        A tuple of :class:`Layer`.

    Raises:
        TypeError: if an entry is neither a factory nor a module.
        ValueError: if two of the modules share a parameter.

    Examples:
        >>> from flax import nnx
        >>> def linear(rngs):
        ...     return nnx.Linear(4, 4, rngs=rngs)
        >>> layers = from_nnx([linear, ("head", linear)])
        >>> [layer.name for layer in layers]
        ['0:Linear', 'head']
    """
    adapters = [_NNXLayer(index, entry) for index, entry in enumerate(modules)]
    _refuse_shared([adapter for adapter in adapters if adapter.module is not None])
    return tuple(Layer(adapter.name, adapter.init, adapter.apply) for adapter in adapters)


class _NNXLayer:
    def __init__(self, index: int, entry: Any):
        given, source = entry if isinstance(entry, tuple) else (None, entry)
        if not callable(source) and not isinstance(source, nnx.Module):
            raise TypeError(f"layer {index} is {source!r}: expected an nnx.Module or a factory taking nnx.Rngs")
        self.module = source if isinstance(source, nnx.Module) else None
        self.factory: Factory = (lambda rngs: source) if self.module is not None else source
        self.name: str = given or f"{index}:{type(self._abstract).__name__}"

    @cached_property
    def _abstract(self) -> nnx.Module:
        if self.module is not None:
            return self.module
        return nnx.eval_shape(lambda: self.factory(nnx.Rngs(0)))

    @cached_property
    def _split(self) -> tuple[Any, Any, Any, Any]:
        return _split(self._abstract)

    def init(self, key: Key, x: PyTree) -> tuple[PyTree, PyTree]:
        del x  # NNX modules know their input sizes
        _, params, _, rest = _split(self.factory(nnx.Rngs(key)))
        return _to_dict(params), _to_dict(rest)

    def apply(self, params: PyTree, state: PyTree, x: PyTree, *, key: Key | None, train: bool) -> tuple[PyTree, PyTree]:
        graph, param_vars, rng_vars, rest_vars = self._split
        module = nnx.merge(
            graph,
            _from_dict(param_vars, params),
            _seed(rng_vars, key, train, self.name),
            _from_dict(rest_vars, state),
        )
        module.train() if train else module.eval()
        y = module(x)
        _, _, _, rest = _split(module)
        return y, _to_dict(rest)


def _split(module: nnx.Module) -> tuple[Any, Any, Any, Any]:
    graph, *states = nnx.split(module, nnx.Param, nnx.RngState, ...)
    params, rngs, rest = states
    return graph, params, rngs, rest


def _path_name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def _to_dict(state: Any) -> dict[str, jax.Array]:
    return {_path_name(path): variable.get_value() for path, variable in nnx.to_flat_state(state)}


def _from_dict(like: Any, values: dict[str, jax.Array]) -> Any:
    flat = nnx.to_flat_state(like)
    return nnx.from_flat_state([(path, variable.replace(values[_path_name(path)])) for path, variable in flat])


def _seed(like: Any, key: Key | None, train: bool, name: str) -> Any:
    """Every random stream of the module, restarted from ``key``; streams differ by their place in the module."""
    flat = list(nnx.to_flat_state(like))
    if flat and train and key is None:
        raise ValueError(f"layer {name!r} draws random numbers: it needs a key in training")
    base = jax.random.key(0) if key is None else key
    seeded = []
    for index, (path, variable) in enumerate(flat):
        is_key = isinstance(variable, nnx.RngKey)
        value = jax.random.fold_in(base, index) if is_key else jnp.zeros((), jnp.uint32)
        seeded.append((path, variable.replace(value)))
    return nnx.from_flat_state(seeded)


def _refuse_shared(adapters: list[_NNXLayer]) -> None:
    owner: dict[int, tuple[str, str]] = {}
    for adapter in adapters:
        _, params, _, _ = adapter._split
        for path, variable in nnx.to_flat_state(params):
            here = (adapter.name, _path_name(path))
            other = owner.setdefault(id(variable.get_value()), here)
            if other[0] != here[0]:
                raise ValueError(
                    f"parameter {here[1]!r} of layer {here[0]!r} is also {other[1]!r} of layer {other[0]!r}: "
                    "a parameter shared by two layers would have no single owner; give each its own copy"
                )
