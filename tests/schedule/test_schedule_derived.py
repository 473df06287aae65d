"""What is derived from a table, against the closed formulas and against replaying it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyclic_jax.rules import UpdateRule
from cyclic_jax.schedule import Op, Schedule
from tests.schedule.test_schedule_table import schedules

RATIOS = [(n, s) for s in range(1, 17) for n in range(1, 2 * s + 1) if 2 * s % n == 0]


@pytest.mark.parametrize("n", range(2, 17))
def test_freshest_is_cdp_v2(n):
    fresh = UpdateRule.freshest(Schedule.cyclic(n)).fresh
    assert (fresh == UpdateRule.cdp_v2(n).fresh).all()
    assert [[bool(i + j >= n - 1) for j in range(n)] for i in range(n)] == fresh.tolist()


def test_freshest_is_cdp_v2_for_every_ratio():
    for n, s in RATIOS:
        assert (Schedule.cyclic(n, s).feasible == UpdateRule.cdp_v2(n, s).fresh).all(), (n, s)


def test_other_tables_have_the_same_mask():
    for n in range(1, 9):
        assert (Schedule.pipeline(n).feasible == UpdateRule.cdp_v2(n).fresh).all()
        share = Schedule.balanced(n, [1] * 2 * n, [2] * 2 * n).feasible.mean()
        assert share == pytest.approx((n + 1) / (2 * n))
        assert Schedule.simultaneous(n, 3).feasible.all()
        assert Schedule.gpipe(n, 3).feasible.all()


@given(schedules())
def test_feasible_by_replaying(schedule):
    """A stage's newest version exists from the tick on in which every worker's backward of it has ended."""
    period, offset = schedule.period, schedule.offset
    for i in range(schedule.num_workers):
        for j in range(schedule.num_stages):
            ticks = range(3 * period)
            busy = [
                tick
                for tick in ticks
                for worker in range(schedule.num_workers)
                if (Op("B", j), 0) in schedule.ops_at(tick, worker)
            ]
            uses = next(tick for tick in ticks if (Op("F", j), 1) in schedule.ops_at(tick, i))
            assert schedule.feasible[i, j] == (uses > max(busy)), (i, j, offset)


@pytest.mark.parametrize("n", range(1, 13))
def test_live_activations_are_constant(n):
    live = Schedule.cyclic(n).live_activations()
    assert live.shape == (n, 2 * n)
    assert (live.sum(axis=0) == n * (n + 1) // 2).all()
    at_once = Schedule.simultaneous(n, n).live_activations().sum(axis=0).max()
    assert at_once == n * n
    assert live.max() == n


def test_cost_balanced_ticks_hold_less():
    """N = 4: 0.594 of DP's peak against 0.625 with one op a tick."""
    peaks = [
        schedule.live_activations().sum(axis=0).max() / (4 * stages)
        for schedule, stages in ((Schedule.balanced(4, [1] * 8, [2] * 8), 8), (Schedule.cyclic(4), 4))
    ]
    assert peaks == [pytest.approx(0.594, abs=5e-4), 0.625]


@given(schedules(), st.data())
def test_live_activations_by_replaying(schedule, data):
    weights = data.draw(st.lists(st.integers(0, 9), min_size=schedule.num_stages, max_size=schedule.num_stages))
    live = schedule.live_activations(weights)
    first = 4 * schedule.period
    for worker in range(schedule.num_workers):
        for tick in range(first, first + schedule.period):
            held = sum(
                weights[j]
                for j in range(schedule.num_stages)
                for step in range(8)
                if schedule.start(Op("F", j), worker, step) <= tick < schedule.end(Op("B", j), worker, step)
            )
            assert live[worker, tick % schedule.period] == held


def test_weights_must_fit():
    with pytest.raises(ValueError, match=r"stage_bytes has shape \(2,\)"):
        Schedule.cyclic(3).live_activations([1, 2])


@pytest.mark.parametrize("n", range(1, 13))
def test_one_worker_uses_each_stage_at_each_tick(n):
    assert all(len(users) == 1 for tick in Schedule.cyclic(n).stage_users() for users in tick)
    # with odd offsets this does not hold
    assert {len(users) for tick in Schedule.cyclic(8, 4).stage_users() for users in tick} != {1}


def test_a_device_of_the_pipeline_does_one_thing_at_a_time():
    for n in range(1, 9):
        assert all(len(users) <= 1 for tick in Schedule.pipeline(n).stage_users() for users in tick)
        live = Schedule.pipeline(n)
        for j in range(n):
            weights = [int(k == j) for k in range(n)]
            assert live.live_activations(weights).sum(axis=0).max() == n - j


def test_the_first_step_is_longer():
    for n in range(1, 9):
        schedule = Schedule.cyclic(n)
        ends = [schedule.end(Op("B", 0), n - 1, step) for step in range(3)]
        assert ends[0] == 2 * n + 2 * (n - 1)
        assert np.diff(ends).tolist() == [2 * n] * 2
