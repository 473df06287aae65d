"""The messages, replayed with version numbers: every op sees the version that the rule asks for."""

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyclic_jax.rules import UpdateRule
from cyclic_jax.schedule import Schedule

TABLES = [Schedule.cyclic(n) for n in (1, 2, 3, 4, 5, 8)]
TABLES += [Schedule.cyclic(2, 4), Schedule.cyclic(4, 2), Schedule.cyclic(8, 4), Schedule.cyclic(3, 6)]
TABLES += [Schedule.balanced(n, [1] * 2 * n, [2] * 2 * n) for n in (2, 3, 4)]


def replay(schedule: Schedule, fresh: np.ndarray, start: int = 0, steps: int = 4, lost: int | None = None) -> None:
    """Workers hold one version of each stage; sums travel as the messages say and are used when they have arrived.

    A worker keeps an arrived sum pending and applies it before its forward iff the version it needs exceeds the one it holds.
    A restart at step ``start`` has theta_start staged on delayed pairs. ``lost`` drops one message, to show that it is noticed.
    """
    N, S, period = schedule.num_workers, schedule.num_stages, schedule.period
    messages = [m for k, m in enumerate(schedule.messages()) if k != lost]
    need = lambda i, j, step: max(0, start + step - (not fresh[i, j]))  # noqa: E731
    version = [[need(i, j, 0) for j in range(S)] for i in range(N)]
    pending = [[[start - 1] if start and not fresh[i, j] else [] for j in range(S)] for i in range(N)]
    newest: dict[tuple[int, int], int] = {}  # the last sum that reached (worker, stage)
    partial: dict[tuple[int, int], int] = {}  # gradients in the partial sum that reached (worker, stage)
    post = collections.defaultdict(list)  # tick -> what arrives before it

    for tick in range(period * steps):
        for kind, i, j, load in post.pop(tick, []):
            if kind == "partial":
                partial[i, j] = load
            else:
                pending[i][j].append(load)
                newest[i, j] = load
        for i in range(N):
            for op, step in schedule.ops_at(tick, i):
                j = op.stage
                if step < 0:
                    continue
                while op.kind == "F" and version[i][j] < need(i, j, step):
                    assert pending[i][j].pop(0) == version[i][j]
                    version[i][j] += 1
                assert version[i][j] == need(i, j, step), (tick, i, str(op), step)
                assert op.kind == "B" or len(pending[i][j]) <= 1, "at most one sum stays pending"
                if op.kind == "B":
                    assert partial.pop((i, j), 0) == i, "the gradients of all workers before have arrived"
                load = newest.get((i, j)) if op.kind == "F" else i + 1 if i < N - 1 else start + step
                kind = "sum" if op.kind == "F" else "partial" if i < N - 1 else "hand_off"
                leaving = [m for m in messages if (m.sender, m.stage, m.kind, m.tick) == (i, j, kind, tick % period)]
                if load is not None:
                    for m in leaving:
                        post[tick + 1 + m.slack].append((m.kind, m.receiver, j, load))
                if op.kind == "B" and i == N - 1 and schedule.feasible[:, j].argmax() == i:
                    post[tick + 1].append(("sum", i, j, load))  # it is its own first user


@pytest.mark.parametrize("schedule", TABLES, ids=lambda s: f"{s.name}-{s.num_workers}-{s.num_stages}")
def test_every_op_sees_its_version(schedule):
    @given(st.data(), st.sampled_from([0, 5]))
    def check(data, start):
        size = schedule.num_workers * schedule.num_stages
        bits = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
        replay(schedule, schedule.feasible & np.reshape(bits, schedule.feasible.shape), start)

    check()
    replay(schedule, schedule.feasible)
    replay(schedule, np.zeros_like(schedule.feasible))


def test_the_replay_notices():
    schedule = Schedule.cyclic(3)
    with pytest.raises((AssertionError, IndexError)):
        replay(schedule, UpdateRule.dp(3).fresh)  # fresher than feasible
    for lost in range(len(schedule.messages())):
        with pytest.raises((AssertionError, IndexError)):
            replay(schedule, schedule.feasible, lost=lost)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_gradient_traffic_is_even_and_small(n):
    messages = Schedule.cyclic(n).messages()
    per_worker_and_tick = collections.Counter((m.sender, m.tick) for m in messages)
    assert max(per_worker_and_tick.values()) == 1
    # all workers together: N−1 partial sums, and N−1 hops of the finished one (N if it is handed to another first)
    assert len(messages) / n <= 2 * n - 1
    assert len(messages) == sum(2 * (n - 1) + (j > 0) for j in range(n))
    slack = {m.slack for m in messages if m.kind == "partial"}
    assert slack == {1}
    assert {m.slack for m in messages if m.kind == "sum"} == ({1} if n > 1 else set())
    assert {m.slack for m in messages if m.kind == "hand_off"} == {0}


def test_pipeline_messages_have_no_slack_with_one_op_a_tick():
    messages = Schedule.cyclic(4).messages("activations")
    assert {m.slack for m in messages} == {0}
    assert {(m.kind, m.receiver - m.sender) for m in messages} == {("activation", 1), ("cotangent", -1)}
    assert len(messages) == 4 * 2 * 3


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_state_traffic(n):
    messages = Schedule.cyclic(n).messages("states")
    kinds = collections.Counter(m.kind for m in messages)
    assert kinds["forward_parameters"] == kinds["backward_parameters"] == n * n
    assert kinds["partial"] == n * (n - 1)
    assert kinds["hand_off"] == n - 1  # the owner of stage 0 completes its sum itself
    assert {m.slack for m in messages if "parameters" in m.kind} == {1}


@pytest.mark.parametrize("n", [2, 3, 4])
def test_state_traffic_of_two_stages_an_owner(n):
    schedule = Schedule.balanced(n, [1] * 2 * n, [2] * 2 * n)
    assert schedule.num_stages == 2 * n
    messages = schedule.messages("states")
    kinds = collections.Counter(m.kind for m in messages)
    assert kinds["forward_parameters"] == kinds["backward_parameters"] == n * 2 * n
    assert kinds["partial"] == 2 * n * (n - 1)
    assert all(m.slack >= 0 for m in messages)
    owners = {m.stage: m.receiver for m in messages if m.kind == "hand_off"}
    assert all(receiver == schedule.feasible[:, stage].argmax() for stage, receiver in owners.items())


@pytest.mark.parametrize("schedule", TABLES, ids=lambda s: f"{s.name}-{s.num_workers}-{s.num_stages}")
def test_delayed_states_come_from_the_owner(schedule):
    fresh, delayed = (schedule.messages(moving) for moving in ("states", "delayed_states"))
    moved = set(delayed) - set(fresh)
    owners = schedule.feasible.argmax(axis=0)
    between = ((owners > 0) & (owners < schedule.num_workers - 1)).sum()
    assert len(moved) == 2 * between  # the last worker sends to worker 0 in any case
    for message in moved:
        assert message.kind.endswith("_parameters")
        assert (message.sender, message.receiver) == (owners[message.stage], 0)
        assert message.slack >= 0
    lost = set(fresh) - set(delayed)
    assert {(m.sender, m.receiver) for m in lost} <= {(schedule.num_workers - 1, 0)}
    kept_by_0 = (owners == 0).sum() if schedule.num_workers > 1 else 0  # what it keeps for itself is no message
    assert len(lost) - len(moved) == 2 * kept_by_0


def test_refused():
    for moving in ("gradients", "states", "delayed_states"):
        with pytest.raises(ValueError, match="have no ring: they need an all-reduce"):
            Schedule.simultaneous(2, 2).messages(moving)
    with pytest.raises(ValueError, match="moving='weights' is unknown"):
        Schedule.cyclic(2).messages("weights")
