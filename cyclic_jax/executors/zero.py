"""The ZeRO executor: N devices share one copy of the model's states, which travel point to point; no collective at all.

Worker e(j) = N−1−j (for S = N) owns stage j: its master parameters and optimizer state are nowhere else. The parameters ride around
the ring in two streams, one along the forwards and one along the backwards; the gradient's sum rides with the backwards and ends at
the owner, who updates (derived; ``docs/method.md``). A worker holds 1/N of the states, padded to the largest stage, and two stages
in flight, where FSDP gathers each stage from all workers and scatters its gradient to all of them.

With D data groups the states are sharded inside each group (as in MiCS, arXiv 2205.00119), and a finished sum is averaged over the
groups before it is handed on.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from cyclic_jax.executors.base import Batch, Loss, check_rule
from cyclic_jax.executors.clock import Clock
from cyclic_jax.executors.guard import Memory, in_turn
from cyclic_jax.executors.mesh import CYCLIC, DATA, ring_mesh
from cyclic_jax.executors.payload import Payload, PayloadFormat
from cyclic_jax.executors.ring import Ring
from cyclic_jax.executors.shares import make_shares
from cyclic_jax.executors.staggered import Staggered, StaggeredCarry
from cyclic_jax.executors.streams import Streams
from cyclic_jax.executors.worker_ops import filled, flight_structs
from cyclic_jax.executors.zero_period import Period, Plan
from cyclic_jax.rules import UpdateRule
from cyclic_jax.schedule import Schedule
from cyclic_jax.stages import StagedModel
from cyclic_jax.state import Metrics, Snapshot, TrainState, mean_over_workers

PyTree = Any
WORKERS = PartitionSpec((DATA, CYCLIC))


class ZeroExecutor(Staggered):
    """See the module's text. Made by :func:`cyclic_jax.make_executor`; options as :class:`Staggered`.

    ``stream_dtype`` is what floating-point parameters are rounded to while they travel (``jnp.bfloat16`` halves their bytes; the
    idea is ZeRO++'s, arXiv 2306.10209); owners keep them, and sum gradients, as they are. ``None`` rounds nothing.
    """

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
        stream_dtype: DTypeLike | None = None,
    ):
        check_rule(rule, model)
        self.mesh = ring_mesh(mesh, rule.num_workers)
        schedule = schedule or Schedule.cyclic(rule.num_workers, rule.num_stages)
        super().__init__(model, loss, optimizer, rule=rule, schedule=schedule, residuals=residuals, fill=fill)
        self.streams = Streams.of(Ring(schedule), rule)
        self.groups = self.mesh.shape[DATA]
        self.num_workers = rule.num_workers * self.groups
        self.batch_sharding = self._batch_layout = NamedSharding(self.mesh, WORKERS)
        params = self.structs[0]
        self.summed = PayloadFormat(params)
        self.carried = PayloadFormat(jax.tree.map(partial(_travelling, stream_dtype), params))
        stages, ranks = range(model.num_stages), self.streams.ranks
        self.shares = tuple(
            make_shares(self.optimizer.init, self._update, params, [j for j in stages if ranks[j] == rank])
            for rank in range(max(ranks) + 1)
        )
        self._compile(WORKERS)

    # ---- canonical state <-> carry --------------------------------------------------------------------------

    def _spread(self, state: TrainState) -> StaggeredCarry:
        """Owners hold theta_T; the boxes hold theta_{T−1}, each of the stage that will need it."""
        held: Memory = {f"state{j}": leaf for j, leaf in enumerate(state.model_state)}
        for rank in range(len(self.shares)):
            held[f"master{rank}"], held[f"optimizer{rank}"] = self._on_workers(partial(self._share, state, rank))
        for beat in range(len(self.streams.ring.beats)):
            held[f"stream{beat}"] = self._on_workers(partial(self._boxed, state, beat))
        return StaggeredCarry(state.step, jnp.zeros((), jnp.int32), state.key, held, None)

    def _on_workers(self, one: Callable[[int], PyTree]) -> PyTree:
        """``one(worker)`` for every device, ``[D·N, …]``."""
        ring = jax.tree.map(lambda *parts: jnp.stack(parts), *map(one, range(self.rule.num_workers)))
        return jax.tree.map(lambda leaf: jnp.tile(leaf, (self.groups, *[1] * (leaf.ndim - 1))), ring)

    def _share(self, state: TrainState, rank: int, worker: int) -> tuple[PyTree, PyTree]:
        """What a worker owns in a rank: parameters, and the optimizer's state of them."""
        j = self.streams.owned(worker, rank)
        return self.shares[rank].empty() if j is None else self.shares[rank].put(j, state.params[j], state.opt_state[j])

    def _boxed(self, state: TrainState, beat: int, worker: int) -> Payload:
        j, empty = self.streams.start(beat, worker), self.carried.full(0.0)
        return empty if j is None else self.carried.put(j, state.previous_params[j], empty)

    def _gather(self, carry: StaggeredCarry) -> TrainState:
        """The state that ``init`` was given."""
        return self._state(carry, carry.held, self._previous(carry.held))

    def _previous(self, held: Memory) -> tuple[PyTree, ...]:
        """theta_{T−1}, from the boxes of a run that has not started."""
        found: dict[int, PyTree] = {}
        for beat in range(len(self.streams.ring.beats)):
            for i in range(self.rule.num_workers):
                j = self.streams.start(beat, i)
                if j is not None and j not in found:
                    box = jax.tree.map(lambda leaf, i=i: leaf[i], held[f"stream{beat}"])
                    found[j] = _as(self.carried.unpack(j, box), self.structs[0][j])
        return tuple(found[j] for j in range(len(self.ops)))

    def _drained(self, carry: StaggeredCarry, memory: Memory) -> tuple[TrainState, Metrics]:
        return self._state(carry, memory, self._owned(memory, "previous")), self._metrics(self._losses(memory))

    def _owned(self, memory: Memory, name: str) -> tuple[PyTree, ...]:
        """Each stage's part of a buffer, from its owner in the first group."""
        stages = []
        for j, (owner, rank) in enumerate(zip(self.streams.owners, self.streams.ranks, strict=True)):
            buffers = jax.tree.map(lambda leaf, i=owner: leaf[i], memory[f"{name}{rank}"])
            read = self.shares[rank].state if name == "optimizer" else self.shares[rank].params
            stages.append(read(j, buffers))
        return tuple(stages)

    def _state(self, carry: StaggeredCarry, memory: Memory, previous: tuple[PyTree, ...]) -> TrainState:
        params, opt_state = self._owned(memory, "master"), self._owned(memory, "optimizer")
        step = carry.first_step + carry.calls
        return TrainState(step, carry.key, params, previous, opt_state, self._statistics(memory))

    def _statistics(self, memory: Memory) -> tuple[PyTree, ...]:
        return tuple(memory[f"state{j}"] for j in range(len(self.ops)))

    def _snapshot(self, carry: StaggeredCarry) -> Snapshot:
        step = carry.first_step + jnp.maximum(carry.calls - 1, 0)
        params = self._owned(carry.held, "master")
        return Snapshot(step, params, mean_over_workers(self._statistics(carry.held)))

    def _metrics(self, losses: Memory) -> Metrics:
        return Metrics(losses["loss"], losses["loss_step"])

    # ---- the step -------------------------------------------------------------------------------------------

    def _flight(self) -> Memory:
        ring, payload = self.streams.ring, jax.eval_shape(partial(self.summed.full, 0.0))
        structs = flight_structs(self.ops, self._traced[1])
        structs |= {f"sum{beat}": payload for beat in range(len(ring.beats))}
        structs |= {f"handed{box}": payload for box in range(max(ring.boxes) + 1)}
        return jax.tree.map(lambda struct: filled(struct, self.num_workers, self.fill), structs)

    def _run(self, carry: StaggeredCarry, batch: Batch | None) -> Memory:
        """One period on one device: N blocks. Without a batch it drains."""
        memory: Memory = jax.tree.map(lambda leaf: leaf[0], {**carry.held, **(carry.flight or {})})
        memory = in_turn(memory)
        memory["loss_step"] = jnp.full((), -1, jnp.int32)
        if batch is None:
            memory |= {f"previous{rank}": memory[f"master{rank}"] for rank in range(len(self.shares))}
        period = Period(self._plan(), Clock(carry.calls, carry.first_step, carry.key), batch)
        N = self.rule.num_workers
        blocks = carry.calls * N + jnp.arange(N, dtype=jnp.int32)
        # a permutation cannot be done in place; two of them in a row need no copy
        memory, _ = jax.lax.scan(
            lambda memory, b: (period.block(memory, b), None), memory, blocks, unroll=1 + (N % 2 == 0)
        )
        return jax.tree.map(lambda leaf: leaf[None], memory)

    def _plan(self) -> Plan:
        return Plan(
            streams=self.streams,
            ops=self.ops,
            params=self.structs[0],
            carried=self.carried,
            summed=self.summed,
            shares=self.shares,
            groups=self.groups,
            structs=self._traced,
        )


def _travelling(dtype: DTypeLike | None, struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    floating = jnp.issubdtype(struct.dtype, jnp.floating)
    return struct if dtype is None or not floating else jax.ShapeDtypeStruct(struct.shape, jnp.dtype(dtype))


def _as(tree: PyTree, structs: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf, struct: leaf.astype(struct.dtype), tree, structs)
