"""Partitions are contiguous, complete, disjoint and optimal."""

import itertools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import cyclic_jax as cj
from cyclic_jax.balance import balance
from cyclic_jax.costs import layer_costs
from cyclic_jax.memory import layer_bytes
from tests import problems

COSTS = st.lists(st.integers(0, 20), min_size=1, max_size=9)
X = jax.ShapeDtypeStruct((4, 8), np.float32)
WIDTHS = [8, 32, 16, 64, 8]


def layers(widths: list[int]) -> tuple[cj.Layer, ...]:
    pairs = itertools.pairwise([8, *widths])
    return cj.from_nnx([lambda rngs, a=a, b=b: nnx.Linear(a, b, rngs=rngs) for a, b in pairs])


def loads(costs, ranges) -> list[float]:
    return [sum(costs[a:b]) for a, b in ranges]


@given(COSTS, st.data())
def test_balance_equals_brute_force(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    ranges = balance(costs, stages)
    assert [layer for a, b in ranges for layer in range(a, b)] == list(range(len(costs)))
    assert len(ranges) == stages
    assert all(a < b for a, b in ranges)
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    every = [loads(costs, list(itertools.pairwise([0, *cut, len(costs)]))) for cut in cuts]
    best = min((max(load), sum(x * x for x in load)) for load in every)
    mine = loads(costs, ranges)
    assert (max(mine), sum(x * x for x in mine)) == best


@given(COSTS, st.data())
def test_factors_equal_brute_force(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    factors = data.draw(st.lists(st.integers(1, 5), min_size=stages, max_size=stages))

    def weighed(ranges) -> tuple[float, float]:
        load = [f * x for f, x in zip(factors, loads(costs, ranges), strict=True)]
        return max(load), sum(x * x for x in load)

    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    every = [list(itertools.pairwise([0, *cut, len(costs)])) for cut in cuts]
    assert weighed(balance(costs, stages, factors)) == min(map(weighed, every))


@given(COSTS, st.data())
def test_never_less_balanced_than_a_greedy_cut(costs, data):
    """The greedy rule: close a stage as soon as it holds its share of the total."""
    stages = data.draw(st.integers(1, len(costs)))
    share, greedy, start = sum(costs) / stages, [], 0
    for stop in range(1, len(costs) + 1):
        left = stages - len(greedy) - 1
        if left and (sum(costs[start:stop]) >= share or len(costs) - stop == left):
            greedy.append((start, stop))
            start = stop
    greedy.append((start, len(costs)))
    assert max(loads(costs, balance(costs, stages))) <= max(loads(costs, greedy))


def test_costs_are_what_a_hand_count_gives():
    model = cj.partition(layers(WIDTHS), 5, example=X, by="layers")
    costs, pairs = layer_costs(model.layers, model.structs), list(itertools.pairwise([8, *WIDTHS]))
    assert [c.params for c in costs] == [a * b + b for a, b in pairs]
    assert [c.activation_bytes for c in costs] == [4 * b * 4 for _, b in pairs]
    for cost, (a, b) in zip(costs, pairs, strict=True):
        assert cost.flops == pytest.approx(2 * 4 * a * b, rel=0.1)


@pytest.mark.parametrize("by", ["flops", "params", "layers"])
def test_strategies_minimise_their_own_cost(by):
    every = {kind: cj.partition(layers(WIDTHS), 3, example=X, by=kind) for kind in ("flops", "params", "layers")}
    costs = layer_costs(every[by].layers, every[by].structs)
    value = [1 if by == "layers" else getattr(cost, by) for cost in costs]
    largest = {kind: max(loads(value, model.boundaries)) for kind, model in every.items()}
    assert largest[by] == min(largest.values())


def test_pipeline_memory_is_the_least_of_all_cuts():
    """(S − j) times what stage j keeps, over every way to cut; balancing flops or activations alone does worse."""
    example, stages = jax.ShapeDtypeStruct((64, 8), np.float32), 3
    model = cj.partition(layers(WIDTHS * 2), stages, example=example, by="pipeline_memory")
    kept = layer_bytes(model.layers, model.structs)

    def largest(ranges) -> float:
        return max((stages - j) * load for j, load in enumerate(loads(kept, ranges)))

    cuts = itertools.combinations(range(1, len(kept)), stages - 1)
    best = min(largest(list(itertools.pairwise([0, *cut, len(kept)]))) for cut in cuts)
    assert largest(model.boundaries) == best
    for by in ("activations", "flops", "params", "layers"):
        assert largest(cj.partition(layers(WIDTHS * 2), stages, example=example, by=by).boundaries) > best


def test_pipeline_memory_is_what_the_executor_allocates():
    """Uniform blocks: as even stages stage 0 holds N of them; lighter early stages need less room on every device."""
    blocks, rows = cj.models.residual_mlp(4, in_features=8, width=16, depth=10), 16
    example, rule = jax.ShapeDtypeStruct((rows, 8), np.float32), cj.UpdateRule.cdp_v2(3)
    sizes = {}
    for by in ("pipeline_memory", "activations", "flops"):
        model = cj.partition(blocks, 3, example=example, by=by)
        executor = cj.make_executor("pipeline", model, problems.loss, optax.sgd(0.1), rule=rule)
        state = cj.TrainState.create(model, optax.sgd(0.1), jax.random.key(0), num_workers=3)
        executor.lower(executor.carry_struct(state), (np.zeros((3 * rows, 8), np.float32), np.zeros(3 * rows, int)))
        sizes[by] = executor.residual_slots.num_bytes
    assert sizes["pipeline_memory"] < 0.8 * min(sizes["activations"], sizes["flops"])


def test_boundaries_are_taken_as_given():
    assert cj.partition(layers(WIDTHS), 2, example=X, boundaries=[(0, 1), (1, 5)]).boundaries == ((0, 1), (1, 5))


def test_describe_adds_up():
    text = cj.partition(layers(WIDTHS), 2, example=X, boundaries=[(0, 1), (1, 5)]).describe()
    *stages, ring = text.splitlines()[1:]
    assert [line.split()[:3] for line in stages] == [["0", "0-0", "72"], ["1", "1-4", "2,424"]]
    # the larger stage has 2,424 float32 = 9.5 KiB; two of it are 4,848 of 2,496 parameters
    assert ring == "messages of parameters or gradients are padded to 9.5 KiB each (1.94 times the parameters in all)"


@pytest.mark.parametrize("name", ["replicated", "zero"])
def test_describe_says_what_travels(name):
    """As large as the messages of the executors that send it."""
    model = cj.partition(layers(WIDTHS), 2, example=X, by="params")
    executor = cj.make_executor(name, model, problems.loss, optax.sgd(0.1), rule=cj.UpdateRule.cdp_v2(2))
    message = {"replicated": "format", "zero": "carried"}[name]
    assert f"padded to {getattr(executor, message).num_bytes / 1024:,.1f} KiB" in model.describe()


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([(0, 2), (3, 5)], "starts at layer 3 instead of 2: layer 2 is skipped"),
        ([(0, 3), (2, 5)], "starts at layer 2 instead of 3: layer 2 is repeated"),
        ([(0, 2), (2, 4)], "layer 4 is skipped"),
        ([(0, 2), (2, 6)], "no such layer"),
        ([(0, 0), (0, 5)], "holds no layer"),
        ([(0, 5)], "boundaries name 1 stages, but num_stages=2"),
    ],
)
def test_wrong_boundaries(boundaries, message):
    with pytest.raises(ValueError, match=message):
        cj.partition(layers(WIDTHS), 2, example=X, boundaries=boundaries)


def test_bad_input():
    with pytest.raises(ValueError, match="num_stages=6 does not fit a model of 5 layers"):
        cj.partition(layers(WIDTHS), 6, example=X)
    with pytest.raises(
        ValueError, match="by='time' is unknown: expected one of flops, params, layers, activations, pipeline_memory"
    ):
        cj.partition(layers(WIDTHS), 2, example=X, by="time")
    bad = cj.from_nnx([lambda r: nnx.Linear(8, 8, rngs=r), lambda r: nnx.Linear(9, 8, rngs=r)])
    with pytest.raises(ValueError, match=r"layer 1 \(1:Linear\) does not take what .* gives, float32\[4, 8\]"):
        cj.partition(bad, 2, example=X)
    with pytest.raises(ValueError, match="finite and not negative"):
        balance([1.0, -1.0], 1)
    with pytest.raises(ValueError, match=r"factors=\[1.0, 0.0\]: expected a positive one for each of 2 groups"):
        balance([1.0, 1.0], 2, [1.0, 0.0])


def test_state_that_changes_dtype_is_refused():
    def apply(params, state, x, *, key, train):
        return x, {"count": state["count"] * 1.5}

    layer = cj.Layer("bad", lambda key, x: ({}, {"count": np.zeros((), np.int32)}), apply)
    with pytest.raises(ValueError, match="its state changes shape or dtype"):
        cj.partition([layer], 1, example=X)
