"""Plain data parallelism, the baseline: one replicated copy of everything, gradients averaged at the end of the step."""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import cyclic_jax as cj
from cyclic_jax.stages import worker_key

WORKERS, EVERYWHERE = PartitionSpec("cyclic"), PartitionSpec()


class Carry(NamedTuple):
    """Replicated, but for the statistics ``[N, …]``."""

    step: jax.Array
    key: jax.Array
    params: Any
    opt_state: Any
    model_state: Any


class DataParallel:
    """What a user would write without this package."""

    def __init__(self, model: cj.StagedModel, loss: Any, optimizer: optax.GradientTransformation, num_workers: int):
        self.model, self.loss, self.optimizer = model, loss, optimizer
        mesh = Mesh(np.asarray(jax.devices()[:num_workers]), ("cyclic",))
        self.batch_sharding = NamedSharding(mesh, WORKERS)
        specs: Any = Carry(EVERYWHERE, EVERYWHERE, EVERYWHERE, EVERYWHERE, WORKERS)
        self._shardings = Carry(*(NamedSharding(mesh, spec) for spec in specs))
        step = jax.shard_map(
            self._step, mesh=mesh, in_specs=(specs, WORKERS), out_specs=(specs, WORKERS), check_vma=False
        )
        self._jitted = jax.jit(step, donate_argnums=0)

    def init(self, state: cj.TrainState) -> Carry:
        """Spread over the devices."""
        carry = Carry(state.step, state.key, state.params, self.optimizer.init(state.params), state.model_state)
        return jax.jit(lambda c: jax.tree.map(jax.numpy.copy, c), out_shardings=self._shardings)(carry)

    def step(self, carry: Carry, batch: Any) -> tuple[Carry, jax.Array]:
        """One training step."""
        return self._jitted(carry, batch)

    def lower(self, carry: Carry, batch: Any) -> jax.stages.Lowered:
        """The step, lowered."""
        return self._jitted.lower(carry, jax.device_put(batch, self.batch_sharding))

    def carry_struct(self, state: cj.TrainState) -> Carry:
        """Structs of what ``init`` makes of such a state."""
        opt_state = jax.eval_shape(self.optimizer.init, state.params)
        carry = Carry(state.step, state.key, state.params, opt_state, state.model_state)
        put = lambda sharding, part: jax.tree.map(  # noqa: E731
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), part
        )
        return Carry(*(put(sharding, part) for sharding, part in zip(self._shardings, carry, strict=True)))

    def _step(self, carry: Carry, batch: Any) -> tuple[Carry, jax.Array]:
        key = worker_key(carry.key, carry.step, jax.lax.axis_index("cyclic"))
        statistics = jax.tree.map(lambda leaf: leaf[0], carry.model_state)

        def f(params: Any) -> Any:
            outputs, new = self.model.apply(params, statistics, batch[0], key=key)
            return self.loss(outputs, batch[1]), new

        (loss, statistics), gradient = jax.value_and_grad(f, has_aux=True)(carry.params)
        gradient = jax.lax.pmean(gradient, "cyclic")
        updates, opt_state = self.optimizer.update(gradient, carry.opt_state, carry.params)
        statistics = jax.tree.map(lambda leaf: leaf[None], statistics)
        params = optax.apply_updates(carry.params, updates)
        return Carry(carry.step + 1, carry.key, params, opt_state, statistics), loss[None]
