"""Flax Linen modules as layers."""

import inspect
from collections.abc import Sequence
from typing import Any

import jax
from flax import linen

from cyclic_jax.stages.layer import Key, Layer, PyTree


def from_linen(modules: Sequence[linen.Module | tuple[str, linen.Module]]) -> tuple[Layer, ...]:
    """Layers from Flax Linen modules, each called as ``module(x)``.

    If the module's ``__call__`` takes ``train``, ``deterministic`` or ``use_running_average``, it is set to fit. The
    collection ``params`` holds the parameters; all other collections are the layer's state. Random streams get the
    names ``params`` (at init) and ``dropout`` (in training).

    Args:
        modules: for each layer a module, or a pair ``(name, module)``.

    Returns:
        A tuple of :class:`Layer`.

    Raises:
        TypeError: if an entry is no Linen module.

    Examples:
        >>> from flax import linen
        >>> [layer.name for layer in from_linen([linen.Dense(8), ("head", linen.Dense(2))])]
        ['0:Dense', 'head']
    """
    layers = []
    for index, entry in enumerate(modules):
        name, module = entry if isinstance(entry, tuple) else (None, entry)
        if not isinstance(module, linen.Module):
            raise TypeError(f"layer {index} is {module!r}: expected a flax.linen.Module")
        layers.append(_layer(name or f"{index}:{type(module).__name__}", module))
    return tuple(layers)


def _layer(name: str, module: linen.Module) -> Layer:
    def init(key: Key, x: PyTree) -> tuple[PyTree, PyTree]:
        streams = {"params": jax.random.fold_in(key, 0), "dropout": jax.random.fold_in(key, 1)}
        variables = dict(module.init(streams, x, **_mode(module, train=False)))
        return variables.pop("params", {}), variables

    def apply(params: PyTree, state: PyTree, x: PyTree, *, key: Key | None, train: bool) -> tuple[PyTree, PyTree]:
        variables, mode = {"params": params, **state}, _mode(module, train)
        streams = {"dropout": key} if train and key is not None else {}
        if not (train and state):
            return module.apply(variables, x, rngs=streams, **mode), state
        y, changed = module.apply(variables, x, rngs=streams, mutable=list(state), **mode)
        return y, {**state, **changed}

    return Layer(name, init, apply)


def _mode(module: linen.Module, train: bool) -> dict[str, Any]:
    values = {"train": train, "deterministic": not train, "use_running_average": not train}
    accepted = inspect.signature(type(module).__call__).parameters
    # Linen's own BatchNorm and Dropout take these as attributes as well; a value given there stays
    return {name: value for name, value in values.items() if name in accepted and getattr(module, name, None) is None}
