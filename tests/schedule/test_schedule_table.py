"""Tables: what they hold, what they refuse, how they are drawn and read back."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyclic_jax.schedule import Op, Schedule, Slot


@st.composite
def schedules(draw) -> Schedule:
    stages = draw(st.integers(1, 6))
    cyclic = draw(st.sampled_from([n for n in range(1, 2 * stages + 1) if 2 * stages % n == 0]))
    workers = draw(st.integers(1, 5))
    costs = draw(st.lists(st.integers(1, 5), min_size=stages, max_size=stages))
    return draw(
        st.sampled_from(
            [
                Schedule.cyclic(cyclic, stages),
                Schedule.simultaneous(workers, stages),
                Schedule.pipeline(workers),
                Schedule.gpipe(workers, stages),
                Schedule.one_f_one_b(workers, stages),
                Schedule.balanced(workers, costs, [2 * c for c in costs], draw(st.integers(1, 4))),
            ]
        )
    )


@given(schedules())
def test_parse_reads_back_what_str_draws(schedule):
    assert Schedule.parse(str(schedule)) == schedule


@st.composite
def any_tables(draw) -> Schedule:
    """Any valid table: idle ticks anywhere, long ops, shared ticks, whatever offset fits."""
    stages, workers = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    free, program = draw(st.integers(0, 4)), []
    for op in [Op("F", j) for j in range(stages)] + [Op("B", j) for j in reversed(range(stages))]:
        length = draw(st.sampled_from([1, 1, 2, 3]))
        shares = program and length == program[-1].length == 1 and draw(st.booleans())
        start = program[-1].start if shares else free + draw(st.integers(0, 1))
        program.append(Slot(op, start, length))
        free = start + length
    period = free + draw(st.integers(0, 3))
    offset = draw(st.integers(0, (period - 1) // max(workers - 1, 1)))
    return Schedule(workers, stages, tuple(program), period, offset)


@given(any_tables())
def test_parse_reads_back_any_table(schedule):
    assert Schedule.parse(str(schedule)) == schedule


def test_parse_reads_an_f0_that_lies_in_the_next_period():
    schedule = Schedule(2, 1, (Slot(Op("F", 0), 2), Slot(Op("B", 0), 3)), 4, 3)
    assert str(schedule).splitlines()[2].split() == ["worker", "1", ".", "F0'", "B0'", "."]
    assert Schedule.parse(str(schedule)) == schedule


def test_other_tables_are_not_equal():
    assert Schedule.cyclic(2) != Schedule.simultaneous(2, 2)
    assert Schedule.cyclic(2, 4) != Schedule.cyclic(2)


def test_the_period_three_pipeline():
    assert str(Schedule.pipeline(3)) == "\n".join(
        [
            "tick      0   1   2   3   4   5   6   7   8",
            "worker 0  F0  F1  F2  B2  -   B1  -   B0  -",
            "worker 1  -   B0' -   F0  F1  F2  B2  -   B1",
            "worker 2  B2' -   B1' -   B0' -   F0  F1  F2",
        ]
    )


def test_cost_balanced_ticks_hold_two_forwards_or_one_backward():
    first_row = str(Schedule.balanced(2, [1] * 4, [2] * 4)).splitlines()[1]
    assert first_row.split() == ["worker", "0", "F0+F1", "F2+F3", "B3", "B2", "B1", "B0"]


def test_ops_print_and_parse():
    for kind, stage in itertools.product("FB", (0, 3, 12)):
        assert Op.parse(str(Op(kind, stage))) == Op(kind, stage)
    for wrong in ("", "F", "X1", "F-1", "F01", "F1'"):
        with pytest.raises(ValueError, match="is no op"):
            Op.parse(wrong)


def test_what_each_worker_does_when():
    schedule = Schedule.cyclic(3)
    assert schedule.ops_at(0, 1) == ((Op("B", 1), -1),)
    assert schedule.ops_at(8, 1) == ((Op("F", 0), 1),)
    assert schedule.start(Op("F", 0), worker=1, step=1) == 8
    assert schedule.end(Op("B", 0), worker=2) == 10


@given(schedules())
def test_every_op_comes_once_a_period(schedule):
    for worker in range(schedule.num_workers):
        seen = [op for tick in range(schedule.period) for op, _ in schedule.ops_at(tick, worker)]
        lengths = {slot.op: slot.length for slot in schedule.program}
        assert {op: seen.count(op) for op in seen} == lengths


@given(st.integers(1, 4), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 3))
def test_balanced_equals_brute_force(workers, forward, k):
    backward = [2 * f + 1 for f in forward]
    schedule = Schedule.balanced(workers, forward, backward, k)
    costs = [*forward, *reversed(backward)]
    groups = min(k * workers, len(costs))
    cuts = itertools.combinations(range(1, len(costs)), groups - 1)
    best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cut, len(costs)])) for cut in cuts)
    load = [0] * (k * workers)
    for slot, cost in zip(schedule.program, costs, strict=True):
        load[slot.start] += cost
    assert max(load) == best
    assert schedule.period == k * workers


F0, F1, B0, B1 = Op("F", 0), Op("F", 1), Op("B", 0), Op("B", 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule.cyclic(3, 4), r"num_workers=3 does not divide 2\*num_stages=8.*take one of \[1, 2, 4, 8\]"),
        (lambda: Schedule.cyclic(0), "num_workers=0"),
        (lambda: Schedule.balanced(2, [1, 1], [2]), "2 forward and 1 backward costs"),
        (lambda: Schedule.balanced(2, [1, 0], [2, 2]), "finite and positive"),
        (lambda: Schedule(2, 1, (Slot(F0, 0),), 2, 1), "op 1 of the program is nothing instead of B0"),
        (lambda: Schedule(2, 1, (Slot(B0, 0), Slot(F0, 1)), 2, 1), "op 0 of the program is B0 instead of F0"),
        (
            lambda: Schedule(1, 1, (Slot(F0, 0), Slot(B0, 1), Slot(B0, 2)), 3, 0),
            "op 2 of the program is B0 instead of nothing",
        ),
        (lambda: Schedule(2, 1, (Slot(F0, 0, 2), Slot(B0, 1)), 4, 2), "B0 starts at tick 1, before F0 has ended"),
        (lambda: Schedule(2, 1, (Slot(F0, -1), Slot(B0, 1)), 4, 2), "F0 starts at tick -1, before tick 0"),
        (
            lambda: Schedule(2, 1, (Slot(F0, 0), Slot(B0, 1, 2)), 2, 1),
            "ends at tick 3, after the next step has begun at tick 2",
        ),
        (lambda: Schedule(2, 1, (Slot(F0, 0, 0), Slot(B0, 1)), 2, 1), "F0 has length 0"),
        (lambda: Schedule(3, 1, (Slot(F0, 0), Slot(B0, 1)), 2, 1), "offset=1 ticks between 3 workers do not fit"),
        (lambda: Schedule.parse("hello"), "not a schedule"),
        (lambda: Schedule.parse("tick 0 1\nworker 0 F0"), "worker 0 has 1 cells, the header has 2"),
        (lambda: Schedule.parse("tick 0 1\nworker 0 F0 X0"), "'X0' is no op"),
        (lambda: Schedule.parse("tick 0 1\nworker 1 F0 B0"), "row 0 is headed 'worker 1' instead of 'worker 0'"),
        (lambda: Schedule.parse("tick 0 1\nworker 0 - F0"), "goes on after no op"),
        (
            lambda: Schedule.parse("tick 0 1\nworker 0 F0 B0\nworker 1 B0 F0"),
            r"worker 1, tick 0 is 'B0', .* gives \"B0'\"",
        ),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_errors_draw_the_table():
    with pytest.raises(ValueError, match=r"F0@0\+2  B0@1"):
        Schedule(2, 1, (Slot(F0, 0, 2), Slot(B0, 1)), 4, 2)


def test_spread_and_accumulation():
    assert all(Schedule.spread(n, s) == Schedule.cyclic(n, s) for n, s in ((1, 1), (3, 3), (4, 4), (4, 2), (2, 5)))
    for n, s in ((32, 18), (5, 3), (7, 1)):
        schedule = Schedule.spread(n, s)
        assert schedule.offset * n == schedule.period
        assert {slot.length * 2 * s for slot in schedule.program} == {schedule.period}
    schedule = Schedule.accumulation(3, 2)
    assert schedule.feasible.all()
    assert all(sum(bool(schedule.ops_at(tick, i)) for i in range(3)) == 1 for tick in range(12, 24))
    for build in (Schedule.spread, Schedule.accumulation):
        with pytest.raises(ValueError, match="num_workers=0"):
            build(0, 2)
