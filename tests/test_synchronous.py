"""The synchronous executor equals the reference: any mask, any ratio of N to S, any optimizer, fresh or restarted."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

import cyclic_jax as cj
from cyclic_jax.communication import collectives
from tests import problems

pytestmark = pytest.mark.usefixtures("float64")
STEPS, TOLERANCE = 6, 1e-12
CASES = [(n, s, "sgd") for n, s in [(1, 1), (1, 3), (2, 2), (3, 3), (4, 4), (8, 8), (4, 2), (2, 4), (8, 4), (3, 2)]]
CASES += [(n, s, name) for n, s in [(1, 1), (2, 2), (4, 2), (3, 3), (8, 8)] for name in ("adamw", "clip")]


@functools.cache
def executor(num_workers: int, num_stages: int, optimizer: str, devices: int | None = None, data: int = 1) -> Any:
    mesh = None
    if devices is not None:
        mesh = Mesh(np.asarray(jax.devices()[: data * devices]).reshape(data, devices), ("data", "cyclic"))
    rule = cj.UpdateRule.dp(num_workers, num_stages)
    model = problems.model(num_stages)
    return cj.make_executor("synchronous", model, problems.loss, problems.OPTIMIZERS[optimizer], rule=rule, mesh=mesh)


def masks(num_workers: int, num_stages: int) -> st.SearchStrategy[np.ndarray]:
    cells = st.lists(st.booleans(), min_size=num_workers * num_stages, max_size=num_workers * num_stages)
    return cells.map(lambda bits: np.array(bits, bool).reshape(num_workers, num_stages))


def run(machine: Any, state: cj.TrainState, steps: int, seed: int) -> tuple[cj.TrainState, list[Any]]:
    carry, losses = machine.init(state), []
    for t in range(steps):
        carry, metrics = machine.step(carry, problems.batch(t, machine.num_workers, seed=seed))
        losses.append(metrics)
    return machine.drain(carry)[0], losses


def expected(
    case: tuple[int, int, str], fresh: np.ndarray, state: cj.TrainState, steps: int, seed: int
) -> tuple[cj.TrainState, list[Any]]:
    _, num_stages, optimizer = case
    step, losses = problems.reference(num_stages, len(fresh), optimizer), []
    for t in range(steps):
        state, metrics = step(fresh, state, problems.batch(t, len(fresh), seed=seed))
        losses.append(metrics)
    return state, losses


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_equals_the_reference(case):
    num_workers, num_stages, optimizer = case

    @settings(max_examples=6)
    @given(masks(num_workers, num_stages), st.booleans(), st.integers(0, 99))
    def check(mask, again, seed):
        start = problems.restart if again else problems.fresh_start
        state = start(problems.model(num_stages), optimizer, num_workers, seed)
        machine = executor(*case).with_rule(cj.UpdateRule.custom(mask))
        got, want = run(machine, state, STEPS, seed), expected(case, mask, state, STEPS, seed)
        assert problems.distance(got, want) <= TOLERANCE

    check()


@pytest.mark.parametrize("cell", [(0, 0), (1, 2), (3, 3)])
def test_a_mask_wrong_in_one_cell_is_seen(cell):
    case = (4, 4, "sgd")
    rule = cj.UpdateRule.cdp_v2(4)
    wrong = rule.fresh.copy()
    wrong[cell] = ~wrong[cell]
    state = problems.restart(problems.model(4), "sgd", 4)
    got = run(executor(*case).with_rule(rule), state, STEPS, 0)
    assert problems.distance(got, expected(case, rule.fresh, state, STEPS, 0)) <= TOLERANCE
    assert problems.distance(got, expected(case, wrong, state, STEPS, 0)) > 1e-6


def test_a_forgotten_previous_version_is_seen():
    case, fresh = (4, 4, "sgd"), cj.UpdateRule.cdp_v2(4).fresh
    state = problems.restart(problems.model(4), "sgd", 4)
    forgotten = dataclasses.replace(state, previous_params=state.params)
    got = run(executor(*case).with_rule(cj.UpdateRule.cdp_v2(4)), forgotten, STEPS, 0)
    assert problems.distance(got, expected(case, fresh, state, STEPS, 0)) > 1e-6


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_workers_that_share_a_device_give_the_same_numbers(devices):
    case, rule = (4, 4, "adamw"), cj.UpdateRule.cdp_v2(4)
    state = problems.restart(problems.model(4), "adamw", 4)
    got = run(executor(*case, devices=devices).with_rule(rule), state, STEPS, 0)
    assert problems.distance(got, expected(case, rule.fresh, state, STEPS, 0)) <= TOLERANCE


@pytest.mark.parametrize(("devices", "data"), [(3, 2), (1, 2)])
def test_hybrid_mesh(devices, data):
    case, rule = (3, 3, "sgd"), cj.UpdateRule.cdp_v2(3)
    state = problems.restart(problems.model(3), "sgd", data * 3)
    machine = executor(*case, devices=devices, data=data).with_rule(rule)
    assert machine.num_workers == 6
    want = expected(case, rule.tiled(data).fresh, state, 4, 0)
    assert problems.distance(run(machine, state, 4, 0), want) <= TOLERANCE


def test_mean_over_micro_batches_is_the_mean_over_the_batch():
    """Under dp, N = 4 micro-batches of one row equal N = 1 micro-batch of four, where no layer mixes rows."""
    layers = [problems.linear(0, 5), problems.linear(1, problems.CLASSES, activation=False)]
    optimizer, ends = problems.OPTIMIZERS["sgd"], []
    for workers in (1, 4):
        example = jax.ShapeDtypeStruct((4 // workers, problems.INPUT), np.float64)
        model = cj.partition(layers, 2, example=example, by="layers")
        rule = cj.UpdateRule.dp(workers, 2)
        machine = cj.make_executor("synchronous", model, problems.loss, optimizer, rule=rule)
        state = cj.TrainState.create(model, optimizer, jax.random.key(0), num_workers=workers)
        carry = machine.init(state)
        for t in range(3):
            carry, metrics = machine.step(carry, problems.batch(t, 1, rows=4))
        ends.append((machine.drain(carry)[0].params, metrics.loss.mean()))
    assert problems.distance(*ends) <= TOLERANCE


def test_drain_and_go_on_equals_never_having_drained():
    machine = executor(4, 4, "sgd").with_rule(cj.UpdateRule.cdp_v2(4))
    state = problems.fresh_start(problems.model(4), "sgd", 4)
    carry = machine.init(state)
    for t in range(5):
        carry, _ = machine.step(carry, problems.batch(t, 4))
        if t == 2:
            carry = machine.init(machine.drain(carry)[0])
    straight, _ = run(machine, state, 5, 0)
    assert problems.distance(machine.drain(carry)[0], straight) <= TOLERANCE


def test_snapshot_and_drain_leave_the_carry_usable():
    machine = executor(4, 4, "sgd").with_rule(cj.UpdateRule.cdp_v2(4))
    carry = machine.init(problems.restart(problems.model(4), "sgd", 4))
    snapshot, (state, metrics) = machine.snapshot(carry), machine.drain(carry)
    assert problems.distance(snapshot.params, state.params) == 0
    means = jax.tree.map(lambda leaf: leaf.mean(0) if leaf.dtype == float else leaf[0], state.model_state)
    assert problems.distance(snapshot.model_state, means) <= TOLERANCE
    assert metrics.step.tolist() == [-1] * 4
    machine.step(carry, problems.batch(0, 4))


def test_the_compiled_step_reduces_and_nothing_else():
    machine = executor(4, 4, "sgd")
    carry = machine.carry_struct(problems.fresh_start(problems.model(4), "sgd", 4))
    text = machine.lower(carry, problems.batch(0, 4)).compile().as_text()
    assert [found.kind for found in collectives(text)] == ["all-reduce"]


def test_flax_batch_norm_and_dropout_equal_the_reference_too():
    options = {"in_features": 3, "width": 6, "depth": 2, "batch_norm": True, "dropout": 0.3, "param_dtype": np.float64}
    layers, optimizer = cj.models.residual_mlp(problems.CLASSES, **options), problems.OPTIMIZERS["sgd"]
    model = cj.partition(layers, 2, example=jax.ShapeDtypeStruct((2, 3), np.float64), by="layers")
    rule = cj.UpdateRule.cdp_v2(2)
    machine = cj.make_executor("synchronous", model, problems.loss, optimizer, rule=rule)
    state = cj.TrainState.create(model, optimizer, jax.random.key(0))
    got, _ = run(machine, state, 3, 0)
    step = jax.jit(functools.partial(cj.reference_step, model, problems.loss, optimizer, rule.fresh))
    for t in range(3):
        state, _ = step(state, problems.batch(t, 2))
    assert problems.distance(got, state) <= TOLERANCE


def test_metrics_name_their_step():
    machine = executor(4, 4, "sgd")
    _, losses = run(machine, problems.fresh_start(problems.model(4), "sgd", 4), 3, 0)
    assert [m.step.tolist() for m in losses] == [[t] * 4 for t in range(3)]


def test_bad_input():
    machine, model = executor(4, 4, "sgd"), problems.model(4)
    carry = machine.init(problems.fresh_start(model, "sgd", 4))
    with pytest.raises(ValueError, match="10 rows cannot be divided among 4 workers"):
        machine.step(carry, (np.zeros((10, 3)), np.zeros(10, int)))
    with pytest.raises(ValueError, match="share their leading axis"):
        machine.step(carry, (np.zeros((8, 3)), np.zeros(4, int)))
    machine.step(carry, problems.batch(0, 4))  # the refused batches did not cost the carry
    with pytest.raises(ValueError, match=r"leading axis must be the number of workers, 4"):
        machine.init(problems.fresh_start(model, "sgd", 2))
    make = functools.partial(cj.make_executor, loss=problems.loss, optimizer=problems.OPTIMIZERS["sgd"])
    rule = cj.UpdateRule.cdp_v2(4)
    with pytest.raises(ValueError, match="did you mean 'synchronous'"):
        make("synchronus", model, rule=rule)
    with pytest.raises(ValueError, match="has 3 stages, the model has 4"):
        make("synchronous", model, rule=cj.UpdateRule.cdp_v2(3))
    with pytest.raises(ValueError, match="does not divide 4 workers"):
        make("synchronous", model, rule=rule, mesh=Mesh(np.asarray(jax.devices()[:3]), ("cyclic",)))
    with pytest.raises(ValueError, match="mesh axes are"):
        make("synchronous", model, rule=rule, mesh=Mesh(np.asarray(jax.devices()[:4]), ("workers",)))
    with pytest.raises(ValueError, match="worker 0"):
        make("synchronous", model, rule=cj.UpdateRule.dp(4, 4), schedule=cj.Schedule.cyclic(4))
