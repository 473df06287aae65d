"""How an executor is proven: the same steps by it and by the reference, compared leaf by leaf and loss by loss."""

from typing import Any

import numpy as np

import cyclic_jax as cj
from tests import problems

TOLERANCE, STEPS = 1e-12, 6


def custom(n: int) -> cj.UpdateRule:
    """Feasible, neither v1 nor v2: every other cell of the freshest mask."""
    return cj.UpdateRule.custom(cj.UpdateRule.cdp_v2(n).fresh & (np.add.outer(range(n), range(2, 2 + n)) % 2 == 0))


RULES = {"v1": cj.UpdateRule.cdp_v1, "v2": cj.UpdateRule.cdp_v2, "custom": custom}


def run(executor: Any, state: cj.TrainState, steps: int, drain_after: int | None = None) -> tuple[cj.TrainState, dict]:
    """The drained state and every loss by (worker, step)."""
    carry, losses = executor.init(state), {}

    def note(metrics: cj.Metrics) -> None:
        for worker, (loss, step) in enumerate(zip(np.asarray(metrics.loss), metrics.step.tolist(), strict=True)):
            if step >= 0:
                assert (worker, step) not in losses
                losses[worker, step] = loss

    for t in range(steps):
        carry, metrics = executor.step(carry, problems.batch(t, executor.num_workers))
        note(metrics)
        if drain_after == t:
            state, metrics = executor.drain(carry)
            note(metrics)
            carry = executor.init(state)
    state, metrics = executor.drain(carry)
    note(metrics)
    return state, losses


def expected(fresh: np.ndarray, optimizer: str, state: cj.TrainState, steps: int) -> tuple[cj.TrainState, dict]:
    step, losses = problems.reference(fresh.shape[1], len(fresh), optimizer), {}
    for t in range(steps):
        state, metrics = step(fresh, state, problems.batch(t, len(fresh)))
        losses |= {(i, int(metrics.step[i])): loss for i, loss in enumerate(np.asarray(metrics.loss))}
    return state, losses


def check(executor: Any, optimizer: str, state: cj.TrainState, steps: int = STEPS, **options: Any) -> None:
    fresh = executor.rule.tiled(executor.num_workers // executor.rule.num_workers).fresh
    got, want = run(executor, state, steps, **options), expected(fresh, optimizer, state, steps)
    assert got[1].keys() == want[1].keys()
    assert problems.distance(got, want) <= TOLERANCE
