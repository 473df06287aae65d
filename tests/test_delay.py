"""delay_by_stage: against the inner optimizer, against the reference, and inside everything optax users put around
it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

import cyclic_jax as cj
from cyclic_jax.optimizer import by_stage
from tests import problems

pytestmark = pytest.mark.usefixtures("float64")
DROP = optax.piecewise_constant_schedule(0.1, {2: 0.1})
INNER = {
    "sgd": optax.sgd(DROP, momentum=0.9),
    "adamw": optax.adamw(DROP, weight_decay=0.1),
    "chain": optax.chain(optax.clip_by_global_norm(0.5), optax.trace(0.9), optax.scale(-0.1)),
    "inject": optax.inject_hyperparams(optax.adamw)(learning_rate=DROP, weight_decay=0.1),
    "multi_steps": optax.MultiSteps(optax.adam(0.1), every_k_schedule=2).gradient_transformation(),
    "muon": optax.contrib.muon(0.05),
}
STEPS = 7


def parameters() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"encoder": {"w": jnp.asarray(rng.normal(size=(3, 2)))}, "head": jnp.asarray(rng.normal(size=4))}


LABELS = {"encoder": 0, "head": 1}


def gradients(t: int) -> dict[str, Any]:
    rng = np.random.default_rng((1, t))
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape)), parameters())


def trajectory(tx: optax.GradientTransformation, **extra: Any) -> list[Any]:
    """The parameters after 0, 1, 2, … steps of given gradients."""
    tx = optax.with_extra_args_support(tx)
    params = parameters()
    state, path, update = tx.init(params), [params], jax.jit(tx.update)
    for t in range(STEPS):
        updates, state = update(gradients(t), state, params, **extra)
        params = optax.apply_updates(params, updates)
        path.append(params)
    return path


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("traced", [False, True])
def test_all_fresh_is_the_inner_optimizer_to_the_bit(name, traced):
    row = jnp.array([True, True])
    tx = cj.delay_by_stage(INNER[name], LABELS, fresh=None if traced else [True, True])
    assert same(trajectory(tx, **({"fresh": row} if traced else {})), trajectory(INNER[name]))


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("traced", [False, True])
def test_none_fresh_is_one_step_late_to_the_bit(name, traced):
    row = jnp.array([False, False])
    tx = cj.delay_by_stage(INNER[name], LABELS, fresh=None if traced else [False, False])
    late, inner = trajectory(tx, **({"fresh": row} if traced else {})), trajectory(INNER[name])
    assert same(late[0], late[1])
    assert same(late[1:], inner[:-1])
    assert not same(late, inner)


@pytest.mark.parametrize("name", INNER)
def test_mixed_rows_take_each_stage_from_its_own_trajectory(name):
    mixed = trajectory(cj.delay_by_stage(INNER[name], LABELS, fresh=[False, True]))
    inner = trajectory(INNER[name])
    for t in range(1, STEPS + 1):
        assert same(mixed[t]["encoder"], inner[t - 1]["encoder"])
        assert same(mixed[t]["head"], inner[t]["head"])


def test_static_rows_cost_no_buffer_where_fresh():
    params = parameters()
    sizes = [
        sum(leaf.size for leaf in jax.tree.leaves(cj.delay_by_stage(optax.sgd(0.1), LABELS, row).init(params)))
        for row in ([True, True], [False, True], [False, False])
    ]
    assert sizes == [0, 6, 10]


def test_a_row_that_changes_hands_out_what_was_missed():
    tx, params, inner = cj.delay_by_stage(INNER["adamw"], LABELS), parameters(), trajectory(INNER["adamw"])
    state = tx.init(params)
    for t, row in enumerate([(False, False), (True, False), (True, True), (False, True)]):
        updates, state = tx.update(gradients(t), state, params, fresh=np.array(row))
        params = optax.apply_updates(params, updates)
        for stage, fresh in zip(("encoder", "head"), row, strict=True):
            version = t + 1 if fresh else t
            assert problems.distance(params[stage], inner[version][stage]) <= 1e-12


def test_multi_steps_outside():
    """Accumulating two gradients around the delay: the delay is one *update*, not one micro-step."""
    late = trajectory(optax.MultiSteps(cj.delay_by_stage(optax.adam(0.1), LABELS, [False, False]), 2))
    inner = trajectory(optax.MultiSteps(optax.adam(0.1), 2))
    assert same(late[4:], inner[2:-2])
    assert not same(late, inner)


def test_delaying_the_gradient_instead_would_differ():
    """With clipping by global norm and a drop, a delayed gradient is not a delayed update."""
    tx = INNER["chain"]
    params, state = parameters(), tx.init(parameters())
    late = jax.tree.map(jnp.zeros_like, params["encoder"])
    for t in range(STEPS):
        updates, state = tx.update({**gradients(t), "encoder": late}, state, params)
        params, late = optax.apply_updates(params, updates), gradients(t)["encoder"]
    right = trajectory(cj.delay_by_stage(tx, LABELS, [False, True]))[-1]
    assert problems.distance(params, right) > 1e-3


@functools.cache
def workers_loop(num_workers: int, num_stages: int, optimizer: str) -> Any:
    """N workers in one vmap, each with its own view and its own delay_by_stage state: the rule by updates alone."""
    model, inner = problems.model(num_stages), problems.OPTIMIZERS[optimizer]
    # one state per stage, as in a canonical state, so that a restart can begin from one
    tx = cj.delay_by_stage(by_stage(inner, jax.eval_shape(model.init, jax.random.key(0))[0]))

    @jax.jit
    def step(fresh: Any, key: Any, t: Any, views: Any, delay: Any, statistics: Any, batch: Any) -> Any:
        def gradient(view: Any, statistics: Any, batch: Any, worker: Any) -> Any:
            def f(params: Any) -> Any:
                k = jax.random.fold_in(jax.random.fold_in(key, t), worker)
                outputs, new = model.apply(params, statistics, batch[0], key=k)
                return problems.loss(outputs, batch[1]), new

            return jax.grad(f, has_aux=True)(view)

        split = jax.tree.map(lambda a: a.reshape(num_workers, -1, *a.shape[1:]), batch)
        grads, statistics = jax.vmap(gradient)(views, statistics, split, jnp.arange(num_workers))
        mean = jax.tree.map(lambda g: g.mean(0), grads)
        updates, delay = jax.vmap(lambda d, v, row: tx.update(mean, d, v, fresh=row))(delay, views, fresh)
        return optax.apply_updates(views, updates), delay, statistics

    return step


SHAPES = [(2, 2, name) for name in problems.OPTIMIZERS] + [(3, 3, "adamw"), (4, 2, "clip")]
SHAPES += [(1, 1, "sgd"), (3, 3, "sgd"), (4, 4, "sgd"), (8, 8, "sgd")]


@pytest.mark.parametrize(("num_workers", "num_stages", "optimizer"), SHAPES)
def test_equals_the_reference(num_workers, num_stages, optimizer):
    step = workers_loop(num_workers, num_stages, optimizer)
    size = num_workers * num_stages

    def furthest(mask: np.ndarray, fresh: np.ndarray, again: bool, seed: int) -> float:
        """How far any worker's view, under ``mask``, ever gets from the reference's, under ``fresh``."""
        start = problems.restart if again else problems.fresh_start
        state, worst = start(problems.model(num_stages), optimizer, num_workers, seed), 0.0
        views, statistics = seen(mask, state), state.model_state
        inner = jax.tree.map(lambda leaf: jnp.stack([leaf] * num_workers), state.opt_state)
        owed = jax.tree.map(lambda now, view: now - view, seen(np.ones_like(mask), state), views)
        delay = cj.DelayByStageState(inner, owed)
        for t in range(int(state.step), int(state.step) + 6):
            batch = problems.batch(t, num_workers, seed=seed)
            views, delay, statistics = step(mask, state.key, t, views, delay, statistics, batch)
            state, _ = problems.reference(num_stages, num_workers, optimizer)(fresh, state, batch)
            worst = max(worst, problems.distance((views, statistics), (seen(fresh, state), state.model_state)))
        return worst

    @settings(max_examples=4)
    @given(st.lists(st.booleans(), min_size=size, max_size=size), st.booleans(), st.integers(0, 99))
    def check(bits, again, seed):
        mask = np.array(bits).reshape(num_workers, num_stages)
        assert furthest(mask, mask, again, seed) <= 1e-12

    check()
    never = np.zeros((num_workers, num_stages), bool)
    wrong = never.copy()
    wrong[-1, 0] = True
    assert furthest(wrong, never, True, 0) > 1e-6


def seen(mask: np.ndarray, state: cj.TrainState) -> tuple[Any, ...]:
    """What each worker sees of each stage, with a worker axis."""
    views = []
    for column, now, before in zip(mask.T, state.params, state.previous_params, strict=True):
        choose = functools.partial(lambda rows, a, b: jnp.stack([a if yes else b for yes in rows]), column)
        views.append(jax.tree.map(choose, now, before))
    return tuple(views)


def test_under_shard_map_with_a_row_picked_by_axis_index():
    mesh, rule = Mesh(np.asarray(jax.devices()[:2]), ("cyclic",)), cj.UpdateRule.custom([[False, True], [True, False]])
    tx = cj.delay_by_stage(INNER["adamw"], LABELS)

    def one(params: Any) -> Any:
        row, state = jnp.asarray(rule.fresh)[jax.lax.axis_index("cyclic")], tx.init(params)
        for t in range(3):
            updates, state = tx.update(gradients(t), state, params, fresh=row)
            params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda leaf: leaf[None], params)

    spec = PartitionSpec("cyclic")
    many = jax.shard_map(one, mesh=mesh, in_specs=PartitionSpec(), out_specs=spec, check_vma=False)
    views = jax.jit(many)(parameters())
    inner = trajectory(INNER["adamw"])
    for i, row in enumerate(rule.fresh):
        for stage, fresh in zip(("encoder", "head"), row, strict=True):
            got = jax.tree.map(lambda leaf, i=i: leaf[i], views[stage])
            assert problems.distance(got, inner[3 if fresh else 2][stage]) <= 1e-12


def test_state_survives_a_checkpoint(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    tx, params = cj.delay_by_stage(INNER["adamw"], LABELS, [False, True]), parameters()
    _, state = tx.update(gradients(0), tx.init(params), params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "state", jax.tree.map(jnp.zeros_like, state))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert same(back, state)


def test_low_precision_parameters_keep_their_dtype():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), parameters())
    tx = cj.delay_by_stage(optax.sgd(0.1), LABELS, [False, True])
    updates, state = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    assert {leaf.dtype for leaf in jax.tree.leaves((updates, state))} == {jnp.dtype(jnp.bfloat16)}


def test_all_fresh_keeps_updates_of_more_precision_than_the_parameters():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), parameters())
    inner = optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.float32)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), gradients(0))
    want, _ = inner.update(grads, inner.init(params), params)
    tx = cj.delay_by_stage(inner, LABELS, [True, True])
    got, _ = tx.update(grads, tx.init(params), params)
    assert same(got, want)
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {leaf.dtype for leaf in jax.tree.leaves(want)}


def test_gamma_lambda_of_one_and_a_half():
    """On a quadratic the rule without delay converges for gamma·lambda < 2, with a delay of one step for < 1."""

    def end(gamma: float, fresh: bool) -> float:
        rule = cj.UpdateRule.dp(1, 1) if fresh else cj.UpdateRule.cdp_v1(1, 1)
        tx, params = cj.delay_by_stage(optax.sgd(gamma), fresh=rule.fresh[0]), (jnp.ones(()),)
        state = tx.init(params)
        for _ in range(100):
            updates, state = tx.update(params, state, params)  # the gradient of x²/2, lambda = 1
            params = optax.apply_updates(params, updates)
        return abs(float(params[0]))

    assert end(1.5, fresh=True) < 1e-9
    assert end(1.5, fresh=False) > 1e6
    assert end(0.9, fresh=False) < 0.1
    assert end(1.1, fresh=False) > 10


def test_bad_input():
    params = parameters()
    with pytest.raises(ValueError, match="stage label 2 is not one of the stages 0 to 1"):
        cj.delay_by_stage(optax.sgd(0.1), {"encoder": 0, "head": 2}, [True, False]).init(params)
    with pytest.raises(ValueError, match="stage_labels are needed: the parameters are a dict"):
        cj.delay_by_stage(optax.sgd(0.1), fresh=[True, False]).init(params)
    with pytest.raises(ValueError, match=r"booleans \[S\], one per stage, got bool\[1, 2\]"):
        cj.delay_by_stage(optax.sgd(0.1), LABELS, [[True, False]])
    with pytest.raises(ValueError, match="fresh has 3 entries, but the parameters have 2 stages"):
        cj.delay_by_stage(optax.sgd(0.1), fresh=[True, False, True]).init((jnp.ones(2), jnp.ones(3)))
    with pytest.raises(ValueError, match="stage label True is not one"):
        cj.delay_by_stage(optax.sgd(0.1), {"encoder": True, "head": 1}, [True, False]).init(params)
    tx = cj.delay_by_stage(optax.sgd(0.1), LABELS, [True, False])
    state = tx.init(params)
    with pytest.raises(ValueError, match="needs params"):
        tx.update(gradients(0), state)
    with pytest.raises(ValueError, match="given both to delay_by_stage and to update"):
        tx.update(gradients(0), state, params, fresh=[True, False])
    traced = cj.delay_by_stage(optax.sgd(0.1), LABELS)
    with pytest.raises(ValueError, match="given neither to delay_by_stage nor to update"):
        traced.update(gradients(0), traced.init(params), params)
