"""Bytes of activations: what each stage or layer keeps for its backward, and how much of it is live over a schedule.

Everything here is read off the VJPs' own residuals (:class:`cyclic_jax.executors.stage_op.StageOp`); nothing is executed. Weights
and what the forward makes of weights alone are not counted, and a value that a stage keeps twice is counted once. A stage's input
is counted where the stage's backward needs it; if the stage before keeps it too, as its output, it is counted at both. Units are
bytes of one micro-batch, whose rows B are those of the model's example.

What the compiler allocates beside residuals (the working memory of one op) is not predicted; :func:`compiled_bytes` reads its
figures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from cyclic_jax.executors.stage_op import StageOp, trace_ops
from cyclic_jax.schedule import Schedule
from cyclic_jax.stages import Layer, StagedModel
from cyclic_jax.stages.staged import Stage, Struct

PyTree = Any
Residuals = str | Callable[..., bool]


def traced_ops(
    model: StagedModel,
    loss: Callable[[PyTree, PyTree], jax.Array] | None = None,
    targets: PyTree = None,
    residuals: Residuals = "save",
) -> list[StageOp]:
    """Every stage's op, traced for the model's example.

    Args:
        model: S stages.
        loss: if given, part of the last stage, as in the executors.
        targets: structs or arrays of one micro-batch's targets, for ``loss``.
        residuals: ``"save"``, ``"recompute"`` or a ``jax.checkpoint`` policy.

    Raises:
        ValueError: for a loss without targets.
    """
    if loss is not None and targets is None:
        raise ValueError("a loss needs the structs of one micro-batch's targets")
    last = model.num_stages - 1
    ops = [StageOp(stage, loss if stage.index == last else None, residuals) for stage in model.stages]
    trace_ops(model, ops, model.structs[0], targets)
    return ops


def stage_bytes(
    model: StagedModel,
    loss: Callable[[PyTree, PyTree], jax.Array] | None = None,
    targets: PyTree = None,
    residuals: Residuals = "save",
) -> tuple[int, ...]:
    """``[S]``: bytes that each stage keeps from its forward to its backward. Arguments as in :func:`traced_ops`.

    Examples:
        >>> import jax.numpy as jnp, cyclic_jax as cj
        >>> square = (lambda key, x: jnp.ones(()), lambda params, x: params * x * x)
        >>> model = cj.partition(cj.from_functions([square] * 2), 2, example=jnp.ones((5, 3)), by="layers")
        >>> stage_bytes(model)  # x and p·x; the first stage's input has no cotangent, so its p·x is not needed
        (60, 120)
    """
    return tuple(op.residual_bytes for op in traced_ops(model, loss, targets, residuals))


def layer_bytes(layers: Sequence[Layer], structs: Sequence[Struct], residuals: Residuals = "save") -> tuple[int, ...]:
    """``[L]``: bytes that each layer would keep as a stage of its own.

    Args:
        layers: the model.
        structs: what enters each layer and what leaves the last (``model.structs``).
        residuals: as in :func:`traced_ops`.
    """
    stages = tuple(Stage(k, k, (layer,), structs[k], structs[k + 1]) for k, layer in enumerate(layers))
    return stage_bytes(StagedModel(stages, tuple(structs)), residuals=residuals)


def curve(schedule: Schedule, sizes: Sequence[float]) -> np.ndarray:
    """``[period]``: bytes live at each tick of the steady state, all workers together.

    From the start of a forward to the end of its backward, ops of one tick counted together.

    Args:
        schedule: any table, such as ``Schedule.simultaneous`` for plain data parallelism.
        sizes: ``[S]``, bytes a stage keeps for one micro-batch.

    Examples:
        >>> curve(Schedule.cyclic(4), [1, 1, 1, 1]).tolist()  # N(N+1)/2 at every tick (derived)
        [10, 10, 10, 10, 10, 10, 10, 10]
        >>> curve(Schedule.simultaneous(4, 4), [1, 1, 1, 1]).tolist()
        [4, 8, 12, 16, 16, 12, 8, 4]
    """
    return schedule.live_activations(sizes).sum(axis=0)


@dataclass(frozen=True)
class Peaks:
    """Peak bytes of activations of a schedule against plain data parallelism.

    Attributes:
        dp: N·A: all micro-batches' residuals at once.
        cdp: the largest entry of the schedule's curve.
        mean: the curve's mean over a period.
    """

    dp: float
    cdp: float
    mean: float

    @property
    def ratio(self) -> float:
        """``cdp / dp``; for one op a tick and S = N it is Σ_j (N−j)·a_j / (N·A), a_j the bytes of stage j and A their sum.

        That is (N+1)/(2N) for uniform stages, more if early stages are the larger ones (derived: N − j micro-batches hold
        stage j at every tick).
        """
        return self.cdp / self.dp

    @property
    def unevenness(self) -> float:
        """Largest entry of the curve over its mean: 1 if the memory is constant."""
        return self.cdp / self.mean


def peaks(schedule: Schedule, sizes: Sequence[float]) -> Peaks:
    """Arguments as in :func:`curve`.

    Raises:
        ValueError: if nothing is kept at all.
    """
    if not sum(sizes):
        raise ValueError("no stage keeps anything: there is no ratio to speak of")
    live = curve(schedule, sizes)
    return Peaks(schedule.num_workers * float(sum(sizes)), float(live.max()), float(live.mean()))


def compiled_bytes(compiled: jax.stages.Compiled) -> int:
    """Peak bytes of a program by its compiler: arguments, temporaries, and outputs that are no donated argument's buffer.

    Raises:
        RuntimeError: if this backend's compiler does not say.
    """
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError("this backend's compiler reports no memory")
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.argument_size_in_bytes + memory.temp_size_in_bytes + outputs)
