"""The baselines with collectives are what they say: plain data parallelism, with its states spread as they claim."""

import functools
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.data_parallel import DataParallel
from benchmarks.sharded import Sharded
from cyclic_jax.communication import collectives
from tests import problems

pytestmark = pytest.mark.usefixtures("float64")
BASELINES = {
    "dp": DataParallel,
    "zero1": functools.partial(Sharded, fully=False),
    "fsdp": functools.partial(Sharded, fully=True),
}


@functools.cache
def baseline(name: str, n: int, optimizer: str) -> Any:
    return BASELINES[name](problems.model(n), problems.loss, problems.OPTIMIZERS[optimizer], n)


def padded(machine: Sharded) -> int:
    """Entries of all stages, each padded to a multiple of N."""
    return sum(-(-size // machine.N) * machine.N for form in machine.formats for size in form.sizes.values())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", BASELINES)
def test_equals_plain_training(name, n, optimizer):
    machine, state = baseline(name, n, optimizer), problems.fresh_start(problems.model(n), optimizer, n)
    carry, want, step = machine.init(state), state, problems.reference(n, n, optimizer)
    for t in range(4):
        batch = problems.batch(t, n)
        carry, losses = machine.step(carry, jax.device_put(batch, machine.batch_sharding))
        want, metrics = step(np.ones((n, n), bool), want, batch)
        assert problems.distance(losses, metrics.loss) <= 1e-12
    params = carry.params if name == "dp" else machine.params(carry)
    assert problems.distance(params, want.params) <= 1e-12
    assert problems.distance(params, step(np.zeros((n, n), bool), want, batch)[0].params) > 1e-6


@pytest.mark.parametrize(("name", "gathers"), [("fsdp", 2), ("zero1", 1)])
def test_its_collectives(name, gathers):
    """Fully sharded, each stage is gathered twice, or it would be kept from its forward to its backward."""
    machine = baseline(name, 3, "adamw")
    struct = machine.carry_struct(problems.fresh_start(problems.model(3), "adamw", 3))
    text = machine.lower(struct, problems.batch(0, 3)).compile().as_text()
    moved = Counter()
    for found in collectives(text):
        moved[found.kind] += found.num_bytes
    whole = 8 * padded(machine)
    assert moved == {"all-gather": gathers * whole, "reduce-scatter": whole // 3}


def test_what_a_worker_holds():
    """Adam's two moments: spread with both, the parameters only when fully sharded."""
    for name, vectors in (("fsdp", 3 / 3), ("zero1", 1 + 2 / 3), ("dp", 3)):
        machine = baseline(name, 3, "adamw")
        carry = machine.init(problems.fresh_start(problems.model(3), "adamw", 3))
        leaves = jax.tree.leaves((carry.params, getattr(carry, "shards", ()), carry.opt_state))
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves if leaf.dtype == np.float64)
        entries = padded(baseline("fsdp", 3, "adamw"))
        assert held == pytest.approx(8 * entries * vectors, rel=0.05)
