"""The baselines that flush are what they say: plain gradient descent on the mean over all micro-batches."""

import jax
import numpy as np
import pytest

from benchmarks.flushed_pipeline import FlushedPipeline
from tests import problems

pytestmark = pytest.mark.usefixtures("float64")


def arranged(batch, m, s):
    """Device k holds micro-batches k, k + S, …: the order in which they reach the first stage."""
    order = [i for k in range(s) for i in range(k, m, s)]
    return jax.tree.map(lambda leaf: leaf.reshape(m, -1, *leaf.shape[1:])[order].reshape(leaf.shape), batch)


@pytest.mark.parametrize(("order", "m", "s"), [("gpipe", 4, 2), ("1f1b", 6, 3)])
def test_equals_plain_training(order, m, s):
    state = problems.fresh_start(problems.model(s), "sgd", m)
    pipeline = FlushedPipeline(problems.model(s), problems.loss, problems.OPTIMIZERS["sgd"], m, order)
    pipeline.prepare(problems.batch(0, m))
    carry, want = pipeline.init(state), state
    for t in range(4):
        batch = problems.batch(t, m)
        placed = jax.device_put(arranged(batch, m, s), pipeline.batch_sharding)
        carry, losses = pipeline.step(carry, placed)
        want, metrics = problems.reference(s, m, "sgd")(np.ones((m, s), bool), want, batch)
        assert problems.distance(losses[-1], metrics.loss) <= 1e-12
    assert problems.distance(pipeline.params(carry), want.params) <= 1e-12
