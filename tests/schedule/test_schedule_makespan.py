"""Time per training step, against the closed results."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyclic_jax.schedule import Schedule

N = [2, 3, 4, 8]


@pytest.mark.parametrize("n", N)
def test_lockstep_with_one_op_a_tick_costs_a_third_more(n):
    assert Schedule.cyclic(n).makespan(1, 2) == pytest.approx(4 / 3 * 3 * n)
    assert Schedule.cyclic(n).makespan(1, 1) == 2 * n


@pytest.mark.parametrize("n", N)
def test_cost_balanced_ticks_cost_nothing_more(n):
    assert Schedule.balanced(n, [1] * 2 * n, [2] * 2 * n).makespan(1, 2) == 6 * n
    assert Schedule.balanced(n, [1] * 2 * n, [2] * 2 * n, 2).makespan(1, 2) > 6 * n


@pytest.mark.parametrize("n", N)
def test_overlapped_transfers_cost_one_hand_off(n):
    """All messages but the hand-off have a tick of slack: one transfer a step is left, not one a tick."""
    assert Schedule.cyclic(n).makespan(1, 2, overlap=True) == pytest.approx(3 * n)
    assert Schedule.cyclic(n).makespan(1, 2, overlap=True, transfer=0.5) == pytest.approx(3 * n + 0.5)


@pytest.mark.parametrize("n", N)
def test_pipelines(n):
    def per_micro_batch(schedule, overlap):
        return schedule.makespan(1, 2, overlap=overlap, moving="activations") / schedule.num_workers

    for overlap in (False, True):
        assert per_micro_batch(Schedule.pipeline(n), overlap) == pytest.approx(3)
        for m in (n, 4 * n):
            assert per_micro_batch(Schedule.gpipe(m, n), overlap) == pytest.approx(3 * (m + n - 1) / m)
    assert per_micro_batch(Schedule.cyclic(n), False) == 4


def test_lockstep_pays_for_every_tick_with_a_message():
    schedule = Schedule.cyclic(3)
    ticks = {m.tick for m in schedule.messages()}
    assert schedule.makespan(1, 2, transfer=0.25) == schedule.makespan(1, 2) + 0.25 * len(ticks)


def test_an_uneven_stage_is_paid_in_every_tick_of_lockstep():
    schedule = Schedule.cyclic(3)
    forward, backward = [1, 1, 4], [1, 1, 4]
    assert schedule.makespan(forward, backward) == 4 * 6
    assert 12 <= schedule.makespan(forward, backward, overlap=True) < 4 * 6


@settings(max_examples=20)
@given(st.integers(1, 5), st.data())
def test_bounds(n, data):
    """Never less than one worker's own work, never more with overlap than in lockstep."""
    times = st.lists(st.integers(1, 9), min_size=n, max_size=n)
    forward, backward = data.draw(times), data.draw(times)
    schedule, transfer = Schedule.cyclic(n), data.draw(st.integers(0, 3))
    overlapped = schedule.makespan(forward, backward, overlap=True, transfer=transfer)
    assert overlapped >= np.sum(forward) + np.sum(backward) - 1e-9
    # every message of lockstep waits for its tick's end, so a tick with a message costs at least as much
    assert overlapped <= schedule.makespan(forward, backward, transfer=0) + transfer * schedule.period + 1e-9


def test_refused():
    with pytest.raises(ValueError, match=r"forward=\[1, 2\]: expected a positive time, or one for each of 3 stages"):
        Schedule.cyclic(3).makespan([1, 2], 2)
    with pytest.raises(ValueError, match="backward=0"):
        Schedule.cyclic(3).makespan(1, 0)
    with pytest.raises(ValueError, match="moving='states'"):
        Schedule.cyclic(3).makespan(1, 2, moving="states")
