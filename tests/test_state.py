"""The canonical state: made, refused, saved and read back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cyclic_jax as cj
from cyclic_jax.state import snapshot_of
from tests import problems

pytestmark = pytest.mark.usefixtures("float64")


def test_a_fresh_start_has_one_version_in_two_copies():
    state = problems.fresh_start(problems.model(2), "adamw", 3)
    assert int(state.step) == 0
    assert problems.distance(state.params, state.previous_params) == 0
    for now, before in zip(jax.tree.leaves(state.params), jax.tree.leaves(state.previous_params), strict=True):
        assert now is not before
    assert {leaf.shape[0] for leaf in jax.tree.leaves(state.model_state)} == {3}
    assert len(state.opt_state) == 2


def test_workers_default_to_stages_and_the_example_is_checked():
    model, key = problems.model(2), jax.random.key(0)
    state = cj.TrainState.create(model, optax.sgd(0.1), key, np.zeros((5, 3)))
    assert {leaf.shape[0] for leaf in jax.tree.leaves(state.model_state)} == {2}
    with pytest.raises(
        ValueError, match=r"the example has rows \(4, 'float64'\), the model was partitioned for \(3, 'float64'\)"
    ):
        cj.TrainState.create(model, optax.sgd(0.1), key, np.zeros((5, 4)))
    with pytest.raises(ValueError, match="num_workers=0"):
        cj.TrainState.create(model, optax.sgd(0.1), key, num_workers=0)


def test_snapshots_average_statistics_over_workers():
    state = problems.restart(problems.model(2), "sgd", 3)
    mean = snapshot_of(state).model_state[0][1]["mean"]
    np.testing.assert_allclose(mean, state.model_state[0][1]["mean"].mean(0))
    assert float(jnp.ptp(state.model_state[0][1]["mean"], axis=0).max()) > 1e-3


@pytest.mark.parametrize("optimizer", ["adamw", "clip"])
def test_it_survives_a_checkpoint(tmp_path, optimizer):
    ocp = pytest.importorskip("orbax.checkpoint")
    state = problems.restart(problems.model(2), optimizer, 2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "state", other_state(state))
    assert problems.distance(back, state) == 0


def other_state(state: cj.TrainState) -> cj.TrainState:
    """The same form with other contents, so that everything must come from the checkpoint."""
    zeros = jax.tree.map(jnp.zeros_like, {**vars(state), "key": 0})
    return cj.TrainState(**{**zeros, "key": jax.random.key(99)})
