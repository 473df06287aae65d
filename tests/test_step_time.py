"""The benchmark of step times: every row is what it says."""

import dataclasses

import jax
import pytest

from benchmarks import step_time
from benchmarks.contenders import Setting, contender, num_devices

PROMISED = {  # time of a micro-batch, two workers, in forwards of a stage
    "dp": 3.0,
    "v2 pipeline": 3.0,
    "one-op pipeline": 4.0,
    "v2 model_parallel": 3.0,
    "balanced replicated": 3.0,
    "v2 replicated": 4.0,
    "gpipe N": 4.5,
    "1f1b 4N": 3.375,
    "dp-mp": 3.0,
    "fsdp": 3.0,
    "balanced zero": 3.0,
    "v1 zero": 4.0,
}


@pytest.mark.parametrize("name", PROMISED)
def test_contenders(name):
    setting = Setting(model="residual_mlp", width=8, depth=4, num_workers=2, batch_per_worker=4)
    one = contender(name, setting)
    assert one.makespan == pytest.approx(PROMISED[name])
    assert jax.tree.leaves(one.batch)[0].shape[0] == 4 * one.micro_batches
    assert one.executor.batch_sharding.mesh.size <= num_devices(name, 2) <= 4


def test_optimizer_and_partition_are_as_asked():
    setting = Setting("residual_mlp", 8, 4, 2, 4, optimizer="adamw", partition="params")
    one, other = contender("fsdp", setting), contender("v2 zero", dataclasses.replace(setting, optimizer="sgd"))
    assert one.executor.model.boundaries == other.executor.model.boundaries
    assert len(jax.tree.leaves(one.state.opt_state)) > 2 * len(jax.tree.leaves(one.state.params))
    assert len(jax.tree.leaves(other.state.opt_state)) == len(jax.tree.leaves(one.state.params))


def test_the_table_of_step_times(capsys):
    config = step_time.Config(
        width=8,
        depth=2,
        num_workers=2,
        batch_per_worker=4,
        executors=("gpipe 4N", "v2 model_parallel", "dp-mp"),
        repeats=1,
        steps=1,
    )
    runs = {name: step_time.Timed(contender(name, config)) for name in config.executors}
    lines = step_time.table(
        config, runs, {name: [(0.002, 0.004), (0.003, 0.005), (0.001, 0.004)] for name in runs}
    ).splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    assert cells[0][2] == "ms per micro-batch of 4 rows"
    assert {len(row) for row in cells} == {11}
    assert [row[:8] for row in cells[2:]] == [
        ["gpipe 4N", "2", "2.0", "1.0", "4.0", "1.00", "3.38", "8"],
        ["v2 model_parallel", "3", "2.0", "1.0", "4.0", "1.00", "3.00", "2"],
        ["dp-mp", "4", "2.0", "1.0", "4.0", "1.00", "3.00", "2"],
    ]


def test_an_unknown_contender():
    with pytest.raises(
        SystemExit, match="unknown executor 'v3 pipeline': expected one of dp, zero1, fsdp, dp-mp, gpipe N"
    ):
        step_time.main(step_time.Config(executors=("v3 pipeline",)))
