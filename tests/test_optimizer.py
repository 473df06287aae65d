"""Which optimizers mix stages, and the one state per stage of those that do not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cyclic_jax.coupling import mixed_stages
from cyclic_jax.optimizer import WholeModelState, by_stage, check_separate

pytestmark = pytest.mark.usefixtures("float64")
PARAMS = ({"w": np.ones((2, 3))}, {"w": np.ones(4)}, {"w": np.ones(5)})
SCHEDULE = optax.piecewise_constant_schedule(0.1, {3: 0.1})


def norm_kept_in_the_state() -> optax.GradientTransformation:
    """Scales each step by the norm of the step before: stages meet in the state only, one step later."""

    def update(grads, state, params=None):
        del params
        return jax.tree.map(lambda g: g / state, grads), optax.tree.norm(grads)

    return optax.GradientTransformation(lambda params: jnp.ones(()), update)


SEPARATE = {
    "sgd": optax.sgd(SCHEDULE, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(SCHEDULE),
    "muon": optax.contrib.muon(0.1),
    "lamb": optax.lamb(0.1),
    "inject": optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
    "block clip": optax.chain(optax.clip(1.0), optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "multi_steps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
}
MIXING = {
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "inside": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), 2
    ).gradient_transformation(),
    "finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "state only": norm_kept_in_the_state(),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_separate_optimizers(name):
    assert mixed_stages(SEPARATE[name], PARAMS) is None


@pytest.mark.parametrize("name", MIXING)
def test_mixing_optimizers_name_two_stages(name):
    j, k = mixed_stages(MIXING[name], PARAMS)
    assert j != k
    assert {j, k} <= {0, 1, 2}


@pytest.mark.parametrize("name", [*SEPARATE, *MIXING])
def test_by_stage_gives_the_same_updates(name):
    optimizer = {**SEPARATE, **MIXING}[name]
    split = by_stage(optimizer, PARAMS)
    whole_state, state = optimizer.init(PARAMS), split.init(PARAMS)
    assert isinstance(state, WholeModelState) == (name in MIXING)
    assert isinstance(state, WholeModelState) or len(state) == len(PARAMS)
    for t in range(4):
        rng = np.random.default_rng(t)
        grads = jax.tree.map(lambda p, rng=rng: jnp.asarray(rng.normal(size=p.shape), p.dtype), PARAMS)
        want, whole_state = optimizer.update(grads, whole_state, PARAMS)
        got, state = split.update(grads, state, PARAMS)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)


def test_random_numbers_keep_one_state():
    """Split by stage, both stages would get the same noise."""
    noise = optax.add_noise(0.1, 0.5, jax.random.key(0))
    assert isinstance(by_stage(noise, PARAMS).init(PARAMS), WholeModelState)
    with pytest.raises(ValueError, match="draws random numbers"):
        check_separate(noise, PARAMS)
    check_separate(optax.adam(0.1), PARAMS)


def test_a_mask_for_the_whole_tree_keeps_one_state():
    masked = optax.masked(optax.add_decayed_weights(0.1), ({"w": True}, {"w": False}, {"w": True}))
    assert isinstance(by_stage(masked, PARAMS).init(PARAMS), WholeModelState)
