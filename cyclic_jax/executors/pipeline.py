"""The pipeline executor: N devices, one stage each; micro-batches rotate through them and never flush.

Device j owns stage j: its parameters in two versions at most, its optimizer state, and the residuals of the N − j micro-batches
that wait there for their backward. Activations and cotangents go to the neighbours, one partial permutation a tick; a stage is
updated where it lives, as soon as the step's last micro-batch has passed, so gradients do not travel at all. With D data groups
the finished sum of a stage is averaged over its D copies.

By default the table is the period-3 one, for a backward that takes two forwards; one op a tick runs as well.
"""

from collections.abc import Callable

import jax
import optax
from jax.sharding import Mesh

from cyclic_jax.executors.base import Loss
from cyclic_jax.executors.guard import Memory
from cyclic_jax.executors.mesh import CYCLIC, ring_mesh
from cyclic_jax.executors.one_stage import OneStage
from cyclic_jax.executors.stage_work import StageWork
from cyclic_jax.rules import UpdateRule
from cyclic_jax.schedule import Schedule
from cyclic_jax.stages import StagedModel


class PipelineExecutor(OneStage):
    """See the module's text. Made by :func:`cyclic_jax.make_executor`; options as :class:`Staggered`."""

    def __init__(
        self,
        model: StagedModel,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        *,
        rule: UpdateRule,
        schedule: Schedule | None = None,
        mesh: Mesh | None = None,
        residuals: str | Callable[..., bool] = "save",
        fill: float = 0.0,
    ):
        super().__init__(
            model,
            loss,
            optimizer,
            rule=rule,
            schedule=schedule,
            mesh=ring_mesh(mesh, rule.num_workers),
            replicas=(1,) * rule.num_stages,
            residuals=residuals,
            fill=fill,
        )
        self.batch_sharding = self._batch_layout

    def _block(self, work: StageWork, memory: Memory, b: jax.Array, begun: jax.Array) -> Memory:
        """In each phase this device's op, then what leaves; last, the inputs move one device down, towards the first stage."""
        for phase, pairs in enumerate(self.lanes.pairs):
            memory = self._phase(work, memory, phase, b, begun)
            if pairs:
                with jax.named_scope("send/messages"):
                    memory = {**memory, "mail": jax.lax.ppermute(memory["out"], CYCLIC, pairs)}
        down = [(k + 1, k) for k in range(self.rule.num_workers - 1)]
        with jax.named_scope("send/inputs"):
            return {**memory, "inputs": jax.lax.ppermute(memory["inputs"], CYCLIC, down)} if down else memory
