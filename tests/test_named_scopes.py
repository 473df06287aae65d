"""What a profiler's trace can show: the compiled step names its ops, stages, updates and messages."""

import re

import jax
import optax
import pytest

import cyclic_jax as cj
from cyclic_jax.executors import EXECUTORS
from tests import problems

OPS = {"F0", "F1", "B0", "B1"}
UPDATES = {"update0", "update1"}
PARTS = {
    "synchronous": {"F0", "F1", "update", "send/gradient"},
    "interleaved": OPS | UPDATES,
    "replicated": OPS | UPDATES | {"send/gradient", "send/finished0", "send/finished1"},
    "pipeline": OPS | UPDATES | {"send/messages", "send/inputs"},
    "model_parallel": OPS | UPDATES | {"send/messages", "send/gradient", "send/finished"},
    "zero": OPS | UPDATES | {"send/gradient", "send/parameters", "send/finished0"},
}


def op_names(executor: str) -> set[str]:
    machine = cj.make_executor(executor, problems.model(2), problems.loss, optax.sgd(0.1), rule=cj.UpdateRule.cdp_v2(2))
    state = jax.eval_shape(lambda: cj.TrainState.create(machine.model, optax.sgd(0.1), jax.random.key(0)))
    batch = jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, problems.batch(0, 2)))
    compiled = machine.lower(machine.carry_struct(state, batch), batch).compile().as_text()
    return set(re.findall(r'op_name="([^"]*)"', compiled))


def parts(names: set[str]) -> set[str]:
    """Scopes at any depth, also inside ``jvp(…)`` and ``transpose(…)``."""
    scope = re.compile(r"(?<![\w/])(?:[FB]\d+|update\d*|send/\w+)(?![\w])|(?<=/)(?:[FB]\d+|update\d*|send/\w+)(?![\w])")
    return {found for name in names for found in scope.findall(name)}


@pytest.mark.parametrize("executor", list(EXECUTORS))
def test_the_compiled_step_names_its_parts(executor):
    names = op_names(executor)
    assert PARTS[executor] <= parts(names)
    if executor == "synchronous":
        assert any("transpose(jvp(F1))" in name for name in names)
    if executor != "synchronous":  # every message has a name
        assert all("send/" in name for name in names if name.endswith("ppermute"))


def test_a_missing_name_is_seen():
    assert parts({"jit(step)/while/body/F1/dot_general", "jit(step)/transpose(jvp(F0))/mul", "jit(step)/FB1x/add"}) == {
        "F1",
        "F0",
    }
