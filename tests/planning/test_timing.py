"""Times of a uniform model, worked out by hand."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

import cyclic_jax as cj
from cyclic_jax.planning import Machine, Work, timing
from cyclic_jax.schedule import Schedule
from tests import problems

FAST = Machine(devices=4, memory=1e9, flops=1e9, bandwidth=1e15, latency=0.0)
ROWS, WIDTH = 4, 4


@pytest.fixture(scope="module")
def work() -> Work:
    """Four equal layers, four stages."""
    layers = [problems.linear(j, WIDTH, activation=False) for j in range(4)]
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32), jax.ShapeDtypeStruct((ROWS,), np.int32)
    return Work.of(layers, 4, problems.loss, optax.sgd(0.1), batch)


@pytest.fixture(scope="module")
def forward(work) -> float:
    """Seconds of a stage's forward."""
    seconds = work.forward_seconds(FAST)
    assert len(set(seconds)) == 1
    return seconds[0]


def per_micro_batch(found: timing.Timing, forward: float) -> float:
    return found.step / found.micro_batches / forward


def test_without_a_network(work, forward):
    """Time of a micro-batch in forwards of a stage: the ideal is 3, and only a flush is above it."""
    pipeline = timing.scheduled(work, FAST, Schedule.pipeline(4), "activations", 0)
    assert per_micro_batch(pipeline, forward) == pytest.approx(3)
    assert (pipeline.bubble, pipeline.exposed) == pytest.approx((0, 0), abs=1e-12)
    for times in (1, 4):
        M = 4 * times
        flushed = timing.scheduled(work, FAST, Schedule.gpipe(M, 4), "activations", 0)
        assert per_micro_batch(flushed, forward) == pytest.approx(3 * (M + 3) / M)
        assert flushed.bubble == pytest.approx(9 * forward)
    for found in (
        timing.data_parallel(work, FAST),
        timing.fsdp(work, FAST),
        timing.scheduled(work, FAST, Schedule.cyclic(4), "gradients", 0),
        timing.scheduled(work, FAST, Schedule.cyclic(4), "states", 0),
    ):
        assert per_micro_batch(found, forward) == pytest.approx(3)


def test_messages_of_a_ring(work, forward):
    """A tick of slack hides a message; one that takes much longer than a tick is not hidden."""
    hidden, slow = (dataclasses.replace(FAST, latency=share * forward) for share in (0.5, 10.0))
    ring = Schedule.cyclic(4)
    assert timing.scheduled(work, hidden, ring, "gradients", 0).exposed == pytest.approx(0, abs=1e-12)
    assert timing.scheduled(work, slow, ring, "gradients", 0).exposed > 10 * forward
    direct = ring.makespan(forward, 2 * forward, True, 10 * forward, "gradients")
    assert timing.scheduled(work, slow, ring, "gradients", 0).step == pytest.approx(direct)


def test_messages_of_a_pipeline(work, forward):
    """No slack: on its way through four stages and back a micro-batch waits for six messages, once in a step."""
    slow = dataclasses.replace(FAST, latency=forward)
    found = timing.scheduled(work, slow, Schedule.pipeline(4), "activations", 0)
    assert found.exposed == pytest.approx(6 * forward)


def test_groups_average_stage_after_stage(work):
    slow = dataclasses.replace(FAST, bandwidth=1e3, latency=0.01)
    size = work.params_bytes[0]
    assert timing.over_groups(work, slow, 1) == 0
    assert timing.over_groups(work, slow, 8) == pytest.approx(4 * 2 * (3 * 0.01 + 7 / 8 * size / 1e3))
    alone, several = (timing.scheduled(work, slow, Schedule.pipeline(4), "activations", 0, g) for g in (1, 8))
    assert several.exposed - alone.exposed == pytest.approx(timing.over_groups(work, slow, 8))
    assert several.micro_batches == 8 * alone.micro_batches


def test_all_reduce_overlaps_with_the_backward(work, forward):
    """Per layer, all but the first layer's; all at the end if latency counts more."""
    size = work.params_bytes[0]
    share = 2 * 3 / 4 * size
    wide = dataclasses.replace(
        FAST, bandwidth=share / (2 * forward)
    )  # a layer's all-reduce lasts as long as a backward
    assert timing.data_parallel(work, wide).exposed == pytest.approx(2 * forward)
    slow = dataclasses.replace(FAST, latency=100 * forward)
    assert timing.data_parallel(work, slow).exposed == pytest.approx(2 * 2 * 100 * forward)


def test_fsdp_gathers_a_layer_ahead(work, forward):
    """A gather as long as a forward: only the very first shows, and the last scatter."""
    share = 3 / 4 * work.params_bytes[0]
    wide = dataclasses.replace(FAST, bandwidth=share / forward)
    assert timing.fsdp(work, wide).exposed == pytest.approx(2 * forward)
    narrow = dataclasses.replace(FAST, bandwidth=share / (100 * forward))
    # the link is never idle: twelve transfers, and what is computed before the last scatter may begin
    assert timing.fsdp(work, narrow).step == pytest.approx(12 * 100 * forward, rel=0.02)


@pytest.mark.parametrize(
    ("name", "value"), [("devices", 0), ("memory", -1.0), ("bandwidth", float("inf")), ("latency", -1e-6)]
)
def test_machines_that_are_none(name, value):
    with pytest.raises(ValueError, match=f"{name}=.*must be positive and finite"):
        dataclasses.replace(FAST, **{name: value})


def test_unknown_messages():
    with pytest.raises(
        ValueError, match="moving='words': expected one of gradients, states, delayed_states, activations"
    ):
        cj.Schedule.cyclic(2).makespan(1, 2, moving="words")
