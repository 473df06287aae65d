"""Entry by entry or not: by data flow, and the packed state is the same state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cyclic_jax.entrywise import Entrywise, flatten

PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3), "half": jnp.ones(2, jnp.bfloat16)}


def found(optimizer, params=PARAMS):
    optimizer = optax.with_extra_args_support(optimizer)

    def update(gradient, state, params):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return update, Entrywise.of(optimizer.init, update, jax.eval_shape(lambda: params))


YES = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-2, 10), weight_decay=0.1),
    "low": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "clip": optax.chain(optax.clip(0.5), optax.lion(1e-2)),
    "inject": optax.inject_hyperparams(optax.rmsprop)(1e-2),
}
NO = {
    "trust": optax.lamb(1e-2),
    "global": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "block": optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)),
    "mask": optax.adamw(1e-2, weight_decay=0.1, mask={"w": True, "b": False, "half": True}),
    "matrices": optax.adamw(1e-2, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "factored": optax.adafactor(1e-2),
    "labels": optax.partition({"a": optax.sgd(0.1), "b": optax.sgd(0.2)}, {"w": "a", "b": "b", "half": "b"}),
}


@pytest.mark.parametrize("name", YES)
def test_the_packed_update_is_the_update(name):
    update, entrywise = found(YES[name])
    assert entrywise is not None
    state, flat = YES[name].init(PARAMS), flatten(PARAMS)
    params, packed = PARAMS, entrywise.pack(state)
    for step in range(3):
        gradient = jax.tree.map(lambda p, k=step: jnp.sin(7.0 * p.astype(jnp.float32) + k).astype(p.dtype), params)
        params, state = update(gradient, state, params)
        flat, packed = update(flatten(gradient), packed, flat)
    for a, b in ((flatten(params), flat), (state, entrywise.unpack(packed))):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-6)


@pytest.mark.parametrize("name", NO)
def test_not_entry_by_entry(name):
    assert found(NO[name])[1] is None


def test_a_constant_of_one_leafs_shape_is_not_entry_by_entry():
    scale = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3), "half": jnp.ones(2, jnp.bfloat16)}
    by_entry = optax.stateless(lambda updates, params: jax.tree.map(jnp.multiply, updates, scale))
    assert found(by_entry)[1] is None
    cumulative = optax.stateless(lambda updates, params: jax.tree.map(lambda g: jnp.cumsum(g, 0), updates))
    assert found(cumulative)[1] is None
