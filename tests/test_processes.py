"""Two processes of four devices train what one process of eight does, each of them feeding its own rows only."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import cyclic_jax as cj
from cyclic_jax.executors.placing import place, widen
from tests import problems, process_child
from tests.proofs import TOLERANCE

pytestmark = pytest.mark.usefixtures("float64")
ROOT = Path(__file__).parent.parent
# messages add nothing up, so staggered executors are equal bit for bit; an all-reduce may add in another order
CASES = dict.fromkeys(("replicated", "zero", "pipeline", "model parallel"), 0.0)
CASES |= dict.fromkeys(("synchronous", "fewer devices", "moved"), TOLERANCE)


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[Path, dict[str, list[np.ndarray]]]:
    """The folder of what two processes saw, and what this one sees alone, at the same time."""
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.process_child"]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    children = [
        subprocess.Popen([*command, str(k), "2", str(port), str(folder)], cwd=ROOT, env=environment) for k in (0, 1)
    ]
    try:
        alone = dict(process_child.everything())
        assert [child.wait(timeout=300) for child in children] == [0, 0]
    finally:
        for child in children:
            child.kill()
    return folder, alone


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(case, both):
    written, alone = both
    for process in (0, 1):
        with np.load(written / f"{case}-{process}.npz") as found:
            assert problems.distance(list(found.values()), alone[case]) <= CASES[case]


def test_other_rows_are_seen(both):
    """Each process feeding the next worker's rows is what this test would notice."""
    written, alone = both
    with np.load(written / "wrong rows-0.npz") as found:
        assert problems.distance(list(found.values()), alone["wrong rows"]) <= TOLERANCE
        assert problems.distance(list(found.values()), alone["synchronous"]) > 1e-3


def test_refused_alike_by_all(both):
    first, second = (json.loads((both[0] / f"refusals-{k}.json").read_text()) for k in (0, 1))
    assert first.keys() == second.keys()
    for name in ("idle", "idle one", "idle mesh", "unknown rows", "odd rows", "odd own rows"):
        assert first[name] == second[name]
    assert "has 4 of 8 devices and leaves processes [1] of 2 without work: start fewer processes" in first["idle"]
    assert "has 1 of 8 devices" in first["idle one"]
    assert "has 2 of 8 devices" in first["idle mesh"]
    assert "only processes [0] of 2 hold rows" in first["unknown rows"]
    assert "process 0 holds 6 of 6 rows (cj.local_rows(executor, 6)), got shape (1, 3)" in first["wrong rows"]
    assert "process 1 holds 0 of 6 rows" in second["wrong rows"]
    assert first["odd rows"] == "a batch of 7 rows cannot be divided among 3 workers"
    assert first["odd own rows"] == "a batch of 5 rows cannot be divided among 4 workers"


# ---- one process --------------------------------------------------------------------------------------------


def test_one_process_has_all_rows():
    executor = process_child.make("pipeline", 4, None)
    assert cj.local_rows(executor, 12).tolist() == list(range(12))
    with pytest.raises(ValueError, match="7 rows cannot be divided among 4 workers"):
        cj.local_rows(executor, 7)


def test_a_batch_that_lies_where_it_should_is_not_copied():
    executor = process_child.make("pipeline", 4, None)
    batch = cj.global_batch(executor, problems.batch(0, 4), rows=8)
    again = widen(place(batch, executor.batch_sharding, 4), executor._batch_layout)
    pointers = [[shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards] for leaf in (*batch, *again)]
    assert pointers[:2] == pointers[2:]


def test_widening_adds_devices_without_rows():
    executor = process_child.make("model_parallel", 3, None)
    inputs, _ = widen(cj.global_batch(executor, problems.batch(0, 3), rows=6), executor._batch_layout)
    assert np.array_equal(inputs, np.concatenate([problems.batch(0, 3)[0], np.zeros((6, problems.INPUT))]))


def test_metrics_of_one_process():
    one = cj.Metrics(jax.numpy.arange(3.0), jax.numpy.arange(3))
    (read,) = cj.read_metrics([one])
    assert isinstance(read.loss, np.ndarray)
    assert read.loss.tolist() == [0, 1, 2]
    assert cj.read_metrics([]) == []
