"""A model cut in stages: contiguous runs of layers, with the shapes that cross each boundary.

Axis letters used throughout the package: N workers (= micro-batches), S stages, B rows of one micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyclic_jax.stages.layer import Key, Layer, PyTree

Struct = Any  # a pytree of jax.ShapeDtypeStruct


def worker_key(key: Key, step: jax.Array | int, worker: jax.Array | int) -> Key:
    """The key of one worker's micro-batch in one training step.

    Layers fold in their own index after this, so dropout masks depend on (step, worker, layer) alone and not on the
    partition, the device or the tick.
    """
    return jax.random.fold_in(jax.random.fold_in(key, step), worker)


@dataclass(frozen=True)
class Stage:
    """Layers ``start .. start + len(layers) - 1`` of a model, with the struct that enters and the one that leaves."""

    index: int
    start: int
    layers: tuple[Layer, ...]
    input_struct: Struct
    output_struct: Struct

    def init(self, key: Key, x: PyTree) -> tuple[tuple[PyTree, ...], tuple[PyTree, ...]]:
        """Parameters and state: tuples with one pytree per layer. ``x`` may be structs: its values do not matter."""
        params, states = [], []
        for index, layer in enumerate(self.layers, self.start):
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), x)  # Linen's init runs the layer
            p, s = layer.init(jax.random.fold_in(key, index), zeros)
            x, _ = jax.eval_shape(partial(layer.apply, key=None, train=False), p, s, zeros)
            params.append(p)
            states.append(s)
        return tuple(params), tuple(states)

    def apply(
        self,
        params: PyTree,
        state: PyTree,
        x: PyTree,
        *,
        key: Key | None = None,
        train: bool = True,
        start: jax.Array | None = None,
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        """One forward pass of this stage.

        Args:
            params: tuple with one pytree per layer.
            state: likewise.
            x: what the previous stage gave, leading axis B.
            key: the worker's key (:func:`worker_key`); each layer folds in its index in the whole model.
            train: training or evaluation.
            start: number of the first layer, int32; ``None`` for this stage's own.

        Returns:
            ``(y, new_state)``.
        """
        new_state = []
        first = self.start if start is None else start
        for index, (layer, p, s) in enumerate(zip(self.layers, params, state, strict=True)):
            layer_key = None if key is None else jax.random.fold_in(key, first + index)
            x, s = layer.apply(p, s, x, key=layer_key, train=train)
            new_state.append(s)
        return x, tuple(new_state)


@dataclass(frozen=True)
class StagedModel:
    """A model as a tuple of stages. Made by :func:`cyclic_jax.partition`."""

    stages: tuple[Stage, ...]
    structs: tuple[Struct, ...]  # what enters layer 0, 1, …, and what leaves the last one

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.stages)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers in order."""
        return tuple(layer for stage in self.stages for layer in stage.layers)

    @property
    def boundaries(self) -> tuple[tuple[int, int], ...]:
        """The layers ``[start, stop)`` of each stage."""
        return tuple((stage.start, stage.start + len(stage.layers)) for stage in self.stages)

    def init(self, key: Key) -> tuple[tuple[PyTree, ...], tuple[PyTree, ...]]:
        """Parameters and state of every stage, the same numbers for every partition.

        Raises:
            ValueError: if one array is a parameter of two stages.
        """
        pairs = [stage.init(key, stage.input_struct) for stage in self.stages]
        params, state = tuple(p for p, _ in pairs), tuple(s for _, s in pairs)
        _refuse_shared(self, params)
        return params, state

    def apply(
        self,
        params: Sequence[PyTree],
        state: Sequence[PyTree],
        x: PyTree,
        *,
        key: Key | None = None,
        train: bool = True,
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        """The whole forward pass: stage after stage. Arguments as in :meth:`Stage.apply`, tuples with one entry per
        stage."""
        new_state = []
        for stage, p, s in zip(self.stages, params, state, strict=True):
            with jax.named_scope(f"F{stage.index}"):  # a backward pass calls it transpose(jvp(F0))
                x, s = stage.apply(p, s, x, key=key, train=train)
            new_state.append(s)
        return x, tuple(new_state)

    def describe(self) -> str:
        """Each stage's layers, parameters, forward flops and activation bytes for the example micro-batch, as a
        table."""
        from cyclic_jax.costs import describe  # the costs need the compiler; stages alone do not

        return describe(self)


def check_layers(layers: Sequence[Layer], example: PyTree) -> tuple[Struct, ...]:
    """The structs between layers, found without running anything.

    Args:
        layers: the model.
        example: an input of one micro-batch, or its struct.

    Returns:
        L + 1 structs: what enters each layer, and what leaves the last.

    Raises:
        ValueError: if a layer does not take what the one before gives.
    """
    x = jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), jax.dtypes.canonicalize_dtype(a.dtype)), example)
    structs, key = [x], jax.eval_shape(lambda: jax.random.key(0))
    for index, layer in enumerate(layers):
        try:
            x = jax.eval_shape(lambda k, x, layer=layer: _run(layer, k, x), key, x)
        except Exception as error:
            source = f"layer {index - 1} ({layers[index - 1].name})" if index else "the example"
            raise ValueError(
                f"layer {index} ({layer.name}) does not take what {source} gives, {show_struct(x)}: {error}"
            ) from error
        structs.append(x)
    return tuple(structs)


def _run(layer: Layer, key: Key, x: PyTree) -> PyTree:
    params, state = layer.init(key, x)
    y, new_state = layer.apply(params, state, x, key=key, train=True)
    before, after = (jax.tree.map(lambda a: (a.shape, a.dtype.name), s) for s in (state, new_state))
    if before != after:
        raise ValueError(f"its state changes shape or dtype in a forward pass: {before} becomes {after}")
    return y


def show_struct(struct: Struct) -> str:
    """A short text such as ``float32[4, 8]`` for each leaf."""
    return ", ".join(f"{leaf.dtype.name}{list(leaf.shape)}" for leaf in jax.tree.leaves(struct)) or "nothing"


def _refuse_shared(model: StagedModel, params: Sequence[PyTree]) -> None:
    owner: dict[int, tuple[int, str]] = {}
    for j, stage_params in enumerate(params):
        for path, leaf in jax.tree_util.tree_leaves_with_path(stage_params):
            here = (j, jax.tree_util.keystr(path))
            other = owner.setdefault(id(leaf), here)
            if other[0] != j:
                raise ValueError(
                    f"parameter {here[1]} of stage {j} is the same array as {other[1]} of stage {other[0]}: a "
                    "parameter shared by two stages has no single owner: give each stage its own copy"
                )
