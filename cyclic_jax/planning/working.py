"""Bytes that an op needs while it runs, beside its arguments: a replay of its jaxpr in order.

A buffer is held from the equation that makes it to the last one that reads it. No buffer is counted for what compilers make none:
views, numbers spread over an array, and elementwise results with a single reader, which are computed where they are read. What a
compiler adds inside an operation (convolutions on CPUs, say, take as much again) is not seen.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal, Var
from jax.interpreters import partial_eval

PyTree = Any
VIEWS = {"reshape", "squeeze", "transpose", "broadcast_in_dim", "iota", "copy", "stop_gradient"}
BUFFERS = {"dot_general", "conv_general_dilated", "concatenate", "gather", "scatter", "scatter-add", "sort"}
BUFFER_KINDS = ("reduce", "cum", "arg", "random", "select_and")


def working_bytes(function: Callable[..., PyTree], *structs: PyTree) -> int:
    """Peak bytes of intermediate values and results.

    Args:
        function: traced, not run.
        structs: its arguments, as arrays or structs; their own bytes are not counted.

    Examples:
        >>> import jax.numpy as jnp
        >>> x = jnp.ones((10, 10))
        >>> working_bytes(lambda x: (x @ x) @ x, x)  # the first product and the result
        800
        >>> working_bytes(lambda x: 2 * jnp.tanh(x) + 1, x)  # one pass over x
        400
    """
    jaxpr = jax.make_jaxpr(function)(*structs).jaxpr
    return _peak(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


def _peak(jaxpr: Jaxpr) -> int:
    sizes, last_use = _buffers(jaxpr)
    held, peak, ends = 0, 0, Counter[int]()
    for place, eqn in enumerate(jaxpr.eqns):
        made = sum(sizes[var] for var in eqn.outvars)
        held += made
        for var in eqn.outvars:
            ends[last_use[var]] += sizes[var]
        inside = max((_peak(part) for part in _inner(eqn)), default=0)
        peak = max(peak, held + max(0, inside - made))
        held -= ends.pop(place, 0)
    return peak


def _buffers(jaxpr: Jaxpr) -> tuple[dict[Var, int], dict[Var, int]]:
    """For each variable the bytes of its buffer, and the place of the last equation that needs it."""
    readers = Counter(var for eqn in jaxpr.eqns for var in _variables(eqn.invars))
    results = set(_variables(jaxpr.outvars))
    sizes, last_use = dict[Var, int](), dict.fromkeys(results, len(jaxpr.eqns))
    for place, eqn in reversed(list(enumerate(jaxpr.eqns))):
        until = place
        for var in eqn.outvars:
            fused = not _makes_buffers(eqn) and readers[var] == 1 and var not in results
            fused |= eqn.primitive.name in VIEWS
            sizes[var] = 0 if fused else _num_bytes(var)
            last_use.setdefault(var, place)
            until = max(until, last_use[var]) if fused else until
        for var in _variables(eqn.invars):
            last_use[var] = max(last_use.get(var, 0), until)
    return sizes, last_use


def _variables(atoms: Any) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _num_bytes(var: Var) -> int:
    aval: Any = var.aval
    return int(aval.size * aval.dtype.itemsize)


def _makes_buffers(eqn: Any) -> bool:
    name = eqn.primitive.name
    return name in BUFFERS or name.startswith(BUFFER_KINDS) or bool(_inner(eqn))


def _inner(eqn: Any) -> list[Jaxpr]:
    found = []
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            part = getattr(part, "jaxpr", part)
            if isinstance(part, Jaxpr):
                found.append(part)
    return found
