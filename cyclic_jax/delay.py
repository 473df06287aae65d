"""Delayed updates as an optax transformation: section 1 of the method, for anybody's training loop.

A worker that is delayed on a stage follows the same trajectory one step late. So what is delayed is the *update*, not
the gradient: the inner optimizer runs once per step, on the whole gradient and the newest parameters, and its update is
handed out at once where the worker is fresh and one step later where it is delayed. Learning-rate schedules, momentum,
weight decay and clipping by global norm therefore stay exact.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

PyTree = Any
Fresh = Sequence[bool] | np.ndarray | jax.Array


class DelayByStageState(NamedTuple):
    """State of :func:`delay_by_stage`.

    Attributes:
        inner_state: of the inner optimizer, which is always up to date.
        pending: like the parameters: the update that a delayed leaf has not received yet; ``optax.MaskedNode()`` for a
            leaf that is statically fresh.
    """

    inner_state: optax.OptState
    pending: optax.Updates


def delay_by_stage(
    inner: optax.GradientTransformation,
    stage_labels: PyTree | Callable[[PyTree], PyTree] | None = None,
    fresh: Fresh | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Delay the inner optimizer's update by one step on the stages where a worker is not fresh.

    With :math:`u_t` the inner optimizer's update for the whole gradient :math:`G_t` at :math:`\theta_t`, a leaf of
    stage ``j`` receives :math:`u_t` if ``fresh[j]`` and :math:`u_{t-1}` otherwise (:math:`u_{-1} = 0`). The parameters
    that the worker holds are then :math:`\hat\theta^j = \theta_t^j` or :math:`\theta_{t-1}^j`, the update rule of
    Cyclic Data Parallelism (Fournier & Oyallon, arXiv 2403.08837).

    If ``fresh`` is given here as plain booleans, it is static: fresh stages cost no buffer, and with all stages fresh
    the result is the inner optimizer. Otherwise give a row at each call, ``update(..., fresh=row)``, which may be
    traced; it may change from step to step, and a stage that turns fresh receives all that it missed.

    Args:
        inner: any optimizer. Updates wait in the dtype of the parameters: where these have less precision than the updates,
            a waiting update is rounded to it.
        stage_labels: stage index of each parameter: a pytree of ints that is a prefix of the parameters, or a function
            of the parameters that gives one. By default the parameters are a tuple or list with one pytree per stage.
        fresh: bool ``[S]``, this worker's row of the rule's mask.

    Returns:
        An optax transformation whose ``update`` needs ``params``, and takes ``fresh`` if it was not given here. The
        gradient is the mean over all workers; ``params`` are the worker's own, possibly delayed, parameters.

    Raises:
        ValueError: for a label outside ``0 .. S-1``, a row that is not one-dimensional, missing ``params``, or
            ``fresh`` given twice or never.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> tx = delay_by_stage(optax.sgd(1.0), {"encoder": 0, "head": 1}, fresh=[False, True])
        >>> params = {"encoder": jnp.zeros(()), "head": jnp.zeros(())}
        >>> state = tx.init(params)
        >>> for step in range(2):
        ...     updates, state = tx.update({"encoder": jnp.ones(()), "head": jnp.ones(())}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> float(params["encoder"]), float(params["head"])
        (-1.0, -2.0)
    """
    inner = optax.with_extra_args_support(inner)
    at_hand = None if fresh is None else _checked_row(fresh)
    static = at_hand if isinstance(at_hand, np.ndarray) else None

    def init_fn(params: PyTree) -> DelayByStageState:
        labels = _leaf_labels(stage_labels, params, None if at_hand is None else at_hand.shape[0])
        pending = jax.tree.map(
            lambda label, p: optax.MaskedNode() if static is not None and static[label] else jnp.zeros_like(p),
            labels,
            params,
        )
        return DelayByStageState(inner.init(params), pending)

    def update_fn(
        updates: optax.Updates,
        state: DelayByStageState,
        params: optax.Params | None = None,
        *,
        fresh: Fresh | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, DelayByStageState]:
        if params is None:
            raise ValueError(
                "delay_by_stage needs params: the newest parameters are formed from the ones the worker holds"
            )
        row = _one_row(at_hand, fresh)
        labels = _leaf_labels(stage_labels, params, row.shape[0])
        # tree.map over the parameters first: `pending` may hold MaskedNodes where they hold leaves
        newest = jax.tree.map(_add, params, state.pending)
        new, inner_state = inner.update(updates, state.inner_state, newest, **extra_args)
        emitted = jax.tree.map(lambda u, label, w: _emit(u, row[label], w), new, labels, state.pending)
        pending = jax.tree.map(lambda u, label, w: _keep(u, row[label], w), new, labels, state.pending)
        return emitted, DelayByStageState(inner_state, pending)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _add(param: jax.Array, pending: Any) -> jax.Array:
    if isinstance(pending, optax.MaskedNode):
        return param
    return (param + pending).astype(param.dtype)  # as optax.apply_updates does, to the bit


def _emit(new: jax.Array, fresh: Any, pending: Any) -> jax.Array:
    if isinstance(pending, optax.MaskedNode):
        return new
    return jnp.where(fresh, pending + new.astype(pending.dtype), pending)


def _keep(new: jax.Array, fresh: Any, pending: Any) -> Any:
    if isinstance(pending, optax.MaskedNode):
        return pending
    return jnp.where(fresh, jnp.zeros_like(pending), new.astype(pending.dtype))


def _checked_row(fresh: Fresh) -> np.ndarray | jax.Array:
    row = fresh if isinstance(fresh, jax.Array) else np.asarray(fresh)
    if row.ndim != 1 or row.shape[0] == 0 or row.dtype != bool:
        raise ValueError(f"fresh must be booleans [S], one per stage, got {row.dtype}{list(row.shape)}")
    return row


def _one_row(given_before: Any, given_now: Fresh | None) -> np.ndarray | jax.Array:
    if (given_before is None) == (given_now is None):
        when = "neither to delay_by_stage nor" if given_now is None else "both to delay_by_stage and"
        raise ValueError(f"fresh was given {when} to update: exactly one of them must have it")
    return given_before if given_now is None else _checked_row(given_now)


def _leaf_labels(stage_labels: Any, params: PyTree, num_stages: int | None) -> PyTree:
    """A stage index for every leaf of ``params``."""
    labels = stage_labels(params) if callable(stage_labels) else stage_labels
    if labels is None:
        if not isinstance(params, tuple | list):
            raise ValueError(
                f"stage_labels are needed: the parameters are a {type(params).__name__}, not a tuple or list of stages"
            )
        if num_stages is not None and num_stages != len(params):
            raise ValueError(f"fresh has {num_stages} entries, but the parameters have {len(params)} stages")
        labels = type(params)(range(len(params))) if type(params) in (tuple, list) else tuple(range(len(params)))
    for label in jax.tree.leaves(labels):
        is_index = isinstance(label, int | np.integer) and not isinstance(label, bool)
        inside = is_index and label >= 0 and (num_stages is None or label < num_stages)
        if not inside:
            stages = "" if num_stages is None else f" 0 to {num_stages - 1}"
            raise ValueError(f"stage label {label!r} is not one of the stages{stages}")
    return jax.tree.map(lambda label, part: jax.tree.map(lambda _: int(label), part), labels, params)
