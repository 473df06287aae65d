"""Does an optimizer mix stages? Found by data flow, not by name.

Most optimizers treat each parameter on its own: their state can be split by stage, and a stage can be updated as soon
as its own gradient is complete. Clipping by global norm cannot: every update needs every gradient. The dependence may
also run through the optimizer's state only, one step later, so it is closed transitively over the state's leaves.

This module is the only one that relies on ``dce_jaxpr``, which tells which inputs of a traced function an output needs.
"""

from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.interpreters import partial_eval

PyTree = Any


def mixed_stages(optimizer: optax.GradientTransformation, params: Sequence[PyTree]) -> tuple[int, int] | None:
    """Two stages that the optimizer mixes, or ``None`` if it treats each on its own.

    Args:
        optimizer: any optax transformation, as applied to all of ``params`` together.
        params: one pytree of arrays or structs per stage. Nothing is executed.

    Returns:
        ``(j, k)``: the update of stage ``j`` depends, now or in a later step, on the gradient or parameters of stage
        ``k``.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> mixed_stages(optax.adamw(1e-3), (jnp.ones(2), jnp.ones(3)))
        >>> mixed_stages(optax.clip_by_global_norm(1.0), (jnp.ones(2), jnp.ones(3)))
        (0, 1)
    """
    structs = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), tuple(params))
    owners = [j for j, part in enumerate(structs) for _ in jax.tree.leaves(part)]
    state = jax.eval_shape(optimizer.init, structs)
    num_state = len(jax.tree.leaves(state))
    update = jax.make_jaxpr(optimizer.update)(structs, state, structs).jaxpr
    inputs = [*owners, *[None] * num_state, *owners]  # gradients, state, parameters

    at_init = needed_inputs(jax.make_jaxpr(optimizer.init)(structs).jaxpr)
    needs = needed_inputs(update)
    state_stages = [{owners[k] for k in at_init[s]} for s in range(num_state)]
    changed = True
    while changed:
        grown = [old | _stages(needs[len(owners) + s], inputs, state_stages) for s, old in enumerate(state_stages)]
        changed, state_stages = grown != state_stages, grown
    for leaf, j in enumerate(owners):
        others = _stages(needs[leaf], inputs, state_stages) - {j}
        if others:
            return j, min(others)
    return None


def needed_inputs(jaxpr: Any) -> list[set[int]]:
    """For each output of a jaxpr, the places of the inputs that it needs."""
    rows = []
    for index in range(len(jaxpr.outvars)):
        used = [k == index for k in range(len(jaxpr.outvars))]
        _, used_inputs = partial_eval.dce_jaxpr(jaxpr, used)
        rows.append({k for k, needed in enumerate(used_inputs) if needed})
    return rows


def _stages(inputs_needed: set[int], inputs: list[int | None], state_stages: list[set[int]]) -> set[int]:
    first_state = inputs.index(None) if None in inputs else len(inputs)
    stages: set[int] = set()
    for k in inputs_needed:
        owner = inputs[k]
        stages |= state_stages[k - first_state] if owner is None else {owner}
    return stages
