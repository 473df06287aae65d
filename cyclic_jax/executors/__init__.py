"""Executors: realisations of a rule, and of its schedule, on devices. One file each."""

import difflib
import inspect
from typing import Any

import optax
from jax.sharding import Mesh

from cyclic_jax.executors.base import Executor, Loss
from cyclic_jax.executors.interleaved import InterleavedExecutor
from cyclic_jax.executors.model_parallel import ModelParallelExecutor
from cyclic_jax.executors.pipeline import PipelineExecutor
from cyclic_jax.executors.replicated import ReplicatedExecutor
from cyclic_jax.executors.synchronous import SynchronousExecutor
from cyclic_jax.executors.zero import ZeroExecutor
from cyclic_jax.rules import UpdateRule
from cyclic_jax.schedule import Schedule
from cyclic_jax.stages import StagedModel

EXECUTORS: dict[str, Any] = {
    "synchronous": SynchronousExecutor,
    "replicated": ReplicatedExecutor,
    "interleaved": InterleavedExecutor,
    "pipeline": PipelineExecutor,
    "model_parallel": ModelParallelExecutor,
    "zero": ZeroExecutor,
}

__all__ = ["EXECUTORS", "Executor", "make_executor"]


def make_executor(
    name: str,
    model: StagedModel,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    rule: UpdateRule,
    schedule: Schedule | None = None,
    mesh: Mesh | None = None,
    **options: Any,
) -> Executor:
    """An executor by name.

    Args:
        name: ``"synchronous"``: all workers at once, gradients averaged by all-reduce. The others are staggered by the schedule.
            ``"replicated"``: a full copy on each of N devices, gradients point to point. ``"zero"``: states shared by N devices,
            parameters and gradients point to point. ``"pipeline"``: a stage on each of N devices, micro-batches rotate.
            ``"model_parallel"``: N(N+1)/2 devices that hold one micro-batch each. ``"interleaved"``: one device, micro-batches
            take turns.
        model: from :func:`cyclic_jax.partition`.
        loss: ``loss(outputs, targets) -> scalar``, the mean over the micro-batch it is given.
        optimizer: any optax transformation; for the staggered executors one that treats each stage on its own.
        rule: which worker sees which version of which stage; for the staggered executors one that the schedule can run.
        schedule: what to run, for the staggered executors (by default the cyclic one, for ``"pipeline"`` its period-3 table); for
            the synchronous one it is only checked against the rule.
        mesh: axes ``("cyclic",)`` or ``("data", "cyclic")``; by default one ring, over as many devices as the executor needs or
            (synchronous) as many as divide N.
        options: of that executor alone. ``residuals`` (all but ``"synchronous"``): ``"save"`` what the backward needs,
            ``"recompute"`` it, or a ``jax.checkpoint`` policy. ``stream_dtype`` (``"zero"``): what parameters are rounded to
            while they travel.

    Raises:
        ValueError: for an unknown name, a rule that does not fit the model, a schedule that cannot run the rule, or a
            mesh that does not fit the workers.
        TypeError: for an option that this executor does not have.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, cyclic_jax as cj
        >>> scale = (lambda key, x: jnp.ones(()), lambda params, x: params * x)
        >>> model = cj.partition(cj.from_functions([scale] * 2), 2, example=jnp.ones((3, 1)), by="layers")
        >>> rule = cj.UpdateRule.cdp_v1(2, 2)
        >>> mse = lambda y, target: ((y - target) ** 2).mean()
        >>> executor = cj.make_executor("synchronous", model, mse, optax.sgd(0.1), rule=rule)
        >>> carry = executor.init(cj.TrainState.create(model, optax.sgd(0.1), jax.random.key(0)))
        >>> carry, metrics = executor.step(carry, (jnp.ones((6, 1)), jnp.zeros((6, 1))))
        >>> metrics.loss.tolist()
        [1.0, 1.0]
    """
    if name not in EXECUTORS:
        near = difflib.get_close_matches(name, EXECUTORS, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown executor {name!r}: did you mean {near!r}? Known: {', '.join(EXECUTORS)}")
    has = set(inspect.signature(EXECUTORS[name]).parameters) - set(inspect.signature(make_executor).parameters)
    for option in options:
        if option not in has:
            takes = ", ".join(sorted(has)) or "none"
            raise TypeError(f"the {name} executor has no option {option!r}: it takes {takes}")
    return EXECUTORS[name](model, loss, optimizer, rule=rule, schedule=schedule, mesh=mesh, **options)
