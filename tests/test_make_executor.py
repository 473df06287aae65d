"""An executor by its name, and the options that some of them have."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cyclic_jax as cj
from tests import problems


def make(name: str, **options) -> cj.Executor:
    layers = cj.models.residual_mlp(problems.CLASSES, in_features=problems.INPUT, width=8, depth=2)
    model = cj.partition(layers, 2, example=jax.ShapeDtypeStruct((2, problems.INPUT), jnp.float32), by="layers")
    return cj.make_executor(name, model, problems.loss, optax.sgd(0.1), rule=cj.UpdateRule.cdp_v2(2), **options)


def argument_bytes(executor: cj.Executor) -> int:
    state = cj.TrainState.create(executor.model, optax.sgd(0.1), jax.random.key(0), num_workers=2)
    rows = 2 * 64
    batch = jnp.zeros((rows, problems.INPUT)), np.zeros(rows, int)
    return executor.lower(executor.carry_struct(state, batch), batch).compile().memory_analysis().argument_size_in_bytes


def test_options_reach_the_executor():
    zero = make("zero", stream_dtype=jnp.bfloat16)
    assert zero.carried.num_bytes * 2 == zero.summed.num_bytes
    assert argument_bytes(make("pipeline", residuals="recompute")) < argument_bytes(make("pipeline"))


def test_other_options_are_refused():
    with pytest.raises(TypeError, match="the synchronous executor has no option 'residuals': it takes none"):
        make("synchronous", residuals="recompute")
    with pytest.raises(TypeError, match="the pipeline executor has no option 'stream_dtype': it takes fill, residuals"):
        make("pipeline", stream_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="unknown executor 'pipe': did you mean 'pipeline'"):
        make("pipe")
