"""The training state: one canonical, portable form for every executor, device count and checkpoint."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cyclic_jax.optimizer import by_stage
from cyclic_jax.stages import StagedModel

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that training goes on from, between two steps.

    Attributes:
        step: int32 scalar: t, the number of updates that ``params`` have received.
        key: the run's base key; each (step, worker, layer) folds itself in.
        params: theta_t, a tuple with one pytree per stage.
        previous_params: theta_{t-1}, likewise: what delayed workers see in the next step. Equal to ``params`` at t = 0.
        opt_state: a tuple of the optimizer's states, one per stage; or one ``WholeModelState`` if it mixes stages.
        model_state: a tuple with one pytree per stage, leaves ``[N, …]``: every worker has its own (BatchNorm)
            statistics.
    """

    step: jax.Array
    key: jax.Array
    params: tuple[PyTree, ...]
    previous_params: tuple[PyTree, ...]
    opt_state: Any
    model_state: tuple[PyTree, ...]

    @classmethod
    def create(
        cls,
        model: StagedModel,
        optimizer: optax.GradientTransformation,
        key: jax.Array,
        example: PyTree = None,
        *,
        num_workers: int | None = None,
    ) -> "TrainState":
        """A fresh start.

        Args:
            model: from :func:`cyclic_jax.partition`.
            optimizer: any optax transformation.
            key: a typed key, ``jax.random.key(seed)``. Parameters are drawn from it, and it is kept as the run's base
                key.
            example: an input; if given, its shape (but for the rows) and dtype must be what the model was partitioned for.
            num_workers: N, over all data groups; by default the number of stages, as in the paper.

        Raises:
            ValueError: if one array is a parameter of two stages, ``num_workers`` is below 1, or ``example`` does not fit.
        """
        num_workers = model.num_stages if num_workers is None else num_workers
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: at least 1 is needed")
        _check_example(model, example)
        params, state = model.init(key)
        return cls(
            step=jnp.zeros((), jnp.int32),
            key=key,
            params=params,
            previous_params=jax.tree.map(jnp.copy, params),
            opt_state=by_stage(optimizer, params).init(params),
            model_state=jax.tree.map(lambda leaf: jnp.repeat(leaf[None], num_workers, axis=0), state),
        )


def _check_example(model: StagedModel, example: PyTree) -> None:
    """Everything but the number of rows must fit."""
    if example is None:
        return

    def form(leaf: Any) -> tuple[Any, ...]:
        return (*leaf.shape[1:], jax.dtypes.canonicalize_dtype(leaf.dtype).name)

    given, wanted = (jax.tree.map(form, tree) for tree in (example, model.structs[0]))
    if given != wanted:
        raise ValueError(f"the example has rows {given}, the model was partitioned for {wanted}")


class Snapshot(NamedTuple):
    """What evaluation needs: the newest complete step's parameters, and the statistics averaged over workers."""

    step: jax.Array
    params: tuple[PyTree, ...]
    model_state: tuple[PyTree, ...]


class Metrics(NamedTuple):
    """One training step's numbers.

    Attributes:
        loss: ``[N]``: each worker's mean loss over its micro-batch.
        step: int32 ``[N]``: the training step that the loss belongs to, −1 where a worker finished nothing.
    """

    loss: jax.Array
    step: jax.Array


def mean_over_workers(model_state: PyTree) -> PyTree:
    """Statistics for evaluation: floats averaged over the worker axis, anything else taken from worker 0."""
    return jax.tree.map(
        lambda leaf: leaf.mean(axis=0) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf[0], model_state
    )


def snapshot_of(state: TrainState) -> Snapshot:
    """The snapshot of a canonical state."""
    return Snapshot(state.step, state.params, mean_over_workers(state.model_state))
