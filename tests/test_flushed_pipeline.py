"""The baselines that flush are what they say: plain gradient descent on the mean over all micro-batches."""

from collections import Counter

import jax
import numpy as np
import pytest

from benchmarks.flushed_pipeline import FlushedPipeline
from tests import problems

pytestmark = pytest.mark.usefixtures("float64")
CASES = [  # order, micro-batches of a group, stages, groups
    ("gpipe", 2, 2, 1),
    ("gpipe", 4, 2, 1),
    ("gpipe", 3, 3, 1),
    ("1f1b", 3, 3, 1),
    ("1f1b", 6, 3, 1),
    ("1f1b", 8, 2, 2),
    ("gpipe", 1, 2, 2),  # data parallelism times model parallelism, N² devices
    ("gpipe", 1, 3, 3),
]


def arranged(batch, m, s, groups):
    """Device k of a group holds micro-batches k, k + S, …: the order in which they reach the first stage."""
    order = [g * m + i for g in range(groups) for k in range(s) for i in range(k, m, s)]
    return jax.tree.map(lambda leaf: leaf.reshape(m * groups, -1, *leaf.shape[1:])[order].reshape(leaf.shape), batch)


@pytest.mark.parametrize(("order", "m", "s", "groups"), CASES)
def test_equals_plain_training(order, m, s, groups):
    everyone = m * groups
    state = problems.fresh_start(problems.model(s), "sgd", everyone)
    pipeline = FlushedPipeline(problems.model(s), problems.loss, problems.OPTIMIZERS["sgd"], m, order, groups)
    pipeline.prepare(problems.batch(0, everyone))
    carry, want = pipeline.init(state), state
    for t in range(4):
        batch = problems.batch(t, everyone)
        placed = jax.device_put(arranged(batch, m, s, groups) if m > 1 else batch, pipeline.batch_sharding)
        carry, losses = pipeline.step(carry, placed)
        want, metrics = problems.reference(s, everyone, "sgd")(np.ones((everyone, s), bool), want, batch)
        assert problems.distance(losses[s - 1 :: s].reshape(-1), metrics.loss) <= 1e-12
    assert problems.distance(pipeline.params(carry), want.params) <= 1e-12
    late = problems.reference(s, everyone, "sgd")(np.zeros((everyone, s), bool), want, batch)[0]
    assert problems.distance(pipeline.params(carry), late.params) > 1e-6


@pytest.mark.parametrize(("order", "m", "s", "groups"), CASES)
def test_its_table_is_what_it_runs(order, m, s, groups):
    """Ops of the program by device and place, one entry a micro-batch, against those of the table."""
    pipeline = FlushedPipeline(problems.model(s), problems.loss, problems.OPTIMIZERS["sgd"], m, order, groups)
    runs = Counter()
    for phases in pipeline._programs():
        for b in range(m + s - 1):
            for turns, _ in phases:
                runs.update((turn.op, b - turn.age) for turn in turns if 0 <= b - turn.age < m)
    assert runs == Counter((op, i) for op in pipeline.schedule.slots for i in range(m))
    assert pipeline.schedule.makespan(1, 2, moving="activations") == 3 * (m + s - 1)


def test_micro_batches_must_spread_evenly():
    with pytest.raises(ValueError, match="3 micro-batches do not spread evenly over 2 devices"):
        FlushedPipeline(problems.model(2), problems.loss, problems.OPTIMIZERS["sgd"], 3)
