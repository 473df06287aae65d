"""The replicated executor equals the reference: rules, tables, uneven stages, restarts, with every bubble full of NaN."""

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import cyclic_jax as cj
from cyclic_jax.communication import collectives
from cyclic_jax.executors.replicated import ReplicatedExecutor
from cyclic_jax.executors.ring import Ring
from tests import problems
from tests.proofs import RULES, STEPS, TOLERANCE, check, custom, expected, run

pytestmark = pytest.mark.usefixtures("float64")
BALANCED = {n: cj.Schedule.balanced(n, [1] * 2 * n, [2] * 2 * n) for n in (2, 3, 4)}


def machine(
    rule: cj.UpdateRule,
    optimizer: str = "sgd",
    schedule: cj.Schedule | None = None,
    mesh: Mesh | None = None,
    **options: Any,
) -> ReplicatedExecutor:
    model = problems.model(rule.num_stages)
    inner = problems.OPTIMIZERS[optimizer]
    options = {"fill": np.nan, **options}
    return ReplicatedExecutor(model, problems.loss, inner, rule=rule, schedule=schedule, mesh=mesh, **options)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", RULES)
def test_one_op_a_tick(n, rule):
    executor = machine(RULES[rule](n))
    check(executor, "sgd", problems.restart(problems.model(n), "sgd", n))
    check(executor, "sgd", problems.fresh_start(problems.model(n), "sgd", n))


@pytest.mark.parametrize("rule", ["v1", "v2"])
def test_eight_workers(rule):
    check(machine(RULES[rule](8)), "sgd", problems.restart(problems.model(8), "sgd", 8))


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("freshest", [False, True])
def test_cost_balanced_ticks(n, freshest):
    schedule = BALANCED[n]
    rule = cj.UpdateRule.freshest(schedule) if freshest else cj.UpdateRule.cdp_v1(n, 2 * n)
    check(machine(rule, schedule=schedule), "sgd", problems.restart(problems.model(2 * n), "sgd", n))


@pytest.mark.parametrize(("n", "s"), [(4, 2), (2, 4), (2, 1), (3, 6)])
def test_other_ratios(n, s):
    check(machine(cj.UpdateRule.cdp_v2(n, s)), "sgd", problems.restart(problems.model(s), "sgd", n))


@pytest.mark.parametrize("rule", ["v1", "v2"])
def test_adamw(rule):
    check(machine(RULES[rule](3), "adamw"), "adamw", problems.restart(problems.model(3), "adamw", 3))


@pytest.mark.parametrize("residuals", ["recompute", jax.checkpoint_policies.dots_saveable])
def test_recomputed_residuals(residuals):
    executor, saving = (machine(cj.UpdateRule.cdp_v2(2), residuals=policy) for policy in (residuals, "save"))
    check(executor, "sgd", problems.restart(problems.model(2), "sgd", 2))
    saving.lower(saving.init(problems.fresh_start(problems.model(2), "sgd", 2)), problems.batch(0, 2))
    bytes_kept = [sum(op.residual_bytes for op in x.ops) for x in (executor, saving)]
    assert bytes_kept[0] < bytes_kept[1]


@pytest.mark.parametrize("after", [0, 1, 3])
def test_drain_midway_and_go_on(after):
    executor = machine(cj.UpdateRule.cdp_v2(3))
    check(executor, "sgd", problems.restart(problems.model(3), "sgd", 3), drain_after=after)


@pytest.mark.parametrize("rule", ["v1", "v2"])
def test_draining_before_the_first_step_gives_the_state_back(rule):
    executor, state = machine(RULES[rule](3)), problems.restart(problems.model(3), "sgd", 3)
    back, metrics = executor.drain(executor.init(state))
    assert problems.distance(back, state) == 0
    assert metrics.step.tolist() == [-1] * 3


@pytest.mark.parametrize("rule", ["v1", "v2", "custom"])
def test_snapshot_is_the_newest_complete_step(rule):
    executor, state = machine(RULES[rule](3)), problems.restart(problems.model(3), "sgd", 3)
    carry = executor.init(state)
    assert problems.distance(executor.snapshot(carry).params, state.params) <= TOLERANCE
    for t in range(4):
        carry, _ = executor.step(carry, problems.batch(t, 3))
        snapshot = executor.snapshot(carry)
        want = expected(executor.rule.fresh, "sgd", state, t)[0]
        assert int(snapshot.step) == int(want.step)
        assert problems.distance(snapshot.params, want.params) <= TOLERANCE


def test_wrong_answers_are_seen():
    state = problems.restart(problems.model(3), "sgd", 3)
    got = run(machine(cj.UpdateRule.cdp_v2(3)), state, STEPS)
    for wrong in (cj.UpdateRule.cdp_v1(3).fresh, cj.UpdateRule.dp(3).fresh, custom(3).fresh):
        assert problems.distance(got[0], expected(wrong, "sgd", state, STEPS)[0]) > 1e-6


def test_a_bubble_that_runs_is_seen(monkeypatch):
    """Without the guard of the start, late workers would work on what their buffers hold: NaN."""
    from cyclic_jax.executors import replicated_period

    real = replicated_period.when

    def careless(predicate, body, memory, changes):
        return (
            real(jnp.ones_like(predicate), body, memory, changes)
            if "targets" in changes
            else real(predicate, body, memory, changes)
        )

    monkeypatch.setattr(replicated_period, "when", careless)
    state = problems.restart(problems.model(3), "sgd", 3)
    got = run(machine(cj.UpdateRule.cdp_v2(3)), state, 3)[0]
    monkeypatch.undo()
    want = expected(cj.UpdateRule.cdp_v2(3).fresh, "sgd", state, 3)[0]
    assert not problems.distance(got, want) <= TOLERANCE


# ---- data × cyclic ------------------------------------------------------------------------------------------


def hybrid(n: int, groups: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[: n * groups]).reshape(groups, n), ("data", "cyclic"))


@pytest.mark.parametrize(("n", "groups"), [(2, 2), (3, 2), (2, 4)])
def test_hybrid_mesh(n, groups):
    executor = machine(cj.UpdateRule.cdp_v2(n), mesh=hybrid(n, groups))
    check(executor, "sgd", problems.restart(problems.model(n), "sgd", n * groups), 4)


# ---- what is compiled ---------------------------------------------------------------------------------------


def compiled(executor: ReplicatedExecutor, optimizer: str = "sgd") -> str:
    state = problems.fresh_start(executor.model, optimizer, executor.num_workers)
    return executor.lower(executor.carry_struct(state), problems.batch(0, executor.num_workers)).compile().as_text()


@pytest.mark.parametrize("schedule", [cj.Schedule.cyclic(3), cj.Schedule.cyclic(4), BALANCED[2]], ids=str)
def test_point_to_point_only_and_the_schedules_own_messages(schedule):
    executor = machine(cj.UpdateRule.freshest(schedule), schedule=schedule)
    found = collectives(compiled(executor))
    assert found
    assert {c.kind for c in found} == {"collective-permute"}
    assert {c.num_bytes for c in found} == {8 * executor.format.sizes["float64"]}
    permutations = executor.ring.permutations()
    assert Counter(c.pairs for c in found) == Counter(pairs for pairs, _ in permutations)
    sent = Counter(pair for pairs, times in permutations for pair in pairs * times)
    assert sent == Counter((m.sender, m.receiver) for m in schedule.messages())


def test_hybrid_reduces_over_data_only():
    executor = machine(cj.UpdateRule.cdp_v2(2), mesh=hybrid(2, 2))
    found = [c for c in collectives(compiled(executor)) if c.kind == "all-reduce"]
    assert found
    for reduction in found:
        # three ways to print the same groups, by the compiler's version
        over_data = ("{{0,2},{1,3}}", "[2,2]<=[2,2]T(1,0)", "mesh['data'=2,'cyclic'=2] {'data'}")
        assert reduction.groups.startswith(over_data), reduction


def test_the_ring_needs_few_boxes():
    """One where a finished sum is used in the very next tick; three where several wait for their first use."""
    assert all(max(Ring(cj.Schedule.cyclic(n)).boxes) == 0 for n in (1, 2, 3, 4, 8))
    assert all(max(Ring(schedule).boxes) <= 2 for schedule in BALANCED.values())


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_it_lowers_for_accelerators(platform):
    with jax.enable_x64(False):
        rule = cj.UpdateRule.cdp_v2(2)
        layers = [problems.linear(0, 5), problems.linear(1, problems.CLASSES, activation=False)]
        model = cj.partition(layers, 2, example=jax.ShapeDtypeStruct((2, 3), np.float32), by="layers")
        optimizer = optax.sgd(0.1)
        executor = ReplicatedExecutor(model, problems.loss, optimizer, rule=rule)
        carry = executor.init(cj.TrainState.create(model, optimizer, jax.random.key(0)))
        batch = (jnp.zeros((4, 3)), jnp.zeros(4, jnp.int32))
        executor.lower(carry, batch)
        carry = type(carry)(**{**vars(carry), "flight": executor._jit_flight(), "key": carry.key})
        exported = jax.export.export(executor._jit_step, platforms=(platform,))(
            carry, jax.device_put(batch, executor.batch_sharding)
        )
        assert exported.platforms == (platform,)


def test_weights_are_not_copied_but_once_in_a_run():
    """What is left is theta_T put in place in a run's step 1, guarded: one copy of each delayed weight."""
    for rule in (cj.UpdateRule.cdp_v1(3), cj.UpdateRule.cdp_v2(3)):
        layers = [problems.linear(j, 37 + j) for j in range(5)] + [problems.linear(5, problems.CLASSES, False)]
        model = cj.partition(layers, 3, example=jax.ShapeDtypeStruct((2, 3), np.float64), by="layers")
        executor = ReplicatedExecutor(model, problems.loss, problems.OPTIMIZERS["sgd"], rule=rule)
        weights = {
            leaf.shape: j for j, layer in enumerate(model.init(jax.random.key(0))[0]) for leaf in layer_weights(layer)
        }
        text = compiled(executor)
        for shape, stage in weights.items():
            copies = len(re.findall(rf"= f64\[{shape[0]},{shape[1]}\]\S* copy\(", text))
            assert copies <= (0 if rule.fresh[:, stage].all() else 1), (rule.name, shape, copies)


def layer_weights(params: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 2]


# ---- precision ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_residual_is_a_copy_of_the_weights(dtype):
    model, optimizer = mlp(dtype), optax.sgd(0.1)
    executor = ReplicatedExecutor(model, problems.loss, optimizer, rule=cj.UpdateRule.cdp_v2(2))
    executor.lower(executor.init(cj.TrainState.create(model, optimizer, jax.random.key(0))), mlp_batch(0))
    weights = {
        leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))[0]) if leaf.ndim > 1
    }
    kept = {leaf.shape for op in executor.ops for leaf in op.residual_structs}
    assert kept
    assert not weights & kept


def mlp(dtype: Any) -> cj.StagedModel:
    layers = cj.models.residual_mlp(4, in_features=6, width=16, depth=2, dtype=dtype)
    return cj.partition(layers, 2, example=jax.ShapeDtypeStruct((3, 6), np.float32), by="layers")


def mlp_batch(t: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(t)
    return rng.normal(size=(6, 6)).astype(np.float32), rng.integers(0, 4, 6)


def test_low_precision_compute_follows_the_synchronous_executor():
    """float32 parameters, bfloat16 compute and boundaries: the same numbers up to a few roundings of bfloat16."""
    model, optimizer, rule, ends = mlp(jnp.bfloat16), optax.sgd(0.05), cj.UpdateRule.cdp_v2(2), {}
    assert {leaf.dtype for leaf in jax.tree.leaves(model.structs[1:-1])} == {jnp.dtype(jnp.bfloat16)}
    for name in ("synchronous", "replicated"):
        executor = cj.make_executor(name, model, problems.loss, optimizer, rule=rule)
        carry = executor.init(cj.TrainState.create(model, optimizer, jax.random.key(0)))
        start = executor.snapshot(carry).params
        for t in range(4):
            carry, _ = executor.step(carry, mlp_batch(t))
        ends[name] = executor.drain(carry)[0].params
        assert {leaf.dtype for leaf in jax.tree.leaves(ends[name])} == {jnp.dtype("float32")}
    moved = problems.distance(ends["synchronous"], start)
    assert problems.distance(ends["synchronous"], ends["replicated"]) < 0.01 * moved


# ---- bad input ----------------------------------------------------------------------------------------------


def test_refused():
    model, rule = problems.model(3), cj.UpdateRule.cdp_v2(3)
    with pytest.raises(ValueError, match=r"update of stage 0 depends on stage 1 .*use the synchronous executor"):
        machine(rule, "clip")
    with pytest.raises(ValueError, match="'dp' wants worker 0 to be fresh on stage 0"):
        machine(cj.UpdateRule.dp(3))
    with pytest.raises(ValueError, match="3 devices are needed, and the mesh has 1 along 'cyclic'"):
        machine(rule, mesh=Mesh(np.asarray(jax.devices()[:1]), ("cyclic",)))
    with pytest.raises(ValueError, match="16 devices are needed, and there are 10"):
        ReplicatedExecutor(problems.model(8), problems.loss, optax.sgd(0.1), rule=cj.UpdateRule.cdp_v1(16, 8))
    with pytest.raises(ValueError, match="the ring does not close"):
        machine(cj.UpdateRule.cdp_v1(2), schedule=cj.Schedule.gpipe(2, 2))
    with pytest.raises(ValueError, match="residuals='none'"):
        machine(rule, residuals="none")
    executor = machine(rule)
    with pytest.raises(ValueError, match="10 rows cannot be divided among 3 workers"):
        executor.step(executor.init(problems.fresh_start(model, "sgd", 3)), (np.zeros((10, 3)), np.zeros(10, int)))
