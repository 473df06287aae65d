"""Executors with one stage a device equal the reference: tables, rules, uneven stages, restarts, every bubble full of NaN."""

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
from cyclic_jax.executors.lanes import Lanes
from cyclic_jax.executors.model_parallel import ModelParallelExecutor
from cyclic_jax.executors.pipeline import PipelineExecutor
from cyclic_jax.executors.placing import widen
from tests import problems
from tests.proofs import RULES, STEPS, TOLERANCE, check, custom, expected, run

pytestmark = pytest.mark.usefixtures("float64")
KINDS: dict[str, Any] = {"pipeline": PipelineExecutor, "model_parallel": ModelParallelExecutor}
TABLES = {"pipeline": cj.Schedule.pipeline, "one-op": cj.Schedule.cyclic}
CASES = [("pipeline", n) for n in (1, 2, 3, 4)] + [("model_parallel", n) for n in (2, 3, 4)]


def machine(kind: str, rule: cj.UpdateRule, optimizer: str = "sgd", **options: Any) -> Any:
    model, inner = problems.model(rule.num_stages), problems.OPTIMIZERS[optimizer]
    return KINDS[kind](model, problems.loss, inner, rule=rule, **{"fill": np.nan, **options})


def hybrid(devices: int, groups: int, axis: str = "cyclic") -> Mesh:
    return Mesh(np.asarray(jax.devices()[: devices * groups]).reshape(groups, devices), ("data", axis))


# ---- the same numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "n"), CASES)
@pytest.mark.parametrize("rule", RULES)
def test_equals_the_reference(kind, n, rule):
    """Each rule with one of the two tables, all of them for N = 3."""
    for table in TABLES if n == 3 else [["pipeline", "one-op"][(n + len(rule)) % 2]]:
        executor = machine(kind, RULES[rule](n), schedule=TABLES[table](n))
        check(executor, "sgd", problems.restart(executor.model, "sgd", n))


def test_eight_workers():
    check(machine("pipeline", cj.UpdateRule.cdp_v2(8)), "sgd", problems.restart(problems.model(8), "sgd", 8))


@pytest.mark.parametrize("kind", KINDS)
def test_adamw_and_a_fresh_start(kind):
    executor = machine(kind, cj.UpdateRule.cdp_v2(3), "adamw")
    check(executor, "adamw", problems.fresh_start(executor.model, "adamw", 3))


@pytest.mark.parametrize("residuals", ["recompute", jax.checkpoint_policies.dots_saveable])
def test_recomputed_residuals(residuals):
    executor = machine("pipeline", cj.UpdateRule.cdp_v2(2), residuals=residuals)
    check(executor, "sgd", problems.restart(executor.model, "sgd", 2))


@pytest.mark.parametrize(("kind", "devices", "groups"), [("pipeline", 2, 4), ("model_parallel", 3, 3)])
def test_hybrid_mesh(kind, devices, groups):
    executor = machine(kind, cj.UpdateRule.cdp_v2(2), mesh=hybrid(devices, groups, "stage"))
    assert executor.num_workers == 2 * groups
    check(executor, "sgd", problems.restart(executor.model, "sgd", 2 * groups), 4)


@pytest.mark.parametrize("kind", KINDS)
def test_drain_midway_and_snapshot(kind):
    executor = machine(kind, cj.UpdateRule.cdp_v2(3))
    state = problems.restart(executor.model, "sgd", 3)
    check(executor, "sgd", state, drain_after=1)
    carry = executor.init(state)
    back, metrics = executor.drain(carry)
    assert problems.distance(back, state) == 0
    assert metrics.step.tolist() == [-1] * 3
    assert problems.distance(executor.snapshot(carry).params, state.params) == 0
    for t in range(4):
        carry, _ = executor.step(carry, problems.batch(t, 3))
        snapshot, want = executor.snapshot(carry), expected(executor.rule.fresh, "sgd", state, t)[0]
        assert int(snapshot.step) == int(want.step)
        assert problems.distance(snapshot.params, want.params) <= TOLERANCE


def test_training_moves_between_executors():
    """Replicated, pipeline, model-parallel, synchronous, interleaved: two steps each, on one trajectory."""
    rule, optimizer = cj.UpdateRule.cdp_v2(3), problems.OPTIMIZERS["sgd"]
    start = state = problems.restart(problems.model(3), "sgd", 3)
    names = ("replicated", "pipeline", "model_parallel", "synchronous", "interleaved")
    for k, name in enumerate(names):
        executor = cj.make_executor(name, problems.model(3), problems.loss, optimizer, rule=rule)
        carry = executor.init(state)
        for t in (2 * k, 2 * k + 1):
            carry, _ = executor.step(carry, problems.batch(t, 3))
        state, _ = executor.drain(carry)
    want = expected(rule.fresh, "sgd", start, 2 * len(names))[0]
    assert problems.distance(state, want) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_answers_are_seen(kind):
    executor = machine(kind, cj.UpdateRule.cdp_v2(3))
    state = problems.restart(executor.model, "sgd", 3)
    got = run(executor, state, STEPS)
    for wrong in (cj.UpdateRule.cdp_v1(3).fresh, cj.UpdateRule.dp(3).fresh, custom(3).fresh):
        assert problems.distance(got[0], expected(wrong, "sgd", state, STEPS)[0]) > 1e-6


def test_a_lost_message_is_seen(monkeypatch):
    monkeypatch.setattr(Lanes, "pairs", property(lambda self: (((0, 1),), *[()] * (self.offset - 1))))
    executor = machine("pipeline", cj.UpdateRule.cdp_v2(2))
    state = problems.restart(executor.model, "sgd", 2)
    got = run(executor, state, 2)[0]
    assert not problems.distance(got, expected(executor.rule.fresh, "sgd", state, 2)[0]) <= TOLERANCE


# ---- what is compiled and held ------------------------------------------------------------------------------


def lowered(executor: Any, optimizer: str = "sgd") -> Any:
    state = problems.fresh_start(executor.model, optimizer, executor.num_workers)
    return executor.lower(executor.carry_struct(state), problems.batch(0, executor.num_workers)).compile()


@pytest.mark.parametrize("schedule", [cj.Schedule.pipeline(3), cj.Schedule.cyclic(4)], ids=["period-3", "one-op"])
def test_only_the_schedules_messages_travel(schedule):
    """Per block, and so N times a step: each message of the table once, and the inputs one device down. No gradient."""
    executor, n = (
        machine("pipeline", cj.UpdateRule.cdp_v2(schedule.num_workers), schedule=schedule),
        schedule.num_workers,
    )
    found = collectives(lowered(executor).as_text())
    assert {c.kind for c in found} == {"collective-permute"}
    travelling = Counter(pair for c in found for pair in c.pairs)
    sizes = executor.messages.sizes
    pairs = Counter((m.sender, m.receiver) for m in schedule.messages("activations"))
    wanted = Counter({pair: len(sizes) * count // n for pair, count in pairs.items()})
    wanted.update({(k + 1, k): 2 for k in range(n - 1)})  # inputs and targets
    assert travelling == wanted
    inputs = 2 * (n - 1) * (3 * 8 + 8)  # two rows of three numbers, and their targets
    assert (
        sum(c.num_bytes * len(c.pairs) for c in found)
        == inputs + executor.messages.num_bytes * sum(pairs.values()) // n
    )


def test_model_parallel_permutes_only():
    executor = machine("model_parallel", cj.UpdateRule.cdp_v2(3))
    assert {c.kind for c in collectives(lowered(executor).as_text())} == {"collective-permute"}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_residual_slots(table, n):
    pipeline, parallel = (machine(kind, cj.UpdateRule.cdp_v2(n), schedule=TABLES[table](n)) for kind in KINDS)
    assert pipeline.slots == tuple(n - j for j in range(n))
    assert parallel.slots == (1,) * n
    assert (pipeline.mesh.size, parallel.mesh.size) == (n, n * (n + 1) // 2)


def test_a_device_holds_its_stage_only():
    """Arguments a device: two versions, optimizer state and statistics of the largest stage, and what is in flight."""
    executor = machine("pipeline", cj.UpdateRule.cdp_v2(4))
    compiled = lowered(executor)
    held = executor.versions, executor.opt_states, executor.states, executor.gradients, executor.residual_slots
    predicted = sum(slots.num_bytes for slots in held) + 2 * executor.messages.num_bytes
    assert compiled.memory_analysis().argument_size_in_bytes == pytest.approx(predicted, abs=256)
    stages = [sum(leaf.nbytes for leaf in jax.tree.leaves(p)) for p in executor.model.init(jax.random.key(0))[0]]
    assert executor.versions.num_bytes == 2 * max(stages)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_lowers_for_accelerators(platform, kind):
    with jax.enable_x64(False):
        layers = [problems.linear(0, 5), problems.linear(1, problems.CLASSES, activation=False)]
        model = cj.partition(layers, 2, example=jax.ShapeDtypeStruct((2, 3), np.float32), by="layers")
        executor = KINDS[kind](model, problems.loss, optax.sgd(0.1), rule=cj.UpdateRule.cdp_v2(2))
        carry = executor.init(cj.TrainState.create(model, optax.sgd(0.1), jax.random.key(0)))
        batch = (jnp.zeros((4, 3)), jnp.zeros(4, jnp.int32))
        carry, _ = executor.step(carry, batch)
        placed = widen(jax.device_put(batch, executor.batch_sharding), executor._batch_layout)
        exported = jax.export.export(executor._jit_step, platforms=(platform,))(carry, placed)
        assert exported.platforms == (platform,)


def test_low_precision_boundaries():
    """float32 parameters, bfloat16 compute and messages: the same numbers as the synchronous executor, up to rounding."""
    layers = cj.models.residual_mlp(4, in_features=6, width=16, depth=2, dtype=jnp.bfloat16)
    model = cj.partition(layers, 2, example=jax.ShapeDtypeStruct((3, 6), np.float32), by="layers")
    ends, rng = {}, np.random.default_rng(0)
    batches = [(rng.normal(size=(6, 6)).astype(np.float32), rng.integers(0, 4, 6)) for _ in range(4)]
    for name in ("synchronous", "pipeline"):
        executor = cj.make_executor(name, model, problems.loss, optax.sgd(0.05), rule=cj.UpdateRule.cdp_v2(2))
        carry = executor.init(cj.TrainState.create(model, optax.sgd(0.05), jax.random.key(0)))
        start = executor.snapshot(carry).params
        for batch in batches:
            carry, _ = executor.step(carry, batch)
        ends[name] = executor.drain(carry)[0].params
    assert "bfloat16" in executor.messages.sizes
    moved = problems.distance(ends["synchronous"], start)
    assert problems.distance(ends["synchronous"], ends["pipeline"]) < 0.01 * moved


# ---- bad input ----------------------------------------------------------------------------------------------


def test_refused():
    rule = cj.UpdateRule.cdp_v2(3)
    with pytest.raises(ValueError, match=r"update of stage 0 depends on stage 1"):
        machine("pipeline", rule, "clip")
    with pytest.raises(ValueError, match="'dp' wants worker 0 to be fresh on stage 0"):
        machine("pipeline", cj.UpdateRule.dp(3))
    with pytest.raises(ValueError, match="as many stages as workers, got 6 and 3"):
        machine("pipeline", cj.UpdateRule.cdp_v1(3, 6), schedule=cj.Schedule.cyclic(3, 6))
    with pytest.raises(ValueError, match="the pipeline flushes"):
        machine("pipeline", cj.UpdateRule.cdp_v1(2), schedule=cj.Schedule.gpipe(2, 2))
    with pytest.raises(ValueError, match=r"up to 4 workers, got 5: its routing repeats after lcm\(1 … 5\) = 60 blocks"):
        machine("model_parallel", cj.UpdateRule.cdp_v2(5))
    with pytest.raises(ValueError, match="3 devices are needed, and the mesh has 2 along 'cyclic'"):
        machine("pipeline", rule, mesh=hybrid(2, 1))
