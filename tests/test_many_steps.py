"""Thousands of steps that nobody waits for, on more simulated devices than there are cores."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest

import cyclic_jax as cj
from cyclic_jax.executors import EXECUTORS
from tests import problems

STEPS, WARM, ROWS = 2000, 1000, 128  # the allocator takes some hundred steps to settle


def resident() -> float:
    """MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ("replicated", "pipeline", "zero") if name in EXECUTORS])
def test_many_steps_neither_hang_nor_grow(name):
    n = 8
    executor = cj.make_executor(
        name, problems.model(n), problems.loss, problems.OPTIMIZERS["sgd"], rule=cj.UpdateRule.cdp_v2(n)
    )
    carry, memory = executor.init(problems.fresh_start(executor.model, "sgd", n)), []
    inputs, targets = problems.batch(0, n, ROWS)
    batch = jax.device_put((inputs.astype(np.float32), targets.astype(np.int32)), executor.batch_sharding)
    for t in range(STEPS):
        carry, metrics = executor.step(carry, batch)  # not waited for
        if t == WARM or t == STEPS - 1:
            jax.block_until_ready(carry)
            memory.append(resident())
    one = sum(leaf.nbytes for leaf in jax.tree.leaves((carry.held, carry.flight))) / 2**20
    state, _ = executor.drain(carry)
    assert int(state.step) == STEPS
    assert np.isfinite(np.asarray(metrics.loss)).all()
    print(f"{name}: {memory[0]:.0f} MiB after {WARM} steps, {memory[1]:.0f} after {STEPS}; a carry has {one:.3f}")
    assert memory[1] - memory[0] < 0.1 * one * (STEPS - WARM), memory  # a carry lost in every tenth step would be seen
