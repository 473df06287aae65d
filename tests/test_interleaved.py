"""The interleaved executor equals the reference: rules, tables, uneven stages, restarts, drains."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import cyclic_jax as cj
from cyclic_jax.communication import collectives
from cyclic_jax.executors import interleaved, interleaved_period
from cyclic_jax.executors.interleaved import InterleavedExecutor
from tests import problems
from tests.proofs import RULES, custom, expected, run

pytestmark = pytest.mark.usefixtures("float64")
TOLERANCE, STEPS = 1e-12, 4
BALANCED = {2: cj.Schedule.balanced(2, [1] * 4, [2] * 4)}


@pytest.fixture(autouse=True)
def quick_compilation(monkeypatch):
    """The same program, compiled in half the time."""
    monkeypatch.setitem(interleaved.CPU_OPTIONS, "xla_backend_optimization_level", 0)


def machine(
    rule: cj.UpdateRule, optimizer: str = "sgd", schedule: cj.Schedule | None = None, **options: Any
) -> InterleavedExecutor:
    model, inner = problems.model(rule.num_stages), problems.OPTIMIZERS[optimizer]
    return InterleavedExecutor(model, problems.loss, inner, rule=rule, schedule=schedule, **options)


@functools.cache
def shared(n: int, rule: str = "v2") -> InterleavedExecutor:
    """One compilation for all tests that run it."""
    return machine(RULES[rule](n))


def check(executor: InterleavedExecutor, optimizer: str = "sgd", steps: int = STEPS, **options: Any) -> None:
    """From a restart with another theta_{T-1}: a fresh start is the easier case."""
    fresh = executor.rule.fresh
    state = problems.restart(executor.model, optimizer, len(fresh))
    got, want = run(executor, state, steps, **options), expected(fresh, optimizer, state, steps)
    assert got[1].keys() == want[1].keys()
    assert problems.distance(got, want) <= TOLERANCE


@pytest.mark.parametrize(
    ("rule", "n"), [("v2", 1), ("v2", 2), ("v2", 3), ("v2", 4), ("v1", 2), ("v1", 3), ("custom", 3)]
)
def test_one_op_a_tick(rule, n):
    check(shared(n, rule))


def test_a_fresh_start():
    executor, state = shared(3), problems.fresh_start(problems.model(3), "sgd", 3)
    assert problems.distance(run(executor, state, 3), expected(executor.rule.fresh, "sgd", state, 3)) <= TOLERANCE


def test_cost_balanced_ticks():
    check(machine(cj.UpdateRule.freshest(BALANCED[2]), schedule=BALANCED[2]))


def test_more_workers_than_stages():
    """Neighbours 4/3 ops apart, in ticks of a third of an op: several workers use the same stage at once."""
    schedule = cj.Schedule.spread(3, 2)
    check(machine(cj.UpdateRule.freshest(schedule), schedule=schedule))


@pytest.mark.parametrize(
    "schedule",
    [cj.Schedule.pipeline(2), cj.Schedule.accumulation(2, 2), cj.Schedule.simultaneous(2, 2)],
    ids=lambda schedule: schedule.name,
)
def test_any_table(schedule):
    """With no delay at all in the last two: plain data parallelism, one after the other or all at once."""
    check(machine(cj.UpdateRule.freshest(schedule), schedule=schedule), steps=3)


def test_adamw():
    check(machine(cj.UpdateRule.cdp_v2(2), "adamw"), "adamw")


@pytest.mark.parametrize("after", [0, 2])
def test_drain_midway_and_go_on(after):
    check(shared(3), drain_after=after)


def test_draining_before_the_first_step_gives_the_state_back():
    executor, state = shared(3), problems.restart(problems.model(3), "sgd", 3)
    back, metrics = executor.drain(executor.init(state))
    assert problems.distance(back, state) == 0
    assert metrics.step.tolist() == [-1] * 3


def test_snapshot_is_the_newest_complete_step():
    executor, state = shared(3), problems.restart(problems.model(3), "sgd", 3)
    carry = executor.init(state)
    assert problems.distance(executor.snapshot(carry).params, state.params) == 0
    for t in range(3):
        carry, _ = executor.step(carry, problems.batch(t, 3))
        snapshot, want = executor.snapshot(carry), expected(executor.rule.fresh, "sgd", state, t)[0]
        assert int(snapshot.step) == int(want.step)
        assert problems.distance(snapshot.params, want.params) <= TOLERANCE


def test_the_carry_holds_what_is_in_flight_and_no_more():
    executor = shared(3)
    carry = executor.init(problems.restart(problems.model(3), "sgd", 3))
    assert carry.flight is None
    for t in range(2):
        carry, _ = executor.step(carry, problems.batch(t, 3))
        assert sorted(carry.flight) == [
            "cotangent1",  # worker 0 has done all, worker 1 F0 F1 F2 B2, worker 2 F0 F1
            "residuals1/0",
            "residuals1/1",
            "residuals2/0",
            "residuals2/1",
            "sum0",
            "sum1",
            "sum2",
            "targets2",
            "x2",
        ]


def test_wrong_answers_are_seen():
    executor, state = shared(3), problems.restart(problems.model(3), "sgd", 3)
    got = run(executor, state, STEPS)
    for wrong in (cj.UpdateRule.cdp_v1(3).fresh, cj.UpdateRule.dp(3).fresh, custom(3).fresh):
        assert problems.distance(got[0], expected(wrong, "sgd", state, STEPS)[0]) > 1e-6


def test_the_other_version_is_seen(monkeypatch):
    """With ``now`` and ``before`` confused for one stage and worker, the answer is another one."""
    real, other = interleaved_period.Period.version, {"now1": "before1", "before1": "now1"}

    def careless(self, turn):
        name = real(self, turn)
        return other.get(name, name) if turn.worker == 0 else name

    monkeypatch.setattr(interleaved_period.Period, "version", careless)
    executor, state = machine(cj.UpdateRule.cdp_v2(2)), problems.restart(problems.model(2), "sgd", 2)
    got = run(executor, state, 2)[0]
    assert problems.distance(got, expected(executor.rule.fresh, "sgd", state, 2)[0]) > 1e-6


def test_one_device_and_no_collective():
    executor = shared(2)
    state = problems.fresh_start(executor.model, "sgd", 2)
    compiled = executor.lower(executor.carry_struct(state), problems.batch(0, 2)).compile()
    assert not collectives(compiled.as_text())
    carry = executor.init(state)
    assert jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), carry) == jax.tree.map(
        lambda a: (a.shape, a.dtype, a.sharding), executor.carry_struct(state)
    )


def test_refused():
    model, rule = problems.model(3), cj.UpdateRule.cdp_v2(3)
    with pytest.raises(ValueError, match=r"update of stage 0 depends on stage 1 .*use the synchronous executor"):
        machine(rule, "clip")
    with pytest.raises(ValueError, match="'dp' wants worker 0 to be fresh on stage 0"):
        machine(cj.UpdateRule.dp(3))
    with pytest.raises(ValueError, match="runs on one device, and the mesh has 2"):
        machine(rule, mesh=Mesh(np.asarray(jax.devices()[:2]), ("cyclic",)))
    with pytest.raises(ValueError, match="residuals='none'"):
        machine(rule, residuals="none")
    executor = cj.make_executor("interleaved", model, problems.loss, optax.sgd(0.1), rule=rule)
    with pytest.raises(ValueError, match="10 rows cannot be divided among 3 workers"):
        executor.step(executor.init(problems.fresh_start(model, "sgd", 3)), (np.zeros((10, 3)), np.zeros(10, int)))
