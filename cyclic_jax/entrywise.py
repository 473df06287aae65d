"""Does an optimizer work entry by entry? Found by data flow, not by name.

Then it does not matter where an entry lies: a stage's parameters may be updated as one flat vector, with one flat vector for each
thing that the optimizer remembers of a parameter. Adam, SGD and their like are such; what looks at a leaf as a whole (Muon, a norm)
or at its name (a mask) is not.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from cyclic_jax.coupling import needed_inputs

PyTree = Any
Flat = dict[str, jax.Array]  # dtype name -> vector
Init = Callable[[PyTree], PyTree]
Update = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]

_ARITHMETIC = {"add", "sub", "mul", "div", "neg", "sign", "abs", "max", "min", "rem", "clamp", "add_any", "square"}
_FUNCTIONS = {"pow", "integer_pow", "sqrt", "rsqrt", "cbrt", "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic"}
_ROUNDING = {"floor", "ceil", "round", "convert_element_type", "reduce_precision"}
_CHOICES = {"select_n", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "xor", "is_finite"}
_ENTRY_BY_ENTRY = _ARITHMETIC | _FUNCTIONS | _ROUNDING | _CHOICES | {"broadcast_in_dim", "copy", "stop_gradient"}


@dataclass(frozen=True)
class Entrywise:
    """How the optimizer's state of a stage lies in vectors.

    Attributes:
        params: structs of the stage's parameters.
        state: structs of the optimizer's state of them.
        flat_state: structs of the optimizer's state of the flat vectors.
        groups: for each leaf of ``flat_state`` the leaves of ``state`` that lie in it, in order.
    """

    params: PyTree
    state: PyTree
    flat_state: PyTree
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, init: Init, update: Update, params: PyTree) -> "Entrywise | None":
        """``None`` if the optimizer is not entrywise on these parameters.

        Args:
            init: ``init(params) -> state``.
            update: ``update(gradient, state, params) -> (params, state)``.
            params: structs.
        """
        flat = jax.eval_shape(flatten, params)
        try:
            whole, parts = _Traced(init, update, params), _Traced(init, update, flat)
        except Exception:  # an optimizer written for these leaves only, such as one with a mask
            return None
        names = [leaf.dtype.name for leaf in jax.tree.leaves(params)]
        if not (whole.separate and parts.separate and parts.simple):
            return None
        programs = dict(zip(flat, parts.programs, strict=True))
        if any(program != programs[name] for name, program in zip(names, whole.programs, strict=True)):
            return None
        groups = []
        for owner, rank in parts.places:
            name = None if owner is None else list(flat)[owner]
            wanted = [(None, rank)] if name is None else [(k, rank) for k, other in enumerate(names) if other == name]
            groups.append(tuple(whole.places.index(place) for place in wanted))
        return cls(params, whole.state, parts.state, tuple(groups))

    def pack(self, state: PyTree) -> PyTree:
        """The state of the flat vectors."""
        leaves = jax.tree.leaves(state)
        packed = [
            jnp.concatenate([leaves[k].ravel() for k in group]) if struct.ndim else leaves[group[0]]
            for group, struct in zip(self.groups, jax.tree.leaves(self.flat_state), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(self.flat_state), packed)

    def unpack(self, flat_state: PyTree) -> PyTree:
        """The inverse of :meth:`pack`; vectors may be longer than needed."""
        structs, structure = jax.tree.flatten(self.state)
        leaves: list[Any] = [None] * len(structs)
        for group, vector in zip(self.groups, jax.tree.leaves(flat_state), strict=True):
            ends = np.cumsum([structs[k].size for k in group])
            for k, end in zip(group, ends, strict=True):
                leaves[k] = vector[end - structs[k].size : end].reshape(structs[k].shape) if vector.ndim else vector
        return jax.tree.unflatten(structure, leaves)


def flatten(tree: PyTree) -> Flat:
    """One vector for each dtype."""
    parts: dict[str, list[jax.Array]] = {}
    for leaf in jax.tree.leaves(tree):
        parts.setdefault(leaf.dtype.name, []).append(jnp.ravel(leaf))
    return {name: jnp.concatenate(parts[name]) for name in sorted(parts)}


class _Traced:
    """An update as a program, taken apart by leaves of the parameters."""

    def __init__(self, init: Init, update: Update, params: PyTree):
        self.state = jax.eval_shape(init, params)
        self.jaxpr = jax.make_jaxpr(update)(params, self.state, params)
        self.num_leaves, self.num_state = len(jax.tree.leaves(params)), len(jax.tree.leaves(self.state))
        self._needs = needed_inputs(self.jaxpr.jaxpr)

    @cached_property
    def owners(self) -> list[set[int]]:
        """For each output, the leaves whose gradient or parameters it needs."""
        L, last = self.num_leaves, self.num_leaves + self.num_state
        return [{k if k < L else k - last for k in need if k < L or k >= last} for need in self._needs]

    @property
    def separate(self) -> bool:
        """No output needs two leaves, and what needs none is a scalar."""
        shared = [out for out, owners in zip(self.jaxpr.out_avals, self.owners, strict=True) if not owners]
        return all(len(owners) <= 1 for owners in self.owners) and all(not out.shape for out in shared)

    @cached_property
    def places(self) -> list[tuple[int | None, int]]:
        """For each leaf of the state, the leaf of the parameters it belongs to, and how many before it do."""
        owners = [next(iter(found), None) for found in self.owners[self.num_leaves :]]
        return [(owner, owners[:k].count(owner)) for k, owner in enumerate(owners)]

    @property
    def simple(self) -> bool:
        """Every operation is entry by entry, between scalars and arrays of one leaf's shape."""
        return not self.jaxpr.consts and all(_simple(self._program(k)) for k in range(self.num_leaves))

    @cached_property
    def programs(self) -> list[str]:
        """For each leaf of the parameters, what is done with it, whatever its shape."""
        return [_without_shapes(str(self._program(k))) for k in range(self.num_leaves)]

    def _program(self, leaf: int) -> Any:
        used = [not owners or owners == {leaf} for owners in self.owners]
        return partial_eval.dce_jaxpr(self.jaxpr.jaxpr, used)[0]


def _simple(jaxpr: Any) -> bool:
    shapes = {atom.aval.shape for atom in (*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars))}
    return len(shapes - {()}) <= 1 and all(_entry_by_entry(eqn) for eqn in jaxpr.eqns)


def _entry_by_entry(eqn: Any) -> bool:
    if not any(atom.aval.shape for atom in (*eqn.invars, *eqn.outvars)):
        return True  # scalars: a learning rate's schedule, say
    if eqn.primitive.name == "jit":
        return _simple(eqn.params["jaxpr"].jaxpr)
    return eqn.primitive.name in _ENTRY_BY_ENTRY


def _without_shapes(program: str) -> str:
    """Shapes are the numbers in brackets after a dtype, and a broadcast's target."""
    program = re.sub(r"(?<=[a-z0-9])\[[\d,]*\]", "[]", program)
    return re.sub(r"shape=\([\d, ]*\)", "shape=()", program)
