"""Traffic from the schedule, and collectives read from compiled programs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import cyclic_jax as cj
from cyclic_jax.communication import (
    all_reduce_traffic,
    collectives,
    cyclic_traffic,
    zero_cdp_traffic,
    zero_dp_traffic,
)
from experiments import communication, state_traffic


def program(body, devices=4):
    mesh, spec = Mesh(np.asarray(jax.devices()[:devices]), ("x",)), PartitionSpec("x")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return collectives(jax.jit(mapped).lower(jnp.zeros((devices, 5), jnp.float32)).compile().as_text())


def test_a_permute_is_read_with_its_pairs_and_bytes():
    (found,) = program(lambda x: jax.lax.ppermute(x, "x", [(0, 1), (3, 2)]))
    assert found.kind == "collective-permute"
    assert found.pairs == ((0, 1), (3, 2))
    assert found.num_bytes == 5 * 4


def test_an_all_reduce_is_read_with_its_bytes():
    (found,) = program(lambda x: jax.lax.psum(x.astype(jnp.bfloat16).astype(jnp.float32), "x"))
    assert (found.kind, found.num_bytes, found.pairs) == ("all-reduce", 20, ())


def test_a_program_without_collectives_has_none():
    assert program(lambda x: x + 1) == ()


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_one_stage_at_a_time(n):
    sizes = [10 + j for j in range(n)]
    sent = cyclic_traffic(cj.Schedule.cyclic(n), sizes)
    assert sent.max() <= max(sizes)
    # N − 1 partial sums, N − 1 hops of the finished one, and the hand-off of all but stage 0
    assert sent.sum() == sum(size * (2 * (n - 1) + (j > 0)) for j, size in enumerate(sizes))
    assert sent.sum(axis=1).max() <= (2 * n - 1) / n * sum(sizes) + max(sizes)
    at_once = all_reduce_traffic(n, 2 * n, sizes)
    assert at_once[0].sum() == pytest.approx(2 * (n - 1) / n * sum(sizes))
    assert at_once.max() == at_once[0].sum()


def test_traffic_is_even_over_time():
    """With even stages, all workers together send about as much at each tick."""
    total = cyclic_traffic(cj.Schedule.cyclic(8), [1] * 8).sum(axis=0)
    assert total.min() >= 6
    assert total.max() <= 8


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("delayed", [False, True])
def test_sharded_states_point_to_point(n, delayed):
    """Two streams of parameters once around the ring, N − 1 partial sums, and the hand-off unless the sum is already there."""
    sizes = [10 + j for j in range(n)]
    sent = zero_cdp_traffic(cj.Schedule.cyclic(n), sizes, delayed=delayed)
    hops = [2 * n + (n - 1) + (j > 0) - 2 * (delayed and j == n - 1) for j in range(n)]
    # stage N-1 belongs to worker 0, which sends itself nothing
    assert sent.sum() == sum(size * times for size, times in zip(sizes, hops, strict=True))
    half = zero_cdp_traffic(cj.Schedule.cyclic(n), [size / 2 for size in sizes], gradient_bytes=sizes, delayed=delayed)
    sums = sum(size * ((n - 1) + (j > 0)) for j, size in enumerate(sizes))
    assert half.sum() == pytest.approx((sent.sum() + sums) / 2)


@pytest.mark.parametrize("schedule", [cj.Schedule.cyclic(4), cj.Schedule.balanced(2, [1] * 4, [2] * 4)])
def test_sharded_states_by_collectives(schedule):
    """All that is sent when a tick ends: a stage is there before its op, and its gradient leaves after its backward."""
    N, S = schedule.num_workers, schedule.num_stages
    one = [float(j == 1) for j in range(S)]
    sent = zero_dp_traffic(schedule, one)
    assert sent.sum() == pytest.approx(3 * (N - 1))
    at = {str(slot.op): (slot.start, slot.start + slot.length) for slot in schedule.program}
    ends = {(tick - 1) % schedule.period for tick in (at["F1"][0], *at["B1"])}
    assert set(sent[0].nonzero()[0]) == ends


@pytest.mark.parametrize("traffic", [cyclic_traffic, zero_cdp_traffic, zero_dp_traffic])
def test_sizes_must_fit(traffic):
    with pytest.raises(ValueError, match="2 stage sizes for 3 stages"):
        traffic(cj.Schedule.cyclic(3), [1, 2])


@pytest.mark.parametrize("table", ["cyclic", "balanced"])
def test_the_experiment_agrees_with_what_is_compiled(table, tmp_path):
    config = communication.Config(model="residual_mlp", num_workers=2, table=table, out=tmp_path)
    text = communication.run(config)
    assert "replicated holds collective-permute only" in text
    assert "zero holds collective-permute only" in text
    assert "zero-dp holds all-gather and reduce-scatter only" in text
    assert (tmp_path / "traffic.png").stat().st_size > 5_000


def test_the_check_can_fail():
    config = communication.Config(model="residual_mlp", num_workers=2)
    traffic = communication.predict(config)
    wrong = communication.Traffic(**{**vars(traffic), "padded": traffic.padded * 2})
    with pytest.raises(RuntimeError, match="predicted"):
        communication.check(config, wrong)


def test_the_check_of_sharded_states_can_fail():
    """Half a stream, or a gather too few, would be seen."""
    config = communication.Config(model="residual_mlp", num_workers=2)
    gradients = communication.predict(config)
    right = state_traffic.predict(gradients.model, gradients.schedule)
    found = {}

    def compiled(machine):
        name = getattr(getattr(machine, "rule", None), "name", "fsdp")
        return found.get(name) or found.setdefault(name, communication._of_step(config, gradients.model, machine))

    def check(**wrong):
        traffic = dataclasses.replace(right, **wrong)
        return state_traffic.check(traffic, communication._loss, communication.OPTIMIZER, compiled)

    assert "zero holds collective-permute only" in check()
    assert len(found) == 3
    with pytest.raises(RuntimeError, match="zero-dp: predicted"):
        check(gathered=right.gathered * 2 / 3)
    for rule in state_traffic.RULES:
        with pytest.raises(RuntimeError, match=f"{rule}: predicted"):
            check(padded={**right.padded, rule: right.padded[rule] / 2})
