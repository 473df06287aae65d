"""Convolutions in the one layout that XLA's CPU compiler runs fast, wherever they stand.

That compiler brings convolutions to its fast kernel's layout (batch and rows first, features last) only in a program's entry
computation. In a loop, where a staggered program has all its ops, a kernel's gradient keeps the layout that differentiation gave
it and runs about a hundred times slower. So the ops are rewritten before they are compiled: operands transposed, the same
convolution, the result transposed back. The numbers are the same.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxprs_in_params

PyTree = Any


def canonical_convolutions(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """``function`` with every convolution, in whatever it calls, done on ``[B, …, C]`` inputs and ``[…, C, O]`` kernels."""

    def rewritten(*args: PyTree) -> PyTree:
        jaxpr, struct = jax.make_jaxpr(function, return_shape=True)(*args)
        if not _foreign(jaxpr.jaxpr):
            return function(*args)
        return jax.tree.unflatten(jax.tree.structure(struct), _evaluate(jaxpr, *jax.tree.leaves(args)))

    return rewritten


def _foreign(jaxpr: Jaxpr) -> bool:
    """Does it hold a convolution of another layout?"""
    return any(_is_foreign(eqn) or any(map(_foreign, jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns)


def _is_foreign(eqn: Any) -> bool:
    if eqn.primitive.name != "conv_general_dilated":
        return False
    return tuple(eqn.params["dimension_numbers"]) != _canonical_numbers(len(eqn.params["window_strides"]))


def _canonical_numbers(spatial: int) -> tuple[tuple[int, ...], ...]:
    rows = range(1, spatial + 1)
    data = (0, spatial + 1, *rows)
    return data, (spatial + 1, spatial, *range(spatial)), data


def _open(part: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return part.jaxpr if isinstance(part, ClosedJaxpr) else part


def _evaluate(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """The program, equation by equation."""
    jaxpr, values = closed.jaxpr, dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if _is_foreign(eqn):
            results: Any = _convolve(*operands, **eqn.params)
        else:
            with eqn.ctx.manager:
                results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(_rewritten(eqn)))
        results = results if eqn.primitive.multiple_results else [results]
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _rewritten(eqn: Any) -> dict[str, Any]:
    """An equation's parameters, with the programs among them rewritten."""

    def one(value: Any) -> Any:
        if isinstance(value, tuple | list) and any(isinstance(v, ClosedJaxpr | Jaxpr) for v in value):
            return type(value)(map(one, value))
        if not (isinstance(value, ClosedJaxpr | Jaxpr) and _foreign(_open(value))):
            return value
        closed = value if isinstance(value, ClosedJaxpr) else ClosedJaxpr(value, ())
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in closed.in_avals]
        new = jax.make_jaxpr(partial(_evaluate, closed))(*structs)
        return new if isinstance(value, ClosedJaxpr) else new.jaxpr

    return {name: one(value) for name, value in eqn.params.items()}


def _convolve(x: jax.Array, kernel: jax.Array, *, dimension_numbers: Any, **params: Any) -> jax.Array:
    """The same convolution by way of the canonical layout."""
    (lhs, rhs, out), spatial = dimension_numbers, len(dimension_numbers[0]) - 2
    x = jnp.transpose(x, _data_last(lhs))
    kernel = jnp.transpose(kernel, (*rhs[2:], rhs[1], rhs[0]))
    numbers = jax.lax.ConvDimensionNumbers(*_canonical_numbers(spatial))
    params = {name: params[name] for name in _CONVOLUTION if name in params}
    y = jax.lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **params)
    return jnp.transpose(y, _inverse(_data_last(out)))


_CONVOLUTION = (
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "feature_group_count",
    "batch_group_count",
    "precision",
    "preferred_element_type",
)


def _data_last(spec: Sequence[int]) -> tuple[int, ...]:
    return (spec[0], *spec[2:], spec[1])


def _inverse(permutation: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(permutation)), key=permutation.__getitem__))
