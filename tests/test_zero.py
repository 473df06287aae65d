"""The ZeRO executor equals the reference: rules, tables, uneven stages, restarts, every bubble full of NaN."""

import functools
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
from cyclic_jax.executors import shares
from cyclic_jax.executors.ring import Ring
from cyclic_jax.executors.streams import Streams
from cyclic_jax.executors.zero import ZeroExecutor
from tests import problems
from tests.proofs import RULES, STEPS, TOLERANCE, check, custom, expected, run

pytestmark = pytest.mark.usefixtures("float64")
BALANCED = {n: cj.Schedule.balanced(n, [1] * 2 * n, [2] * 2 * n) for n in (2, 3)}


def machine(
    rule: cj.UpdateRule, optimizer: str = "sgd", schedule: cj.Schedule | None = None, **options: Any
) -> ZeroExecutor:
    model, inner = problems.model(rule.num_stages), problems.OPTIMIZERS[optimizer]
    return ZeroExecutor(model, problems.loss, inner, rule=rule, schedule=schedule, **{"fill": np.nan, **options})


@functools.cache
def shared(n: int, rule: str) -> ZeroExecutor:
    """One compilation for all tests that run it."""
    return machine(RULES[rule](n))


def restart(executor: ZeroExecutor, optimizer: str = "sgd") -> cj.TrainState:
    return problems.restart(executor.model, optimizer, executor.num_workers)


# ---- the same numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", ["v1", "v2"])
def test_one_op_a_tick(n, rule):
    check(shared(n, rule), "sgd", restart(shared(n, rule)))
    check(shared(n, rule), "sgd", problems.fresh_start(problems.model(n), "sgd", n), 3)


@pytest.mark.parametrize("rule", ["v1", "v2"])
def test_eight_workers(rule):
    executor = machine(RULES[rule](8))
    check(executor, "sgd", restart(executor))


@pytest.mark.parametrize("n", BALANCED)
@pytest.mark.parametrize("freshest", [False, True])
def test_cost_balanced_ticks_with_two_stages_an_owner(n, freshest):
    rule = cj.UpdateRule.freshest(BALANCED[n]) if freshest else cj.UpdateRule.cdp_v1(n, 2 * n)
    executor = machine(rule, schedule=BALANCED[n])
    assert Counter(executor.streams.owners) == Counter(dict.fromkeys(range(n), 2))
    check(executor, "sgd", restart(executor), 4)


def test_a_rule_of_both_kinds():
    """Stage 1 as fresh as the schedule allows, the others always delayed."""
    fresh = cj.UpdateRule.cdp_v2(3).fresh & np.array([False, True, False])
    executor = machine(cj.UpdateRule.custom(fresh))
    check(executor, "sgd", restart(executor), 4)


def test_adamw():
    executor = machine(RULES["v2"](3), "adamw")
    assert isinstance(executor.shares[0], shares.VectorShares)
    check(executor, "adamw", restart(executor, "adamw"))


def test_an_optimizer_that_looks_at_whole_leaves(monkeypatch):
    """Each leaf's update divided by its norm: not entry by entry."""
    normal = optax.chain(optax.scale_by_trust_ratio(), problems.OPTIMIZERS["adamw"])
    monkeypatch.setitem(problems.OPTIMIZERS, "trust", normal)
    executor = machine(RULES["v2"](2), "trust")
    assert isinstance(executor.shares[0], shares.TreeShares)
    check(executor, "trust", restart(executor, "trust"), 4)


def test_recomputed_residuals():
    executor = machine(RULES["v2"](2), residuals="recompute")
    check(executor, "sgd", restart(executor), 3)


@pytest.mark.parametrize(("n", "groups"), [(2, 2), (3, 3)])
def test_hybrid_mesh(n, groups):
    executor = machine(RULES["v2"](n), mesh=hybrid(n, groups))
    check(executor, "sgd", restart(executor), 4)


def hybrid(n: int, groups: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[: n * groups]).reshape(groups, n), ("data", "cyclic"))


@pytest.mark.parametrize("rule", ["v1", "v2"])
def test_drains_and_snapshots(rule):
    executor = shared(3, rule)
    state = restart(executor)
    check(executor, "sgd", state, drain_after=1)
    carry = executor.init(state)
    back, metrics = executor.drain(carry)
    assert problems.distance(back, state) == 0
    assert metrics.step.tolist() == [-1] * 3
    for t in range(3):
        snapshot = executor.snapshot(carry)
        want = expected(executor.rule.fresh, "sgd", state, max(0, t - 1))[0]
        assert int(snapshot.step) == int(want.step)
        assert problems.distance(snapshot.params, want.params) <= TOLERANCE
        carry, _ = executor.step(carry, problems.batch(t, 3))


def test_wrong_answers_are_seen():
    executor = shared(3, "v2")
    got = run(executor, restart(executor), STEPS)
    for wrong in (cj.UpdateRule.cdp_v1(3).fresh, cj.UpdateRule.dp(3).fresh, custom(3).fresh):
        assert problems.distance(got[0], expected(wrong, "sgd", restart(executor), STEPS)[0]) > 1e-6


@pytest.mark.parametrize("lost", ["riding", "sums"])
def test_a_lost_link_is_seen(monkeypatch, lost):
    real = getattr(Streams, lost)
    monkeypatch.setattr(Streams, lost, lambda *where: real(*where)[1:])
    executor = machine(RULES["v2"](3))
    got = run(executor, restart(executor), 2)[0]
    assert not problems.distance(got, expected(executor.rule.fresh, "sgd", restart(executor), 2)[0]) <= TOLERANCE


# ---- what is compiled and held ------------------------------------------------------------------------------


def lowered(executor: ZeroExecutor, optimizer: str = "sgd") -> Any:
    state = problems.fresh_start(executor.model, optimizer, executor.num_workers)
    return executor.lower(executor.carry_struct(state), problems.batch(0, executor.num_workers)).compile()


@pytest.mark.parametrize("schedule", [cj.Schedule.cyclic(3), BALANCED[2]], ids=["one-op", "balanced"])
@pytest.mark.parametrize("delayed", [False, True])
def test_only_the_schedules_messages_travel(schedule, delayed):
    """Two blocks are written out where N is even, and each holds its messages once for every block that it may be."""
    N, S = schedule.num_workers, schedule.num_stages
    rule = cj.UpdateRule.cdp_v1(N, S) if delayed else cj.UpdateRule.freshest(schedule)
    executor = machine(rule, schedule=schedule)
    found = collectives(lowered(executor).as_text())
    assert {c.kind for c in found} == {"collective-permute"}
    assert {c.num_bytes for c in found} == {8 * executor.summed.sizes["float64"]}
    assert {pair for c in found for pair in c.pairs} == pairs(schedule, "delayed_states" if delayed else "states") | (
        {(N - 1, 0)} if delayed else set()  # in a run's first step
    )
    travelling = Counter(pair for links in executor.streams.permutations() for pair in links)
    wanted = Counter((m.sender, m.receiver) for m in schedule.messages("delayed_states" if delayed else "states"))
    assert travelling == wanted


def pairs(schedule: cj.Schedule, moving: Any) -> set[tuple[int, int]]:
    return {(m.sender, m.receiver) for m in schedule.messages(moving)}


def test_hybrid_reduces_over_data_only():
    found = collectives(lowered(machine(RULES["v2"](2), mesh=hybrid(2, 2))).as_text())
    over_data = ("{{0,2},{1,3}}", "[2,2]<=[2,2]T(1,0)", "mesh['data'=2,'cyclic'=2] {'data'}")
    assert {c.kind for c in found} == {"collective-permute", "all-reduce"}
    assert all(c.groups.startswith(over_data) for c in found if c.kind == "all-reduce")


def test_a_worker_holds_its_share():
    """Of parameters and optimizer state what the largest stage needs, and two stages in flight."""
    executor = machine(RULES["v2"](4), "adamw")
    stages = [sum(leaf.nbytes for leaf in jax.tree.leaves(p)) for p in executor.model.init(jax.random.key(0))[0]]
    state = executor.init(problems.fresh_start(executor.model, "adamw", 4))
    held = {name: sum(leaf.nbytes for leaf in jax.tree.leaves(part)) // 4 for name, part in state.held.items()}
    assert held["master0"] == max(stages)
    assert held["optimizer0"] == pytest.approx(2 * max(stages), abs=16)  # and two counts
    assert {name: size for name, size in held.items() if "stream" in name} == {
        "stream0": max(stages),
        "stream1": max(stages),
    }


def test_weights_and_optimizer_state_are_updated_in_place():
    executor, copies = machine(RULES["v2"](4), "adamw"), 0
    size = executor.shares[0].format.sizes["float64"]
    for line in lowered(executor, "adamw").as_text().splitlines():
        copies += f"= f64[{size}]" in line and " copy(" in line
    assert copies <= 2  # worker N-1 keeps the sum of the stage that it owns itself, in each of two blocks


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("rule", ["v1", "v2"])
def test_it_lowers_for_accelerators(platform, rule):
    with jax.enable_x64(False):
        layers = [problems.linear(0, 5), problems.linear(1, problems.CLASSES, activation=False)]
        model = cj.partition(layers, 2, example=jax.ShapeDtypeStruct((2, 3), np.float32), by="layers")
        executor = ZeroExecutor(model, problems.loss, optax.adamw(0.1), rule=RULES[rule](2))
        carry = executor.init(cj.TrainState.create(model, optax.adamw(0.1), jax.random.key(0)))
        batch = (jnp.zeros((4, 3)), jnp.zeros(4, jnp.int32))
        carry, _ = executor.step(carry, batch)
        placed = jax.device_put(batch, executor.batch_sharding)
        assert jax.export.export(executor._jit_step, platforms=(platform,))(carry, placed).platforms == (platform,)


# ---- precision ----------------------------------------------------------------------------------------------


def rounded(layer: cj.Layer) -> cj.Layer:
    """The layer with its parameters as they are after a journey in float32, and gradients as if they had not been rounded."""

    def through(p: jax.Array) -> jax.Array:
        return p + jax.lax.stop_gradient(p.astype(jnp.float32).astype(p.dtype) - p)

    def apply(params: Any, state: Any, x: Any, *, key: Any, train: bool) -> Any:
        return layer.apply(jax.tree.map(through, params), state, x, key=key, train=train)

    return cj.Layer(layer.name, layer.init, apply)


@pytest.mark.parametrize("rule", ["v1", "v2"])
def test_streams_in_lower_precision(rule):
    """What travels is rounded, what the owner keeps is not: float64 masters, float32 streams."""
    layers = [problems.linear(0, 5), problems.linear(1, 6), problems.linear(2, problems.CLASSES, activation=False)]
    example = jax.ShapeDtypeStruct((2, problems.INPUT), jnp.float64)
    exact, low = (cj.partition(each, 3, example=example, by="layers") for each in (layers, map(rounded, layers)))
    rule, optimizer = RULES[rule](3), problems.OPTIMIZERS["sgd"]
    executor = ZeroExecutor(exact, problems.loss, optimizer, rule=rule, stream_dtype=jnp.float32)
    assert executor.carried.num_bytes == executor.summed.num_bytes / 2
    state = want = cj.TrainState.create(exact, optimizer, jax.random.key(0))
    full = state
    for t in range(4):
        want, _ = cj.reference_step(low, problems.loss, optimizer, rule.fresh, want, problems.batch(t, 3))
        full, _ = cj.reference_step(exact, problems.loss, optimizer, rule.fresh, full, problems.batch(t, 3))
    got = run(executor, state, 4)[0]
    assert problems.distance(got, want) <= TOLERANCE
    assert problems.distance(got, full) > 1e-9


# ---- bad input ----------------------------------------------------------------------------------------------


def test_refused():
    with pytest.raises(ValueError, match=r"update of stage 0 depends on stage 1 .*use the synchronous executor"):
        machine(RULES["v2"](3), "clip")
    with pytest.raises(ValueError, match="'dp' wants worker 0 to be fresh on stage 0"):
        machine(cj.UpdateRule.dp(3))
    with pytest.raises(
        ValueError, match=r"wants workers \[2\] to be fresh on stage 1: .* for all of \[1, 2\], or for none"
    ):
        machine(cj.UpdateRule.custom(cj.UpdateRule.cdp_v2(3).fresh & (np.arange(3)[:, None] == 2)))
    with pytest.raises(ValueError, match="3 devices are needed, and the mesh has 1 along 'cyclic'"):
        machine(RULES["v2"](3), mesh=Mesh(np.asarray(jax.devices()[:1]), ("cyclic",)))
    with pytest.raises(ValueError, match="the ring does not close"):
        Streams.of(Ring(cj.Schedule.gpipe(2, 2)), cj.UpdateRule.cdp_v1(2))
