"""Time per training step, against the closed results and a replay."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyclic_jax.schedule import Op, Schedule
from cyclic_jax.schedule.cycle_time import cycle_time

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
def test_overlap_hides_transfers_of_half_a_forward(n):
    """The hand-off binds: around stage j of it runs a cycle of 3N − j + (j + 1)·transfer for j ≥ 1 (stage 0 stays at home)."""
    schedule = Schedule.cyclic(n)
    for transfer in (0, 0.25, 0.5):
        assert schedule.makespan(1, 2, overlap=True, transfer=transfer) == 3 * n
    for transfer in (0.75, 1, 2):
        around = [3 * n - j + (j + 1) * transfer for j in range(1, n)]
        assert schedule.makespan(1, 2, overlap=True, transfer=transfer) == pytest.approx(max(around))


def test_a_message_to_oneself_takes_no_time():
    assert Schedule.cyclic(1, 2).makespan(1, 2, overlap=True, transfer=5) == 6


def replayed(schedule, forward, backward, transfer, moving, steps):
    """Time when each step's last op ends, if every op starts as soon as it can: worker by worker, message by message."""
    across = moving == "activations"
    waits = collections.defaultdict(list)  # (receiver, op, tick in which it is needed, whose) -> (sender, slack)
    for m in schedule.messages(moving):
        op = Op("B" if m.kind in ("partial", "cotangent") else "F", m.stage)
        needed = (m.tick + 1 + m.slack) % schedule.period
        waits[m.receiver, op, needed, m.worker if across else -1].append((m.sender, m.slack))
    sent, free, finished = {}, collections.Counter(), np.zeros(steps)
    order = sorted(
        (schedule.start(slot.op, i, step), k, i, step)
        for step in range(steps)
        for i in range(schedule.num_workers)
        for k, slot in enumerate(schedule.program)
    )
    for start, k, i, step in order:
        op = schedule.program[k].op
        who = op.stage if across else i
        sources = waits[who, op, start % schedule.period, i if across else -1]
        # nothing was sent before the first step
        arrived = [sent.get((sender, start - slack, op.stage), -transfer) + transfer for sender, slack in sources]
        free[who] = max([free[who], *arrived]) + (forward if op.kind == "F" else backward)[op.stage]
        # a message of the pipeline is named after the stage that it is for
        towards = op.stage + (0 if not across else 1 if op.kind == "F" else -1)
        sent[who, schedule.end(op, i, step), towards] = free[who]
        finished[step] = max(finished[step], free[who])
    return finished


@settings(max_examples=25)
@given(st.integers(1, 4), st.sampled_from(["cyclic", "pipeline", "gpipe"]), st.booleans(), st.data())
def test_overlap_equals_a_long_replay(n, table, across, data):
    schedule = {"cyclic": Schedule.cyclic(n), "pipeline": Schedule.pipeline(n), "gpipe": Schedule.gpipe(n, n)}[table]
    times = st.lists(st.integers(1, 9), min_size=n, max_size=n)
    forward, backward, transfer = data.draw(times), data.draw(times), data.draw(st.integers(0, 5))
    moving, steps = "activations" if across else "gradients", 180
    ends = replayed(schedule, forward, backward, transfer, moving, steps)
    cycle = schedule.makespan(forward, backward, overlap=True, transfer=transfer, moving=moving)
    # whole times settle, into a round of 1 … N steps; 60 steps are whole rounds for every N here. The last step is left out:
    # its devices do not take turns with a step after it
    assert ends[-2] - ends[-62] == pytest.approx(60 * cycle)


def test_times_need_not_be_whole():
    """Rounding must not matter, nor how slowly a replay would settle."""
    random = np.random.default_rng(0)
    for n in (2, 3, 4, 8):
        for schedule in (
            Schedule.cyclic(n),
            Schedule.pipeline(n),
            Schedule.gpipe(2 * n, n),
            Schedule.one_f_one_b(n, n),
        ):
            forward, backward = random.random((2, n)) + 0.1
            for moving in ("gradients", "activations"):
                times = {"forward": forward, "backward": backward, "moving": moving}
                least, cycle = schedule.ideal(**times), schedule.makespan(**times, overlap=True)
                assert least * (1 - 1e-9) <= cycle <= schedule.makespan(**times) * (1 + 1e-9)


@pytest.mark.parametrize("n", N)
def test_ideal(n):
    assert Schedule.cyclic(n).ideal(1, 2) == 3 * n
    assert Schedule.cyclic(n).ideal(range(1, n + 1), 2) == n * (n + 1) / 2 + 2 * n
    assert Schedule.gpipe(4 * n, n).ideal(1, 2, moving="activations") == 3 * 4 * n
    assert Schedule.pipeline(n).ideal([1] * (n - 1) + [5], 2, moving="activations") == 7 * n


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


def test_events_that_wait_for_each_other_are_refused():
    there, back = np.array([0, 1]), np.array([1, 0])
    with pytest.raises(ValueError, match="waits for itself"):
        cycle_time(there, back, np.array([1.0, 1.0]), np.array([0, 0]), 2)


def test_refused():
    with pytest.raises(ValueError, match=r"forward=\[1, 2\]: expected a positive time, or one for each of 3 stages"):
        Schedule.cyclic(3).makespan([1, 2], 2)
    with pytest.raises(ValueError, match="backward=0"):
        Schedule.cyclic(3).makespan(1, 0)
    with pytest.raises(ValueError, match="forward=inf"):
        Schedule.cyclic(3).makespan(float("inf"), 2)
    with pytest.raises(ValueError, match="transfer=-1"):
        Schedule.cyclic(3).makespan(1, 2, transfer=-1)
    with pytest.raises(ValueError, match="moving='words'"):
        Schedule.cyclic(3).makespan(1, 2, moving="words")
