"""Layers from every library, with statistics and dropout, and the keys they get."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import cyclic_jax as cj
from cyclic_jax.stages import worker_key


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linears = nnx.List([nnx.Linear(6, 6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs)])
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for linear in self.linears:
            x = linear(x)
        return self.dropout(self.norm(x))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        x = linen.Dense(6)(x)
        x = linen.BatchNorm(use_running_average=not train)(x)
        return linen.Dropout(0.5, deterministic=not train)(x)


X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
MAKERS = {
    "nnx": lambda n: cj.from_nnx([Block] * n),
    "linen": lambda n: cj.from_linen([LinenBlock()] * n),
}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
class TestModules:
    def test_training_moves_statistics_and_evaluation_uses_them(self, maker):
        model = cj.partition(maker(2), 2, example=X, by="layers")
        params, state = model.init(jax.random.key(0))
        y, new = model.apply(params, state, X, key=jax.random.key(1), train=True)
        assert jax.tree.structure(new) == jax.tree.structure(state)
        assert all(bool(jnp.any(a != b)) for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True))
        quiet, unchanged = model.apply(params, state, X, train=False)
        jax.tree.map(np.testing.assert_array_equal, unchanged, state)
        assert not np.allclose(quiet, y)
        assert not np.allclose(quiet, model.apply(params, new, X, train=False)[0])

    def test_dropout_follows_the_key_and_the_layer(self, maker):
        model = cj.partition(maker(2), 2, example=X, by="layers")
        params, state = model.init(jax.random.key(0))
        first, again, other = (model.apply(params, state, X, key=jax.random.key(k))[0] for k in (1, 1, 2))
        np.testing.assert_array_equal(first, again)
        assert not np.allclose(first, other)
        masks = []
        for stage, p, s in zip(model.stages, params, state, strict=True):
            y, _ = stage.apply(p, s, X, key=jax.random.key(1))
            masks.append(np.asarray(y) == 0)
        assert 0.3 < masks[0].mean() < 0.7
        assert (masks[0] != masks[1]).any()

    def test_numbers_do_not_depend_on_the_partition(self, maker):
        outputs = []
        for stages in (1, 2, 3):
            model = cj.partition(maker(3), stages, example=X, by="layers")
            params, state = model.init(jax.random.key(0))
            outputs.append(model.apply(params, state, X, key=jax.random.key(1))[0])
        np.testing.assert_array_equal(outputs[0], outputs[1])
        np.testing.assert_array_equal(outputs[0], outputs[2])

    def test_layers_start_differently(self, maker):
        params, _ = cj.partition(maker(2), 2, example=X, by="layers").init(jax.random.key(0))
        kernels = [next(leaf for leaf in jax.tree.leaves(p) if leaf.ndim == 2) for p in params]
        assert not np.allclose(*kernels)


def test_nnx_equals_calling_the_module():
    module = Block(nnx.Rngs(0))
    (layer,) = cj.from_nnx([module])
    params, state = layer.init(jax.random.key(5), X)
    module.eval()
    np.testing.assert_array_equal(layer.apply(params, state, X, key=None, train=False)[0], module(X))
    assert set(params) == {
        "linears/0/kernel",
        "linears/0/bias",
        "linears/1/kernel",
        "linears/1/bias",
        "norm/scale",
        "norm/bias",
    }
    assert set(state) == {"norm/mean", "norm/var"}


def test_linen_equals_calling_the_module():
    (layer,) = cj.from_linen([LinenBlock()])
    params, state = layer.init(jax.random.key(0), X)
    want = LinenBlock().apply({"params": params, **state}, X, train=False)
    np.testing.assert_array_equal(layer.apply(params, state, X, key=None, train=False)[0], want)


def test_linen_modules_with_their_mode_as_attribute():
    (norm, drop) = cj.from_linen([linen.BatchNorm(), linen.Dropout(0.5)])
    params, state = norm.init(jax.random.key(0), X)
    y, new = norm.apply(params, state, X, key=None, train=True)
    assert abs(float(y.mean())) < 1e-6
    assert not np.allclose(new["batch_stats"]["mean"], state["batch_stats"]["mean"])
    assert (np.asarray(drop.apply({}, {}, X, key=jax.random.key(0), train=True)[0]) == 0).any()
    np.testing.assert_array_equal(drop.apply({}, {}, X, key=None, train=False)[0], X)


def test_dropout_without_a_key_is_refused():
    (layer,) = cj.from_nnx([Block])
    params, state = layer.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="'0:Block' draws random numbers: it needs a key"):
        layer.apply(params, state, X, key=None, train=True)


def test_worker_keys_differ_by_step_and_worker():
    base, pairs = jax.random.key(0), [(t, i) for t in range(3) for i in range(3)]
    keys = [tuple(jax.random.key_data(worker_key(base, t, i)).tolist()) for t, i in pairs]
    assert len(set(keys)) == 9


def test_a_shared_parameter_is_refused():
    shared = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="'1:Linear' is also 'bias' of layer '0:Linear'"):
        cj.from_nnx([shared, shared])
    tied = jnp.ones(6)
    scale = (lambda key, x: {"scale": tied}, lambda params, x: x * params["scale"])
    model = cj.partition(cj.from_functions([scale, scale]), 2, example=X, by="layers")
    with pytest.raises(ValueError, match=r"of stage 1 is the same array as .*'scale'\] of stage 0"):
        model.init(jax.random.key(0))


def test_not_a_layer():
    with pytest.raises(TypeError, match="layer 0 is 3: expected a pair of functions"):
        cj.from_functions([3])
    with pytest.raises(TypeError, match=r"layer 0 is 3: expected an nnx\.Module"):
        cj.from_nnx([3])
    with pytest.raises(TypeError, match=r"layer 1 is 3: expected a flax\.linen\.Module"):
        cj.from_linen([linen.Dense(2), 3])


def test_pytrees_may_cross_boundaries():
    split = (lambda key, x: jnp.ones(()), lambda p, x: {"a": p * x, "count": jnp.arange(3)})
    join = (lambda key, x: jnp.ones(()), lambda p, x: p * x["a"] + x["count"].sum())
    model = cj.partition(cj.from_functions([split, join]), 2, example=X, by="layers")
    params, state = model.init(jax.random.key(0))
    np.testing.assert_allclose(model.apply(params, state, X)[0], X + 3)
