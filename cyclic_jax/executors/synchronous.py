"""The synchronous executor: the rule alone, without its schedule.

All workers run at once, each on its own view of the parameters; the gradients are averaged by one all-reduce, and each
worker applies ``delay_by_stage`` with its own row of the mask. Nothing is saved by it: it is the way to run accuracy
studies, with any rule (``dp`` included) and any optimizer, on any number of devices that divides the number of workers.

With D data groups, worker w = d·N + i holds rows ``[wB, (w+1)B)`` of the batch and uses row i of the mask.
"""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cyclic_jax.delay import DelayByStageState, delay_by_stage
from cyclic_jax.executors.base import Batch, Loss, check_batch, check_rule, check_state, placed
from cyclic_jax.executors.mesh import CYCLIC, DATA, check_mesh, default_mesh
from cyclic_jax.executors.placing import place
from cyclic_jax.optimizer import by_stage
from cyclic_jax.rules import UpdateRule
from cyclic_jax.schedule import Schedule
from cyclic_jax.stages import StagedModel, worker_key
from cyclic_jax.state import Metrics, Snapshot, TrainState, mean_over_workers

PyTree = Any
WORKERS = PartitionSpec((DATA, CYCLIC))
EVERYWHERE = PartitionSpec()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SynchronousCarry:
    """``W`` = D·N workers. What has a worker axis ``[W, …]`` is sharded along it; the rest is on every device.

    Attributes:
        step: int32 scalar.
        key: the run's base key.
        fresh: bool ``[W, S]``: the rule's mask. It is data, so that a rule of the same shape needs no new compilation.
        views: ``[W, …]``: the parameters that each worker holds.
        delay: ``[W, …]``: each worker's ``delay_by_stage`` state.
        model_state: ``[W, …]``.
        previous: theta_{t-1}: a view has it too where some worker is delayed, but no view does under ``dp``.
    """

    step: jax.Array
    key: jax.Array
    fresh: jax.Array
    views: PyTree
    delay: DelayByStageState
    model_state: PyTree
    previous: PyTree


class SynchronousExecutor:
    """See the module's text. Made by :func:`cyclic_jax.make_executor`."""

    def __init__(
        self,
        model: StagedModel,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        *,
        rule: UpdateRule,
        schedule: Schedule | None = None,
        mesh: Mesh | None = None,
    ):
        check_rule(rule, model)
        if schedule is not None:
            rule.check(schedule)
        self.model, self.loss, self.optimizer, self.rule = model, loss, optimizer, rule
        ring = rule.num_workers
        self.mesh = default_mesh(ring) if mesh is None else check_mesh(mesh, ring)
        self.num_workers = ring * self.mesh.shape[DATA]
        self.fresh = np.tile(rule.fresh, (self.mesh.shape[DATA], 1))  # [W, S]
        self.batch_sharding = NamedSharding(self.mesh, WORKERS)
        self._compile()

    def _compile(self) -> None:
        everywhere = NamedSharding(self.mesh, EVERYWHERE)
        # check_vma is off knowingly: no parameter is replicated, so no gradient can hide an all-reduce; the tests
        # assert that the compiled step holds just the one written below.
        step = jax.shard_map(
            self._device_step,
            mesh=self.mesh,
            in_specs=(self._carry_specs(), WORKERS),
            out_specs=(self._carry_specs(), WORKERS),
            check_vma=False,
        )
        self._jit_step = jax.jit(step, donate_argnums=0)
        self._jit_spread = jax.jit(self._spread, out_shardings=self._carry_shardings())
        self._jit_gather = jax.jit(self._gather, out_shardings=everywhere)
        self._jit_snapshot = jax.jit(self._snapshot, out_shardings=everywhere)

    def with_rule(self, rule: UpdateRule) -> "SynchronousExecutor":
        """The same executor for another rule of the same shape, sharing what is compiled."""
        if rule.fresh.shape != self.rule.fresh.shape:
            raise ValueError(f"rule {rule.name!r} has shape {rule.fresh.shape}, the executor's {self.rule.fresh.shape}")
        other = copy.copy(self)
        other.rule, other.fresh = rule, np.tile(rule.fresh, (self.mesh.shape[DATA], 1))
        return other

    # ---- the face -------------------------------------------------------------------------------------------

    def init(self, state: TrainState) -> SynchronousCarry:
        """A canonical state, spread over the devices. ``state`` stays usable."""
        check_state(state, self.model, self.num_workers)
        return self._jit_spread(placed(state, self.mesh), self.fresh)

    def step(self, carry: SynchronousCarry, batch: Batch) -> tuple[SynchronousCarry, Metrics]:
        """One training step of every worker; ``carry`` is donated."""
        return self._jit_step(carry, place(batch, self.batch_sharding, self.num_workers))

    def drain(self, carry: SynchronousCarry) -> tuple[TrainState, Metrics]:
        """The canonical state. Nothing is ever in flight here, so no metrics are left (step −1)."""
        state = self._jit_gather(carry)
        nothing = jnp.zeros(self.num_workers), jnp.full(self.num_workers, -1, jnp.int32)
        return state, Metrics(*nothing)

    def snapshot(self, carry: SynchronousCarry) -> Snapshot:
        """Parameters of the newest complete step and the mean statistics; ``carry`` stays usable."""
        return self._jit_snapshot(carry)

    def lower(self, carry: Any, batch: Batch) -> jax.stages.Lowered:
        """The step, lowered for arrays or structs."""
        check_batch(batch, self.num_workers)
        return self._jit_step.lower(carry, batch)

    def carry_struct(self, state: TrainState, batch: Batch | None = None) -> Any:
        """Shapes, dtypes and shardings of the carry; nothing is ever in flight, so a batch makes no difference."""
        structs = jax.eval_shape(self._spread, state, self.fresh)
        # the shardings are a prefix of the carry: one entry serves a whole subtree
        return jax.tree.map(
            lambda sharding, part: jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), part
            ),
            self._carry_shardings(),
            structs,
        )

    # ---- canonical state <-> carry --------------------------------------------------------------------------

    def _carry_specs(self) -> Any:
        everywhere: Any = EVERYWHERE
        workers: Any = WORKERS
        return SynchronousCarry(
            step=everywhere,
            key=everywhere,
            fresh=workers,
            views=workers,
            delay=workers,
            model_state=workers,
            previous=everywhere,
        )

    def _carry_shardings(self) -> Any:
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec),
            self._carry_specs(),
            is_leaf=lambda node: isinstance(node, PartitionSpec),
        )

    def _spread(self, state: TrainState, fresh: jax.Array) -> SynchronousCarry:
        """Restart: a delayed worker holds theta_{t-1} and is owed the difference.

        The difference is exact where the two versions are within a factor of two of each other, else rounded once.
        """

        def owed(now: jax.Array, before: jax.Array, fresh: jax.Array) -> jax.Array:
            return jnp.where(fresh, jnp.zeros_like(now), now - before)

        def one_worker(row: jax.Array) -> tuple[PyTree, PyTree]:
            stages = list(zip(row, state.params, state.previous_params, strict=True))
            views = tuple(jax.tree.map(partial(jnp.where, fresh), now, before) for fresh, now, before in stages)
            pending = tuple(jax.tree.map(partial(owed, fresh=fresh), now, before) for fresh, now, before in stages)
            return views, pending

        views, pending = jax.vmap(one_worker)(fresh)
        inner = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], self.num_workers, axis=0), state.opt_state)
        delay = DelayByStageState(inner, pending)
        return SynchronousCarry(state.step, state.key, fresh, views, delay, state.model_state, state.previous_params)

    def _gather(self, carry: SynchronousCarry) -> TrainState:
        view, delay = jax.tree.map(lambda leaf: leaf[0], (carry.views, carry.delay))
        params = optax.apply_updates(view, delay.pending)
        return TrainState(carry.step, carry.key, params, carry.previous, delay.inner_state, carry.model_state)

    def _snapshot(self, carry: SynchronousCarry) -> Snapshot:
        state = self._gather(carry)
        return Snapshot(state.step, state.params, mean_over_workers(state.model_state))

    # ---- the step -------------------------------------------------------------------------------------------

    def _device_step(self, carry: SynchronousCarry, batch: Batch) -> tuple[SynchronousCarry, Metrics]:
        """The part of one device, which holds L = N / devices workers of the ring."""
        local = self.rule.num_workers // self.mesh.shape[CYCLIC]
        device = jax.lax.axis_index(DATA) * self.mesh.shape[CYCLIC] + jax.lax.axis_index(CYCLIC)
        workers = device * local + jnp.arange(local)
        batch = jax.tree.map(lambda leaf: leaf.reshape(local, -1, *leaf.shape[1:]), batch)

        gradients, losses, model_state = self._local_gradients(carry, batch, workers)
        with jax.named_scope("send/gradient"):
            mean = jax.tree.map(lambda g: jax.lax.psum(g, (DATA, CYCLIC)) / self.num_workers, gradients)

        theta = self._gather(carry).params
        optimizer = delay_by_stage(by_stage(self.optimizer, theta))

        def update(view: PyTree, delay: DelayByStageState, fresh: jax.Array) -> tuple[PyTree, DelayByStageState]:
            updates, delay = optimizer.update(mean, delay, view, fresh=fresh)
            return optax.apply_updates(view, updates), delay

        with jax.named_scope("update"):
            views, delay = jax.vmap(update)(carry.views, carry.delay, carry.fresh)
        metrics = Metrics(losses, jnp.full((local,), carry.step, jnp.int32))
        return SynchronousCarry(carry.step + 1, carry.key, carry.fresh, views, delay, model_state, theta), metrics

    def _local_gradients(
        self, carry: SynchronousCarry, batch: Batch, workers: jax.Array
    ) -> tuple[PyTree, jax.Array, PyTree]:
        """Gradients summed over this device's workers, one after the other; their losses and new statistics."""
        one = partial(self._worker_gradient, carry.key, carry.step)
        xs = (carry.views, carry.model_state, batch, workers)
        if workers.shape[0] == 1:
            gradient, loss, state = one(*jax.tree.map(lambda leaf: leaf[0], xs))
            return gradient, loss[None], jax.tree.map(lambda leaf: leaf[None], state)

        def body(total: PyTree, x: Any) -> tuple[PyTree, Any]:
            gradient, loss, state = one(*x)
            return jax.tree.map(jnp.add, total, gradient), (loss, state)

        zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), carry.views)
        total, (losses, model_state) = jax.lax.scan(body, zeros, xs)
        return total, losses, model_state

    def _worker_gradient(
        self, key: jax.Array, step: jax.Array, view: PyTree, state: PyTree, batch: Batch, worker: jax.Array
    ) -> tuple[PyTree, jax.Array, PyTree]:
        inputs, targets = batch
        micro_batch_key = worker_key(key, step, worker)

        def f(params: PyTree) -> tuple[jax.Array, PyTree]:
            outputs, new_state = self.model.apply(params, state, inputs, key=micro_batch_key, train=True)
            return self.loss(outputs, targets), new_state

        (loss, new_state), gradient = jax.value_and_grad(f, has_aux=True)(view)
        return gradient, loss, new_state
