"""The optimizer over stages: one state per stage wherever the optimizer allows it.

A stage's state can then live with the stage, move with it and be updated as soon as its own gradient is complete. An
optimizer that mixes stages keeps one state for the whole model, marked as such.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cyclic_jax.coupling import mixed_stages

PyTree = Any


class WholeModelState(NamedTuple):
    """State of an optimizer that mixes stages, for all stages together."""

    inner_state: optax.OptState


def by_stage(
    optimizer: optax.GradientTransformation, params: Sequence[PyTree]
) -> optax.GradientTransformationExtraArgs:
    """The same optimizer for parameters that are a tuple with one pytree per stage.

    Args:
        optimizer: any optax transformation.
        params: arrays or structs, one pytree per stage; only their shapes are used.

    Returns:
        A transformation with the same updates. Its state is a tuple of ``optimizer.init(params[j])``, or one
        :class:`WholeModelState` if the optimizer mixes stages, draws random numbers or cannot be initialised for one stage
        alone (a mask or labels written for the whole tree).
    """
    optimizer = optax.with_extra_args_support(optimizer)
    if not _splits(optimizer, params):
        return _whole_model(optimizer)

    def init_fn(params: Sequence[PyTree]) -> tuple[optax.OptState, ...]:
        return tuple(optimizer.init(part) for part in params)

    def update_fn(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        parts = [None] * len(grads) if params is None else params
        pairs = [optimizer.update(g, s, p, **extra_args) for g, s, p in zip(grads, state, parts, strict=True)]
        return tuple(u for u, _ in pairs), tuple(s for _, s in pairs)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _splits(optimizer: optax.GradientTransformation, params: Sequence[PyTree]) -> bool:
    if len(params) == 1:
        return True
    try:
        states = [jax.eval_shape(optimizer.init, part) for part in params]
    except Exception:  # whatever a mask or label tree for the whole model raises when it meets one stage
        return False
    return not _draws_random_numbers(states) and mixed_stages(optimizer, params) is None


def _draws_random_numbers(state: Any) -> bool:
    """Does the state hold a random key? Split by stage, every stage would draw the same numbers."""
    leaves = jax.tree.leaves(state)
    typed = any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves)
    return typed or any(leaf.dtype == jnp.uint32 and leaf.shape[-1:] in ((2,), (4,)) for leaf in leaves)


def check_separate(optimizer: optax.GradientTransformation, params: Sequence[PyTree]) -> None:
    """Refuse an optimizer that cannot be split by stage.

    Raises:
        ValueError: naming two stages that it mixes, or saying what else is in the way.
    """
    if _splits(optax.with_extra_args_support(optimizer), params):
        return
    pair = mixed_stages(optimizer, params)
    why = "it has no state of its own for each stage: it draws random numbers, or has a mask for the whole model"
    if pair is not None:
        why = f"its update of stage {pair[0]} depends on stage {pair[1]} (clipping by global norm, say)"
    raise ValueError(
        f"the optimizer cannot update one stage alone: {why}. Here a stage is updated before the gradients of earlier ones "
        "exist: use the synchronous executor, or an optimizer that treats each parameter on its own"
    )


def _whole_model(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    def init_fn(params: Sequence[PyTree]) -> WholeModelState:
        return WholeModelState(optimizer.init(params))

    def update_fn(grads: Any, state: WholeModelState, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        updates, inner_state = optimizer.update(grads, state.inner_state, params, **extra_args)
        return updates, WholeModelState(inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
