"""Stages that run the same program share one copy of it: found, refused where they differ, and with the same numbers."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import cyclic_jax as cj
from cyclic_jax.executors.pipeline import PipelineExecutor
from cyclic_jax.executors.stage_work import StageWork
from tests import problems
from tests.proofs import RULES, TOLERANCE, run

WIDTH, LAYERS = problems.INPUT, 3  # of a stage


def even(n: int, layers: dict[int, cj.Layer] | None = None) -> cj.StagedModel:
    """n stages, each a linear layer, statistics and dropout; ``layers`` are put in other ones' places."""
    stages = [[problems.linear(j, WIDTH), problems.batch_norm(j), problems.dropout(j)] for j in range(n)]
    found = [layer for stage in stages for layer in stage]
    found[-1] = problems.linear(n, problems.CLASSES, activation=False)
    for place, layer in (layers or {}).items():
        found[place] = layer
    example = jax.ShapeDtypeStruct((2, WIDTH), jnp.result_type(float))
    return cj.partition(found, n, example=example, boundaries=[(LAYERS * j, LAYERS * (j + 1)) for j in range(n)])


def pipeline(model: cj.StagedModel, rule: cj.UpdateRule, schedule: cj.Schedule | None = None) -> Any:
    executor = PipelineExecutor(
        model, problems.loss, problems.OPTIMIZERS["sgd"], rule=rule, schedule=schedule, fill=np.nan
    )
    executor._trace(problems.batch(0, rule.num_workers))
    return executor


def of(model: cj.StagedModel) -> tuple[int, ...]:
    return pipeline(model, cj.UpdateRule.cdp_v2(model.num_stages)).alike


# ---- which are alike ----------------------------------------------------------------------------------------


def scaled(values: np.ndarray) -> cj.Layer:
    """Closes over a constant."""
    return cj.Layer("scaled", lambda key, x: ({}, {}), lambda p, s, x, *, key, train: (x * jnp.asarray(values), s))


def test_inner_stages_are_alike():
    assert of(even(5)) == (0, 1, 1, 1, 4)
    assert of(even(2)) == (0, 1)


def test_constants_count():
    ones, same, other = np.ones(WIDTH), np.ones(WIDTH), np.arange(WIDTH, dtype=float)
    assert of(even(5, {5: scaled(ones), 8: scaled(same), 11: scaled(other)})) == (0, 1, 1, 3, 4)


@pytest.mark.parametrize("place", [3, 4, 5])
def test_other_layers_are_not_alike(place):
    other = {3: problems.linear(1, WIDTH, activation=False), 4: problems.dropout(1), 5: problems.batch_norm(1)}
    assert of(even(5, {place: other[place]})) == (0, 1, 2, 2, 4)


def test_a_transformers_blocks_are_alike():
    layers = cj.models.causal_transformer(9, context=4, width=8, depth=4, heads=2)
    model = cj.partition(layers, 6, example=jax.ShapeDtypeStruct((2, 4), np.int32), by="layers")

    def loss(outputs: Any, targets: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()

    for residuals in ("save", "recompute"):
        executor = PipelineExecutor(model, loss, optax.adamw(1e-3), rule=cj.UpdateRule.cdp_v2(6), residuals=residuals)
        tokens = jax.ShapeDtypeStruct((12, 4), np.int32)
        executor._trace((tokens, tokens))
        assert executor.alike == (0, 1, 1, 1, 1, 5)


def test_nnx_modules_with_dropout():
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear, self.dropout = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dropout(nnx.gelu(self.linear(x)))

    layers = cj.from_nnx([Block] * 4)
    assert of(cj.partition(layers, 4, example=jax.ShapeDtypeStruct((2, WIDTH), np.float32), by="layers")) == (
        0,
        1,
        1,
        3,
    )


# ---- the same numbers ---------------------------------------------------------------------------------------


@functools.cache
def trained(n: int, rule: str, steps: int) -> tuple[cj.TrainState, cj.TrainState]:
    """The start, and what the reference makes of it."""
    model, optimizer = even(n), problems.OPTIMIZERS["sgd"]
    state = cj.TrainState.create(model, optimizer, jax.random.key(0), num_workers=n)
    noise = np.random.default_rng(0)
    previous = jax.tree.map(lambda p: p + 0.05 * noise.normal(size=p.shape), state.params)
    start = state = cj.TrainState(**{**vars(state), "previous_params": previous})
    step = jax.jit(functools.partial(cj.reference_step, model, problems.loss, optimizer))
    for t in range(steps):
        state, _ = step(RULES[rule](n).fresh, state, problems.batch(t, n))
    return start, state


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("n", "table", "rule"), [(6, "pipeline", "v2"), (5, "cyclic", "custom")])
def test_equals_the_reference(n, table, rule):
    executor = pipeline(even(n), RULES[rule](n), getattr(cj.Schedule, table)(n))
    assert any(len(turns) > len({executor.alike[t.op.stage] for t in turns}) for turns in executor.lanes.turns)
    start, want = trained(n, rule, 4)
    assert problems.distance(run(executor, start, 4)[0], want) <= TOLERANCE


WRONG = {
    "first_layer": lambda self: jnp.zeros((), jnp.int32),  # another stage's random streams
    "stage": lambda self, j: j,  # another stage's mask and number of slots
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", WRONG)
def test_another_stages_place_is_seen(name, monkeypatch):
    monkeypatch.setattr(StageWork, name, WRONG[name])
    start, want = trained(5, "custom", 4)
    got = run(pipeline(even(5), RULES["custom"](5), cj.Schedule.cyclic(5)), start, 4)[0]
    assert not problems.distance(got, want) <= 1e-6


# ---- the size of the program --------------------------------------------------------------------------------


def products(n: int) -> int:
    executor = pipeline(even(n), cj.UpdateRule.cdp_v2(n))
    state = cj.TrainState.create(executor.model, problems.OPTIMIZERS["sgd"], jax.random.key(0), num_workers=n)
    text = executor.lower(executor.carry_struct(state), problems.batch(0, n)).as_text()
    return len(re.findall("stablehlo.dot_general", text))


def test_the_program_does_not_grow_with_the_stages():
    assert products(7) == products(10)
