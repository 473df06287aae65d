"""Pictures hold what the table says."""

import matplotlib
import numpy as np
import pytest
from matplotlib.patches import Rectangle

import cyclic_jax as cj
from cyclic_jax import plot

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def close():
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


@pytest.mark.parametrize(
    "schedule", [cj.Schedule.cyclic(3), cj.Schedule.pipeline(2), cj.Schedule.balanced(2, [1] * 4, [2] * 4)], ids=str
)
def test_every_op_is_drawn_once(schedule):
    axes = plot.schedule_grid(schedule)
    busy = sum(
        len(schedule.ops_at(schedule.period + t, i))
        for t in range(schedule.period)
        for i in range(schedule.num_workers)
    )
    marks = [text.get_text() for text in axes.texts]
    assert len(marks) == busy
    assert sum(mark.startswith("↑") for mark in marks) == schedule.num_workers * schedule.num_stages
    late = sum(
        step == 0
        for t in range(schedule.period)
        for i in range(schedule.num_workers)
        for _, step in schedule.ops_at(schedule.period + t, i)
    )
    assert sum(mark.endswith("'") for mark in marks) == late


def test_delayed_pairs_are_hatched():
    rule = cj.UpdateRule.cdp_v2(4)
    axes = plot.schedule_grid(cj.Schedule.cyclic(4), rule, periods=2)
    hatched = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_hatch()]
    assert len(hatched) == 2 * int((~rule.fresh).sum())
    with pytest.raises(ValueError, match="'dp' wants worker 0"):
        plot.schedule_grid(cj.Schedule.cyclic(4), cj.UpdateRule.dp(4))
    with pytest.raises(ValueError, match="periods=0"):
        plot.schedule_grid(cj.Schedule.cyclic(4), periods=0)


def test_curves():
    axes = plot.memory_curves({"a": np.array([1, 2]) * 2**20, "b": np.array([3.0]) * 2**20}, unit="MiB")
    assert [patch.get_data().values.tolist() for patch in axes.patches] == [[1, 2], [3]]
    with pytest.raises(ValueError, match="unit='GB' is unknown"):
        plot.memory_curves({"a": np.ones(2)}, unit="GB")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot.memory_curves({})
