"""Sharded data parallelism with collectives, the baselines: fully sharded (FSDP, ZeRO-3), and optimizer states only (ZeRO-1).

Fully sharded, each stage's parameters lie in flat vectors that all workers share evenly; a stage is gathered before its forward and
again before its backward, and its gradient is reduced and scattered. With ZeRO-1 everybody has the parameters: gradients are
reduced and scattered, every worker updates its part, and the parts are gathered at the end. The optimizer must work entry by entry.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import cyclic_jax as cj
from cyclic_jax.executors.payload import Payload, PayloadFormat
from cyclic_jax.executors.stage_op import Inputs, StageOp, trace_ops
from cyclic_jax.stages import worker_key

WORKERS, EVERYWHERE = PartitionSpec("cyclic"), PartitionSpec()


class Carry(NamedTuple):
    """Shards and statistics have a leading axis over workers; there are either ``params`` (ZeRO-1) or ``shards``."""

    step: Any
    key: Any
    params: Any
    shards: Any
    opt_state: Any
    model_state: Any


class Sharded:
    """What a user would write with ``all_gather`` and ``psum_scatter``; ``fully=False`` is ZeRO-1."""

    def __init__(
        self,
        model: cj.StagedModel,
        loss: Any,
        optimizer: optax.GradientTransformation,
        num_workers: int,
        fully: bool = True,
    ):
        self.model, self.optimizer, self.N, self.fully = model, optimizer, num_workers, fully
        mesh = Mesh(np.asarray(jax.devices()[:num_workers]), ("cyclic",))
        platform, last = mesh.devices.flat[0].platform, model.num_stages - 1
        self.ops = [StageOp(s, loss if s.index == last else None, "save", platform) for s in model.stages]
        structs = jax.eval_shape(model.init, jax.random.key(0))[0]
        self.formats = [PayloadFormat((params,)) for params in structs]
        self.batch_sharding = NamedSharding(mesh, WORKERS)
        specs: Any = Carry(EVERYWHERE, EVERYWHERE, EVERYWHERE, WORKERS, WORKERS, WORKERS)
        self._shardings = Carry(*(NamedSharding(mesh, spec) for spec in specs))
        step = jax.shard_map(
            self._step, mesh=mesh, in_specs=(specs, WORKERS), out_specs=(specs, WORKERS), check_vma=False
        )
        # this pass of XLA's CPU compiler removes the barrier between the two gathers of a stage, and then they become one, kept
        options = {"xla_disable_hlo_passes": "cse_barrier_expander"} if fully and platform == "cpu" else None
        self._jitted = jax.jit(step, donate_argnums=0, compiler_options=options)

    def init(self, state: cj.TrainState) -> Carry:
        """Spread over the devices."""

        def spread(state: cj.TrainState) -> Carry:
            shards = tuple(self._shards(j, params) for j, params in enumerate(state.params))
            opt_state = jax.vmap(self.optimizer.init)(shards)
            params, shards = ((), shards) if self.fully else (jax.tree.map(jnp.copy, state.params), ())
            return Carry(jnp.copy(state.step), state.key, params, shards, opt_state, state.model_state)

        return jax.jit(spread, out_shardings=self._shardings)(state)

    def step(self, carry: Carry, batch: Any) -> tuple[Carry, jax.Array]:
        """One training step."""
        return self._jitted(carry, batch)

    def lower(self, carry: Any, batch: Any) -> jax.stages.Lowered:
        """The step, lowered for arrays or structs."""
        return self._jitted.lower(carry, batch)

    def carry_struct(self, state: cj.TrainState) -> Carry:
        """Structs of what ``init`` makes of such a state."""
        structs = jax.eval_shape(lambda s: jax.vmap(self.optimizer.init)(s), self._shard_structs())
        params, shards = ((), self._shard_structs()) if self.fully else (state.params, ())
        shapes = Carry(state.step, state.key, params, shards, structs, state.model_state)
        put = lambda sharding, part: jax.tree.map(  # noqa: E731
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), part
        )
        return Carry(*(put(sharding, part) for sharding, part in zip(self._shardings, shapes, strict=True)))

    def params(self, carry: Carry) -> tuple[Any, ...]:
        """The parameters, one pytree a stage."""
        if not self.fully:
            return carry.params
        whole = [jax.tree.map(lambda leaf: leaf.reshape(-1), shard) for shard in carry.shards]
        return tuple(f.unpack(0, flat) for f, flat in zip(self.formats, whole, strict=True))

    def _shard_structs(self) -> Any:
        return tuple(
            {name: jax.ShapeDtypeStruct((self.N, -(-size // self.N)), np.dtype(name)) for name, size in f.sizes.items()}
            for f in self.formats
        )

    def _padded(self, j: int, tree: Any) -> Payload:
        flat = self.formats[j].flatten(0, tree)
        return {name: jnp.pad(vector, (0, -len(vector) % self.N)) for name, vector in flat.items()}

    def _shards(self, j: int, tree: Any) -> Payload:
        return {name: vector.reshape(self.N, -1) for name, vector in self._padded(j, tree).items()}

    def _gathered(self, j: int, shard: Payload) -> Any:
        return self.formats[j].unpack(0, jax.lax.all_gather(shard, "cyclic", tiled=True))

    def _step(self, carry: Carry, batch: Any) -> tuple[Carry, jax.Array]:
        trace_ops(self.model, self.ops, *jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch))
        key = worker_key(carry.key, carry.step, jax.lax.axis_index("cyclic"))
        own = lambda tree: jax.tree.map(lambda leaf: leaf[0], tree)  # noqa: E731
        shards, states, x = self._own_shards(carry), list(own(carry.model_state)), batch[0]
        see = (lambda j: self._gathered(j, shards[j])) if self.fully else (lambda j: carry.params[j])
        kept = []
        for j, op in enumerate(self.ops):
            x, states[j], residuals = op.forward(see(j), Inputs(x, states[j], key, batch[1] if op.loss else None))
            kept.append(residuals)
        loss, cotangent = x, jnp.ones_like(x)
        gradients = [Payload()] * len(self.ops)
        for j, op in reversed(list(enumerate(self.ops))):
            # the second gather waits for the cotangent: else the first one's result would be kept instead
            if self.fully:
                shard, cotangent = jax.lax.optimization_barrier((shards[j], cotangent))
            whole = self._gathered(j, shard) if self.fully else see(j)
            gradient, cotangent = op.backward(whole, kept[j], cotangent)
            scatter = partial(jax.lax.psum_scatter, axis_name="cyclic", tiled=True)
            gradients[j] = jax.tree.map(lambda v: scatter(v) / self.N, self._padded(j, gradient))  # noqa: B023
        updates, opt_state = self.optimizer.update(tuple(gradients), own(carry.opt_state), shards)
        shards = optax.apply_updates(shards, updates)
        params = () if self.fully else tuple(self._gathered(j, shard) for j, shard in enumerate(shards))
        leading = lambda tree: jax.tree.map(lambda leaf: leaf[None], tree)  # noqa: E731
        shards = leading(shards) if self.fully else ()
        carry = Carry(carry.step + 1, carry.key, params, shards, leading(opt_state), leading(tuple(states)))
        return carry, loss[None]

    def _own_shards(self, carry: Carry) -> Any:
        if self.fully:
            return jax.tree.map(lambda leaf: leaf[0], carry.shards)
        worker = jax.lax.axis_index("cyclic")
        return tuple(
            jax.tree.map(lambda leaf: leaf[worker], self._shards(j, params)) for j, params in enumerate(carry.params)
        )
