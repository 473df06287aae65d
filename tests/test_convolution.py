"""Convolutions rewritten to one layout: the same numbers, wherever they stand, and none of another layout left."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import cyclic_jax as cj
from cyclic_jax.executors.convolution import _foreign, canonical_convolutions
from cyclic_jax.executors.stage_op import Inputs, StageOp
from tests import problems

pytestmark = pytest.mark.usefixtures("float64")
RNG = np.random.default_rng(0)
X, KERNEL, GROUPED = (RNG.normal(size=s) for s in ((2, 9, 8, 4), (3, 2, 4, 6), (3, 2, 2, 6)))
STRIDED = {"window_strides": (2, 1), "padding": ((1, 1), (0, 1))}
DILATED = {"window_strides": (1, 2), "padding": "SAME", "rhs_dilation": (2, 1)}


def energy(options, groups):
    numbers = ("NHWC", "HWIO", "NHWC")

    def f(x, kernel):
        y = jax.lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, feature_group_count=groups, **options)
        return jnp.sin(y).sum()

    return f


def gradient(f):
    return jax.grad(f, (0, 1))


WRAPPED = {
    "plain": lambda f: gradient(f),
    "jit": lambda f: jax.jit(gradient(f)),
    "checkpoint": lambda f: gradient(jax.checkpoint(jax.jit(f))),
    "scan": lambda f: lambda x, k: jax.lax.scan(lambda c, _: (gradient(f)(*c), None), (x, k), None, length=2)[0],
    "cond": lambda f: lambda x, k: jax.lax.cond(jnp.sum(x) > 1e9, lambda *a: a, gradient(f), x, k),
    "vmap": lambda f: lambda x, k: jax.vmap(gradient(f), (0, None))(jnp.stack([x, 2 * x]), k),
}


@pytest.mark.parametrize("wrapping", WRAPPED)
@pytest.mark.parametrize("options", [STRIDED, DILATED], ids=["strided", "dilated"])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_same_gradients(wrapping, options, groups):
    kernel = KERNEL if groups == 1 else GROUPED
    function = WRAPPED[wrapping](energy(options, groups))
    rewritten = canonical_convolutions(function)
    assert _foreign(jax.make_jaxpr(function)(X, kernel).jaxpr)
    assert not _foreign(jax.make_jaxpr(rewritten)(X, kernel).jaxpr)
    assert problems.distance(rewritten(X, kernel), function(X, kernel)) <= 1e-14


def test_other_layouts_in_the_forward():
    def nchw(x, kernel):
        return jax.lax.conv_general_dilated(x.transpose(0, 3, 1, 2), kernel.transpose(3, 2, 0, 1), (1, 1), "SAME")

    rewritten = canonical_convolutions(nchw)
    assert not _foreign(jax.make_jaxpr(rewritten)(X, KERNEL).jaxpr)
    assert problems.distance(rewritten(X, KERNEL), nchw(X, KERNEL)) <= 1e-14


def test_what_has_no_convolution_is_left_as_it_is():
    def f(x):
        return jnp.tanh(x) @ x.T

    assert str(jax.make_jaxpr(canonical_convolutions(f))(X[0, 0])) == str(jax.make_jaxpr(f)(X[0, 0]))


@pytest.mark.parametrize(("platform", "foreign"), [("cpu", False), ("gpu", True)])
@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_a_users_layers_on_each_platform(platform, foreign, residuals):
    """A Linen convolution as it comes: rewritten for CPUs, left alone elsewhere."""
    layers = cj.from_linen([("conv", linen.Conv(4, (3, 3), strides=2))])
    example = jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)
    model = cj.partition(layers, 1, example=example, by="layers")
    op = StageOp(model.stages[0], lambda y, target: ((y - target) ** 2).mean(), residuals, platform)
    (params,), (state,) = model.init(jax.random.key(0))
    inputs = Inputs(jnp.ones(example.shape, jnp.float32), state, jax.random.key(0), jnp.zeros((2, 4, 4, 4)))
    op.trace(params, inputs)
    _, _, kept = op.forward(params, inputs)
    program = jax.make_jaxpr(op.backward)(params, kept, jnp.ones(()))
    assert _foreign(program.jaxpr) == foreign
