"""A machine, and a model's work: what planning reads, all of it from shapes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import ceil, log2
from typing import Any

import jax
import optax

from cyclic_jax.costs import LayerCost, layer_costs
from cyclic_jax.executors.interleaved_memory import tree_bytes
from cyclic_jax.executors.stage_op import StageOp
from cyclic_jax.memory import traced_ops
from cyclic_jax.partition import partition
from cyclic_jax.planning.working import working_bytes
from cyclic_jax.stages import Layer, StagedModel

PyTree = Any


@dataclass(frozen=True)
class Machine:
    """Devices that are all alike, each with a link of its own to the others.

    Attributes:
        devices: how many.
        memory: bytes of each.
        flops: floating-point operations per second that a device reaches on this model.
        bandwidth: bytes per second that a device sends.
        latency: seconds until the first byte of a message arrives.

    Raises:
        ValueError: for a number that is not positive; latency may be 0.
    """

    devices: int
    memory: float
    flops: float
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (0 < value < float("inf") or (field.name == "latency" and value == 0)):
                raise ValueError(f"{field.name}={value}: it must be positive and finite")

    def send(self, num_bytes: float) -> float:
        """Seconds of one message."""
        return self.latency + num_bytes / self.bandwidth

    def all_gather(self, members: int, num_bytes: float) -> float:
        """Seconds until all have all parts, of ``num_bytes`` together; a reduce-scatter takes as long.

        log2(members) rounds, each of the next power of two of the parts (recursive doubling).
        """
        share = (members - 1) / members * num_bytes
        return ceil(log2(members)) * self.latency + share / self.bandwidth

    def all_reduce(self, members: int, num_bytes: float) -> float:
        """Seconds of a reduce-scatter and an all-gather."""
        return 2 * self.all_gather(members, num_bytes)


@dataclass(frozen=True)
class Work:
    """A model cut in S stages, with loss and optimizer, for micro-batches of B rows. Made by :meth:`of`."""

    model: StagedModel
    optimizer: optax.GradientTransformation
    batch: PyTree
    ops: list[StageOp]
    costs: tuple[LayerCost, ...]

    @classmethod
    def of(
        cls,
        layers: Sequence[Layer],
        num_stages: int,
        loss: Callable[[PyTree, PyTree], jax.Array],
        optimizer: optax.GradientTransformation,
        batch: PyTree,
        *,
        by: str = "flops",
        costs: tuple[LayerCost, ...] | None = None,
    ) -> "Work":
        """Partition and trace.

        Args:
            layers: the model.
            num_stages: S.
            loss: of the last stage.
            optimizer: one that treats stages separately.
            batch: structs of one micro-batch, ``(inputs, targets)``.
            by: as in :func:`cyclic_jax.partition`.
            costs: of the layers, if they are known already.
        """
        model = partition(layers, num_stages, example=batch[0], by=by)
        costs = costs or layer_costs(model.layers, model.structs)
        return cls(model, optimizer, batch, traced_ops(model, loss, batch[1]), costs)

    @property
    def num_stages(self) -> int:
        """S."""
        return self.model.num_stages

    @cached_property
    def structs(self) -> tuple[tuple[PyTree, ...], tuple[PyTree, ...]]:
        """Parameters and statistics, by stage."""
        return jax.eval_shape(self.model.init, jax.random.key(0))

    @cached_property
    def opt_states(self) -> tuple[PyTree, ...]:
        """Of each stage."""
        return tuple(jax.eval_shape(self.optimizer.init, params) for params in self.structs[0])

    @cached_property
    def params_bytes(self) -> tuple[int, ...]:
        """Of each stage."""
        return tuple(map(tree_bytes, self.structs[0]))

    @cached_property
    def residual_bytes(self) -> tuple[int, ...]:
        """Of each stage, for one micro-batch."""
        return tuple(op.residual_bytes for op in self.ops)

    @cached_property
    def working(self) -> int:
        """Bytes that a backward needs while it runs, its gradient among them: the largest stage's."""
        found = []
        for op, params in zip(self.ops, self.structs[0], strict=True):
            cotangent = jax.eval_shape(lambda y: jax.tree.map(_float_part, y), op.output_struct)
            found.append(working_bytes(op.backward, params, op.residual_structs, cotangent))
        return max(found)

    def forward_seconds(self, machine: Machine) -> list[float]:
        """``[S]``: of one micro-batch. A backward takes twice as long."""
        flops = [sum(cost.flops for cost in self.costs[a:b]) for a, b in self.model.boundaries]
        return [max(1.0, one) / machine.flops for one in flops]


def _float_part(leaf: jax.Array) -> jax.Array | None:
    return leaf if jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact) else None
