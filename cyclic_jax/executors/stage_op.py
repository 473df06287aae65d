"""The op of one stage: its forward, its backward, and the residuals that wait between the two.

The residuals are those of ``jax.vjp``, less all that depends on the parameters alone: the parameters themselves, and what the
forward made of them (a copy in bfloat16, say). The backward has the same parameters at hand and makes these again; everything else
of that second forward is dead code, which the compiler removes. A value that the VJP holds twice is stored once.

This module is the only one that relies on what a VJP object holds: that it is a pytree whose leaves are its residuals, in an order
that depends only on the function and the shapes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cyclic_jax.coupling import needed_inputs
from cyclic_jax.executors.convolution import canonical_convolutions
from cyclic_jax.executors.same_values import same_values
from cyclic_jax.stages import Stage, StagedModel

PyTree = Any
Loss = Callable[[PyTree, PyTree], jax.Array]
Policy = Callable[..., bool]


class Inputs(NamedTuple):
    """What a forward reads beside the parameters. ``targets`` is ``None`` for all stages but the last.

    ``first_layer`` is the number of the stage's first layer, int32, where several stages share one program; else ``None``.
    """

    x: PyTree
    state: PyTree
    key: jax.Array
    targets: PyTree
    first_layer: jax.Array | None = None


class StageOp:
    """Forward and backward of one stage.

    Args:
        stage: its layers.
        loss: for the last stage, whose output is then the loss; else ``None``.
        residuals: ``"save"`` keeps what the backward needs, ``"recompute"`` only the stage's input, or a ``jax.checkpoint``
            policy.
        platform: of the device it will run on; decides how convolutions are written (:mod:`.convolution`).
    """

    def __init__(self, stage: Stage, loss: Loss | None, residuals: str | Policy = "save", platform: str = ""):
        if not (residuals in ("save", "recompute") or callable(residuals)):
            raise ValueError(f"residuals={residuals!r}: expected 'save', 'recompute' or a jax.checkpoint policy")
        self.stage, self.loss, self.residuals = stage, loss, residuals
        self._prepare = canonical_convolutions if platform == "cpu" else (lambda function: function)

    def trace(self, params: PyTree, inputs: Inputs) -> None:
        """Learn the structure of the residuals from structs; nothing is executed.

        Sets ``inputs_struct``, ``residual_structs``, ``output_struct``, and where a residual is a leaf of the stage's input ``x``
        or of its output: ``input_residuals`` and ``output_residuals``, dicts from a leaf's place to the residual's.
        """
        structure = None

        def all_residuals(params: PyTree, inputs: Inputs) -> tuple[list[jax.Array], PyTree]:
            nonlocal structure
            y, vjp, _ = self._vjp(params, inputs)
            leaves, structure = jax.tree.flatten(vjp)
            return leaves, y

        traced, (leaves, self.output_struct) = jax.make_jaxpr(all_residuals, return_shape=True)(params, inputs)
        num_params = len(jax.tree.leaves(params))
        needs = needed_inputs(traced.jaxpr)[: len(leaves)]
        self._structure = structure
        kept = [k for k, need in enumerate(needs) if any(source >= num_params for source in need)]
        sources, values = same_values(traced)
        place = {value: n for n, value in enumerate(dict.fromkeys(values[k] for k in kept))}
        self._stored = [values.index(value) for value in place]
        self._copies = {k: place[values[k]] for k in kept}
        self.residual_structs = [leaves[k] for k in self._stored]
        entering = sources[num_params : num_params + len(jax.tree.leaves(inputs.x))]
        self.input_residuals, self.output_residuals = (
            {k: place[value] for k, value in enumerate(leaving) if value in place}
            for leaving in (entering, values[len(leaves) :])
        )
        self.inputs_struct = jax.eval_shape(lambda inputs: inputs, inputs)

    @property
    def residual_bytes(self) -> int:
        """Bytes kept from the forward to the backward."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self.residual_structs)

    def forward(self, params: PyTree, inputs: Inputs) -> tuple[PyTree, PyTree, list[jax.Array]]:
        """``(output, new state, residuals)``; the output of the last stage is the loss."""
        with jax.named_scope(f"F{self.stage.index}"):
            return self._prepare(self._forward)(params, inputs)

    def _forward(self, params: PyTree, inputs: Inputs) -> tuple[PyTree, PyTree, list[jax.Array]]:
        y, vjp, state = self._vjp(params, inputs)
        leaves = jax.tree.leaves(vjp)
        return y, state, [leaves[k] for k in self._stored]

    def backward(self, params: PyTree, residuals: list[jax.Array], cotangent: PyTree) -> tuple[PyTree, PyTree]:
        """``(gradient of the parameters, cotangent of the input)``; the latter ``None`` where nothing needs it."""
        with jax.named_scope(f"B{self.stage.index}"):
            return self._prepare(self._backward)(params, residuals, cotangent)

    def _backward(self, params: PyTree, residuals: list[jax.Array], cotangent: PyTree) -> tuple[PyTree, PyTree]:
        anything = jax.tree.map(_zeros, self.inputs_struct)
        leaves = jax.tree.leaves(self._vjp(params, anything)[1])
        for k, place in self._copies.items():
            leaves[k] = residuals[place]
        gradients = jax.tree.unflatten(self._structure, leaves)(cotangent)
        return gradients[0], gradients[1]

    def _vjp(self, params: PyTree, inputs: Inputs) -> tuple[PyTree, Any, PyTree]:
        differentiable, rest = split(inputs.x if self.stage.index else None)

        def f(params: PyTree, differentiable: PyTree) -> tuple[PyTree, PyTree]:
            x = merge(differentiable, rest) if self.stage.index else inputs.x
            y, state = self.stage.apply(params, inputs.state, x, key=inputs.key, train=True, start=inputs.first_layer)
            if self.loss is not None:
                return self.loss(y, inputs.targets), (None, state)
            y, integers = split(y)
            return y, (integers, state)

        if self.residuals != "save":
            f = jax.checkpoint(f, policy=self.residuals if callable(self.residuals) else None)
        y, vjp, (integers, state) = jax.vjp(f, params, differentiable, has_aux=True)
        return (y if self.loss is not None else merge(y, integers)), vjp, state


def trace_ops(model: StagedModel, ops: list[StageOp], x: PyTree, targets: PyTree, first_layer: Any = None) -> None:
    """Trace every stage's op from the structs of one micro-batch, inputs and targets; ``first_layer`` as in :class:`Inputs`."""
    params, states = jax.eval_shape(model.init, jax.random.key(0))
    key = jax.eval_shape(lambda: jax.random.key(0))
    for op, p, state in zip(ops, params, states, strict=True):
        op.trace(p, Inputs(x, state, key, targets if op.loss else None, first_layer))
        x = op.output_struct


def split(tree: PyTree) -> tuple[PyTree, PyTree]:
    """The leaves that have a cotangent, and the others; ``None`` in each other's places."""
    inexact = jax.tree.map(lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact), tree)
    first = jax.tree.map(lambda leaf, yes: leaf if yes else None, tree, inexact)
    return first, jax.tree.map(lambda leaf, yes: None if yes else leaf, tree, inexact)


def merge(first: PyTree, second: PyTree) -> PyTree:
    """The inverse of :func:`split`."""
    return jax.tree.map(lambda a, b: b if a is None else a, first, second, is_leaf=lambda leaf: leaf is None)


def _zeros(struct: Any) -> jax.Array:
    if jnp.issubdtype(struct.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    return jnp.zeros(struct.shape, np.dtype(struct.dtype))
