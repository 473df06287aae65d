"""The ops of a worker that takes its own micro-batches through all stages, wherever the parameters come from.

Buffers: ``x{j}`` is what enters stage j, ``cotangent{j}`` its cotangent, ``residuals{j}`` and ``state{j}`` are stage j's;
``targets`` wait for the last stage, whose output is ``loss``, of step ``loss_step``.
"""

from typing import Any

import jax
import jax.numpy as jnp

from cyclic_jax.executors.base import Batch
from cyclic_jax.executors.clock import Clock
from cyclic_jax.executors.guard import Memory
from cyclic_jax.executors.stage_op import Inputs, StageOp, split
from cyclic_jax.stages import worker_key

PyTree = Any


class WorkerOps:
    """Forward and backward of each stage for one worker.

    Args:
        ops: of the stages.
        structs: ``(inputs, targets)`` of one micro-batch.
        clock: of the run.
        batch: the micro-batch that begins in this period; ``None`` when draining.
        worker: its number over all data groups.
    """

    def __init__(self, ops: list[StageOp], structs: Batch, clock: Clock, batch: Batch | None, worker: jax.Array):
        self.ops, self.structs, self.clock, self.batch, self.worker = ops, structs, clock, batch, worker

    def forward_changes(self, j: int) -> list[str]:
        """Names of the buffers that a forward changes."""
        out = ["loss", "loss_step"] if self.ops[j].loss else [f"x{j + 1}"]
        return [f"state{j}", f"residuals{j}", *out, *([] if j else ["targets"])]

    def forward(self, memory: Memory, j: int, params: PyTree, t: jax.Array) -> Memory:
        """Run stage j on what the stage before left, in step t since the start."""
        if j == 0 and self.batch is not None:
            memory = {**memory, "targets": self.batch[1]}
        op, step = self.ops[j], self.clock.first_step + t
        x = memory[f"x{j}"] if j else self._inputs()
        key = worker_key(self.clock.key, step, self.worker)
        y, state, residuals = op.forward(
            params, Inputs(x, memory[f"state{j}"], key, memory["targets"] if op.loss else None)
        )
        out = {"loss": y, "loss_step": step} if op.loss else {f"x{j + 1}": y}
        return {**memory, f"state{j}": state, f"residuals{j}": residuals, **out}

    def _inputs(self) -> PyTree:
        """The micro-batch that begins; draining, none does, and anything of its shape serves."""
        if self.batch is not None:
            return self.batch[0]
        return jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), self.structs[0])

    def backward_changes(self, j: int) -> list[str]:
        """Names of the buffers that a backward changes."""
        return [f"cotangent{j}"] if j else []

    def backward(self, memory: Memory, j: int, params: PyTree) -> tuple[PyTree, Memory]:
        """The gradient of stage j, and the cotangent of what entered it."""
        op = self.ops[j]
        cotangent = jnp.ones_like(memory["loss"]) if op.loss else memory[f"cotangent{j + 1}"]
        gradient, cotangent = op.backward(params, memory[f"residuals{j}"], cotangent)
        return gradient, {**memory, **({f"cotangent{j}": cotangent} if j else {})}


def flight_structs(ops: list[StageOp], targets: PyTree) -> Memory:
    """The buffers of one worker, but for ``state{j}``, which outlives a micro-batch; ``ops`` are traced ones."""
    structs: Memory = {"targets": targets, "loss": ops[-1].output_struct}
    structs["loss_step"] = jax.ShapeDtypeStruct((), jnp.int32)
    structs |= {f"residuals{j}": op.residual_structs for j, op in enumerate(ops)}
    for j, op in enumerate(ops[:-1], start=1):
        structs[f"x{j}"], (structs[f"cotangent{j}"], _) = op.output_struct, split(op.output_struct)
    return structs


def filled(struct: Any, num_workers: int, fill: float) -> jax.Array:
    """``[num_workers, …]``, holding ``fill`` where the dtype is a float."""
    shape = (num_workers, *struct.shape)
    if jnp.issubdtype(struct.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), shape)
    return jnp.full(shape, fill if jnp.issubdtype(struct.dtype, jnp.inexact) else 0, struct.dtype)
