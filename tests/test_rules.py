"""Rules, and the schedules that can run them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyclic_jax.rules import UpdateRule
from cyclic_jax.schedule import Schedule


def test_masks():
    assert UpdateRule.dp(2, 3).fresh.tolist() == [[True] * 3] * 2
    assert UpdateRule.cdp_v1(2, 3).fresh.tolist() == [[False] * 3] * 2
    assert UpdateRule.cdp_v2(3).fresh.tolist() == [[False, False, True], [False, True, True], [True, True, True]]
    assert UpdateRule.cdp_v2(2, 4).fresh.tolist() == [[False, False, True, True], [True] * 4]
    assert UpdateRule.cdp_v2(8).fresh.sum() == 8 * 9 // 2


def test_named():
    for name in ("dp", "cdp-v1", "cdp-v2"):
        assert UpdateRule.named(name, 4).name == name
    with pytest.raises(ValueError, match="unknown rule 'cdp_v2': did you mean 'cdp-v2'"):
        UpdateRule.named("cdp_v2", 4)


def test_value_semantics():
    assert UpdateRule.cdp_v2(3) == UpdateRule.custom(UpdateRule.cdp_v2(3).fresh, "cdp-v2")
    assert hash(UpdateRule.cdp_v2(3)) == hash(UpdateRule.cdp_v2(3))
    assert UpdateRule.cdp_v2(3) != UpdateRule.cdp_v1(3)
    assert UpdateRule.dp(2, 3) != UpdateRule.dp(3, 2)
    with pytest.raises(ValueError, match="read-only"):
        UpdateRule.cdp_v2(3).fresh[0, 0] = True
    mask = np.zeros((2, 2), bool)
    rule = UpdateRule.custom(mask)
    mask[0, 0] = True
    assert not rule.fresh.any()


@pytest.mark.parametrize("n", range(2, 17))
def test_the_freshest_rule_of_the_cyclic_schedule_is_cdp_v2(n):
    for s in (s for s in range(1, 17) if 2 * s % n == 0):
        freshest, v2 = UpdateRule.freshest(Schedule.cyclic(n, s)), UpdateRule.cdp_v2(n, s)
        assert freshest == v2
        assert hash(freshest) == hash(v2)


def test_tiled():
    assert UpdateRule.cdp_v2(2).tiled(2).fresh.tolist() == [[False, True], [True, True]] * 2


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_dp_is_refused_by_cyclic_schedules_and_runs_at_once(n):
    UpdateRule.dp(n).check(Schedule.simultaneous(n, n))
    with pytest.raises(ValueError, match="'dp' wants worker 0 to be fresh on stage 0"):
        UpdateRule.dp(n).check(Schedule.cyclic(n))


@given(st.sampled_from([(2, 2), (3, 3), (4, 2), (2, 4), (8, 4)]), st.data())
def test_feasible_iff_below_the_schedules_mask(shape, data):
    schedule = Schedule.cyclic(*shape)
    size = shape[0] * shape[1]
    mask = np.reshape(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), shape)
    rule, cells = UpdateRule.custom(mask), np.argwhere(mask & ~schedule.feasible)
    if not len(cells):
        rule.check(schedule)
        return
    with pytest.raises(ValueError, match=f"wants worker {cells[0][0]} to be fresh on stage {cells[0][1]}") as error:
        rule.check(schedule)
    assert str(schedule) in str(error.value)
    assert str(rule) in str(error.value)


def test_refused():
    with pytest.raises(ValueError, match=r"bool \[N, S\].* got bool\[3\]"):
        UpdateRule.custom([True, False, True])
    with pytest.raises(ValueError, match=r"got int64\[1, 2\]"):
        UpdateRule.custom(np.array([[2, 0]]))
    with pytest.raises(ValueError, match=r"num_workers=3 does not divide 2\*num_stages=4"):
        UpdateRule.cdp_v2(3, 2)
    with pytest.raises(ValueError, match="its rows differ in length"):
        UpdateRule.custom([[True], [True, False]])
    with pytest.raises(ValueError, match="num_workers=0"):
        UpdateRule.dp(0, 2)
    with pytest.raises(ValueError, match="is for 3 workers and 3 stages, the schedule for 4 and 4") as error:
        UpdateRule.cdp_v2(3).check(Schedule.cyclic(4))
    assert str(Schedule.cyclic(4)) in str(error.value)
