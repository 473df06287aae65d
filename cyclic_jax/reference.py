r"""The update rule, literally: one device, a plain loop over workers. Every executor is proven against it.

.. math::

    \hat\theta_i^j &= \theta_t^j \text{ if } \mathrm{fresh}[i, j] \text{ else } \theta_{t-1}^j \\
    G_t^j &= \frac1N \sum_i \nabla_j f_i(\hat\theta_i) \\
    \theta_{t+1} &= \theta_t + u_t, \qquad u_t = \mathrm{optimizer}(G_t, \theta_t)

(Fournier & Oyallon, arXiv 2403.08837.) The two versions are kept as such; nothing here knows how an update could be
delayed.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cyclic_jax.optimizer import by_stage
from cyclic_jax.stages import StagedModel, worker_key
from cyclic_jax.state import Metrics, TrainState

PyTree = Any
Loss = Callable[[PyTree, PyTree], jax.Array]


def reference_step(
    model: StagedModel,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    fresh: np.ndarray | jax.Array,
    state: TrainState,
    batch: tuple[PyTree, PyTree],
) -> tuple[TrainState, Metrics]:
    """One training step.

    Args:
        model: S stages.
        loss: ``loss(outputs, targets) -> scalar``, the mean over the micro-batch it is given.
        optimizer: any optax transformation.
        fresh: bool ``[N, S]``, a rule's mask (``rule.fresh``, or ``rule.tiled(D).fresh`` for D data groups); may be
            traced.
        state: theta_t and theta_{t-1} may differ on any stage.
        batch: ``(inputs, targets)``, leading axis N·B; micro-batch i is rows ``[iB, (i+1)B)``.

    Returns:
        The state after the step, and ``Metrics`` with one loss per worker.
    """
    N, S = fresh.shape
    theta, theta_before = state.params, state.previous_params
    losses, grads, model_states = [], [], []
    for i in range(N):
        seen = tuple(choose(fresh[i, j], theta[j], theta_before[j]) for j in range(S))
        inputs, targets = jax.tree.map(lambda a, i=i: a.reshape(N, -1, *a.shape[1:])[i], batch)
        statistics = jax.tree.map(lambda leaf, i=i: leaf[i], state.model_state)
        key = worker_key(state.key, state.step, i)

        def f(params, statistics=statistics, inputs=inputs, targets=targets, key=key):  # type: ignore[no-untyped-def]
            outputs, new_statistics = model.apply(params, statistics, inputs, key=key, train=True)
            return loss(outputs, targets), new_statistics

        (value, new_statistics), gradient = jax.value_and_grad(f, has_aux=True)(seen)
        losses.append(value)
        grads.append(gradient)
        model_states.append(new_statistics)

    G = jax.tree.map(lambda *g: sum(g) / N, *grads)
    u, opt_state = by_stage(optimizer, theta).update(G, state.opt_state, theta)
    new_state = replace(
        state,
        step=state.step + 1,
        params=optax.apply_updates(theta, u),
        previous_params=theta,
        opt_state=opt_state,
        model_state=jax.tree.map(lambda *leaves: jnp.stack(leaves), *model_states),
    )
    return new_state, Metrics(jnp.stack(losses), jnp.full((N,), state.step))


def choose(fresh: jax.Array, current: PyTree, previous: PyTree) -> PyTree:
    """``current`` if ``fresh`` else ``previous``."""
    return jax.tree.map(lambda a, b: jnp.where(fresh, a, b), current, previous)
