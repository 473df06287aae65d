"""Which outputs of a traced function are one and the same value, found in the jaxpr.

Nested ``jit`` calls are looked through: an output of such a call that is only handed through, or that another output repeats, is
the same value. This module is the only one that reads equations of a jaxpr.
"""

from collections.abc import Hashable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal


def same_values(closed: ClosedJaxpr) -> tuple[list[Hashable], list[Hashable]]:
    """Labels of inputs and outputs; two with equal labels hold the same value.

    Args:
        closed: what ``jax.make_jaxpr`` returned.

    Returns:
        ``(inputs, outputs)``, one label each. Constants of equal value may have different labels.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> inputs, outputs = same_values(jax.make_jaxpr(lambda x: (jnp.sin(x), x, jax.jit(lambda x: x)(x)))(1.0))
        >>> [inputs.index(label) if label in inputs else None for label in outputs]
        [None, 0, 0]
    """
    labels = [("input", k) for k in range(len(closed.jaxpr.invars))]
    return list(labels), _follow(closed.jaxpr, labels, ())


def _follow(jaxpr: Any, inputs: Sequence[Hashable], place: tuple[int, ...]) -> list[Hashable]:
    """Labels of a jaxpr's outputs, given those of its inputs; ``place`` says which call of which call this is."""
    known: dict[Any, Hashable] = dict(zip(jaxpr.invars, inputs, strict=True))
    known |= {variable: ("constant", place, k) for k, variable in enumerate(jaxpr.constvars)}

    def label(atom: Any) -> Hashable:
        return ("literal", id(atom)) if isinstance(atom, Literal) else known[atom]

    for k, equation in enumerate(jaxpr.eqns):
        inner = equation.params.get("jaxpr") if equation.primitive.name in ("jit", "pjit") else None
        if inner is not None:
            found = _follow(inner.jaxpr, [label(atom) for atom in equation.invars], (*place, k))
        else:
            found = [(*place, k, output) for output in range(len(equation.outvars))]
        known |= dict(zip(equation.outvars, found, strict=True))
    return [label(atom) for atom in jaxpr.outvars]
