"""The interleaved executor equals the reference: rules, tables, uneven stages, restarts, drains."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import cyclic_jax as cj
from cyclic_jax.executors.interleaved import InterleavedExecutor
from tests import problems
from tests.test_replicated import BALANCED, RULES, custom, expected, run

pytestmark = pytest.mark.usefixtures("float64")
TOLERANCE, STEPS = 1e-12, 4


def machine(
    rule: cj.UpdateRule, optimizer: str = "sgd", schedule: cj.Schedule | None = None, **options: Any
) -> InterleavedExecutor:
    model, inner = problems.model(rule.num_stages), problems.OPTIMIZERS[optimizer]
    return InterleavedExecutor(model, problems.loss, inner, rule=rule, schedule=schedule, **options)


def check(executor: InterleavedExecutor, optimizer: str = "sgd", steps: int = STEPS, **options: Any) -> None:
    """From a restart with another theta_{T-1}: a fresh start is the easier case."""
    fresh = executor.rule.fresh
    state = problems.restart(executor.model, optimizer, len(fresh))
    got, want = run(executor, state, steps, **options), expected(fresh, optimizer, state, steps)
    assert got[1].keys() == want[1].keys()
    assert problems.distance(got, want) <= TOLERANCE


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", RULES)
def test_one_op_a_tick(n, rule):
    check(machine(RULES[rule](n)))


@pytest.mark.parametrize("n", [2, 3])
def test_cost_balanced_ticks(n):
    check(machine(cj.UpdateRule.freshest(BALANCED[n]), schedule=BALANCED[n]))
    check(machine(cj.UpdateRule.cdp_v1(n, 2 * n), schedule=BALANCED[n]))
