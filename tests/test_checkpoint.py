"""Checkpoints of every executor: what is in flight comes back bit for bit, what is canonical goes on anywhere."""

import functools
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import cyclic_jax as cj
from cyclic_jax.checkpoint import Checkpoints
from cyclic_jax.checkpoint.flat import fingerprint, flatten, numbers
from cyclic_jax.executors import EXECUTORS
from tests import problems
from tests.proofs import TOLERANCE, expected

pytestmark = pytest.mark.usefixtures("float64")
N, SAVED, MORE = 2, 2, 3


def machine(name: str, rule: cj.UpdateRule | None = None, mesh: Mesh | None = None) -> Any:
    rule = rule or cj.UpdateRule.cdp_v2(N)
    model = problems.model(rule.num_stages)
    return cj.make_executor(name, model, problems.loss, problems.OPTIMIZERS["adamw"], rule=rule, mesh=mesh)


compiled = functools.cache(machine)  # shared by tests, to compile once


def start(executor: Any) -> cj.TrainState:
    return problems.fresh_start(executor.model, "adamw", executor.num_workers)


def steps(executor: Any, carry: Any, first: int, count: int) -> tuple[Any, list[Any]]:
    losses = []
    for t in range(first, first + count):
        carry, metrics = executor.step(carry, problems.batch(t, executor.num_workers))
        losses.append(jax.tree.map(np.asarray, metrics))
    return carry, losses


def same(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and problems.distance(a, b) == 0


@pytest.mark.parametrize("name", list(EXECUTORS))
def test_in_flight_is_bit_for_bit_and_saving_disturbs_nothing(name, tmp_path):
    executor = compiled(name)
    carry, _ = steps(executor, executor.init(start(executor)), 0, SAVED)
    with Checkpoints(tmp_path, executor) as store:
        store.save(SAVED, carry, {"position": SAVED})
        carry, want = steps(executor, carry, SAVED, MORE)  # donates what is still being written
    new = machine(name)  # it has not seen a batch yet
    with Checkpoints(tmp_path, new) as store:
        restored = store.restore(start(new), problems.batch(0, N))
    assert (restored.step, restored.note) == (SAVED, {"position": SAVED})
    again, got = steps(executor, restored.carry, SAVED, MORE)
    assert same(got, want)
    assert same(executor.drain(again), executor.drain(carry))


def canonical(folder: Path, executor: Any) -> cj.TrainState:
    carry, _ = steps(executor, executor.init(start(executor)), 0, SAVED)
    state, _ = executor.drain(carry)
    with Checkpoints(folder, executor) as store:
        store.save_canonical(SAVED, state)
    return state


def goes_on_as_the_reference(executor: Any, folder: Path) -> float:
    """The distance after three steps from the checkpoint: the state and every loss of theirs."""
    with Checkpoints(folder, executor) as store:
        carry = store.restore(start(executor), problems.batch(0, executor.num_workers)).carry
    carry, losses = steps(executor, carry, SAVED, MORE)
    state, last = executor.drain(carry)
    by_step = {
        (worker, step): loss
        for metrics in (*losses, jax.tree.map(np.asarray, last))
        for worker, (loss, step) in enumerate(zip(metrics.loss, metrics.step.tolist(), strict=True))
        if step >= 0
    }
    fresh, before = executor.rule.fresh, start(executor)
    want_state, want = expected(fresh, "adamw", before, SAVED + MORE)
    want = {key: loss for key, loss in want.items() if key[1] >= SAVED}
    assert by_step.keys() == want.keys()
    return problems.distance((state, by_step), (want_state, want))


@pytest.mark.parametrize("name", list(EXECUTORS))
def test_canonical_goes_on_in_any_executor(name, tmp_path):
    canonical(tmp_path, compiled("synchronous"))
    assert goes_on_as_the_reference(compiled(name), tmp_path) <= TOLERANCE


@pytest.mark.parametrize(
    ("stages", "others"), [(4, []), pytest.param(8, ["replicated", "pipeline"], marks=pytest.mark.slow)]
)
def test_canonical_from_eight_devices_goes_on_on_fewer(stages, others, tmp_path):
    rule = cj.UpdateRule.cdp_v2(8, stages)
    canonical(tmp_path, machine("synchronous", rule))
    fewer = [Mesh(np.array(jax.devices()[:devices]), ("cyclic",)) for devices in (4, 2, 1)]
    executors = [machine("synchronous", rule, mesh) for mesh in fewer] + [machine(name, rule) for name in others]
    for executor in executors:
        assert goes_on_as_the_reference(executor, tmp_path) <= TOLERANCE


def test_a_lost_version_is_seen(tmp_path):
    """As if the delayed parameters had been forgotten: theta_t in the place of theta_{t-1}."""
    executor = compiled("synchronous")
    state, _ = executor.drain(steps(executor, executor.init(start(executor)), 0, SAVED)[0])
    forgot = cj.TrainState(**{**vars(state), "previous_params": state.params})
    with Checkpoints(tmp_path, executor) as store:
        store.save_canonical(SAVED, forgot)
    assert goes_on_as_the_reference(executor, tmp_path) > 1e-6


def wider() -> Any:
    """Layers of the same names, one of another width."""
    layers = [problems.linear(0, 5), problems.linear(1, problems.CLASSES)]
    model = cj.partition(layers, 2, example=jax.ShapeDtypeStruct((2, 3), np.float64), boundaries=[(0, 1), (1, 2)])
    return cj.make_executor(
        "replicated", model, problems.loss, problems.OPTIMIZERS["adamw"], rule=cj.UpdateRule.cdp_v2(2)
    )


def refused(executor: Any, folder: Path, message: str, **identity: Any) -> None:
    before = sorted(folder.rglob("*"))
    with Checkpoints(folder, executor, identity=identity) as store, pytest.raises(ValueError, match=message):
        store.restore(start(executor), problems.batch(0, executor.num_workers))
    assert sorted(folder.rglob("*")) == before


def test_another_run_is_refused_and_named(tmp_path):
    executor = compiled("replicated")
    with Checkpoints(tmp_path, executor, identity={"lr": 0.1}) as store:
        store.save(1, steps(executor, executor.init(start(executor)), 0, 1)[0])
    rule = cj.UpdateRule
    refused(executor, tmp_path, "lr is 0.1 there and 0.2 here", lr=0.2)
    refused(executor, tmp_path, "lr is only there")
    refused(machine("replicated", rule.cdp_v2(4, 2)), tmp_path, "num_workers is 2 there and 4 here", lr=0.1)
    refused(machine("replicated", rule.cdp_v2(2, 4)), tmp_path, "num_stages is 2 there and 4 here", lr=0.1)
    refused(machine("replicated", rule.cdp_v1(2)), tmp_path, "mask is '01 11' there and '00 00' here", lr=0.1)
    refused(
        machine("synchronous"), tmp_path, "executor is 'replicated' there and 'synchronous' here.*canonical", lr=0.1
    )
    refused(wider(), tmp_path, r"stages\[0\] has 3 entries there and 1 here", lr=0.1)


def test_other_devices_are_refused_in_flight(tmp_path):
    executor = compiled("synchronous")
    with Checkpoints(tmp_path, executor) as store:
        store.save(1, executor.init(start(executor)))
    half = Mesh(np.array(jax.devices()[:1]), ("cyclic",))
    refused(machine("synchronous", mesh=half), tmp_path, r"mesh is {.*2.*} there and {.*1.*} here")


def test_the_leaves_are_named(tmp_path):
    narrow, wide = compiled("synchronous"), compiled("synchronous")
    state = start(narrow)
    with Checkpoints(tmp_path, narrow) as store:
        store.save_canonical(1, state)
    bigger = jax.tree.map(lambda leaf: np.zeros((*leaf.shape[:-1], 7)) if leaf.ndim == 2 else leaf, state.params)
    other = cj.TrainState(**{**vars(state), "params": bigger})
    with (
        Checkpoints(tmp_path, wide) as store,
        pytest.raises(
            ValueError, match=r"params\[0\]\[0\]\['w'\] is 'float64\[3, 3\]' there and 'float64\[3, 7\]' here"
        ),
    ):
        store.restore_canonical(other)


# after such an error the storage library's threads still report to an event loop that has been closed
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_damaged_file_is_seen(tmp_path):
    """One bit in the middle of each file: an error that names the checkpoint, or the very same numbers."""
    executor, seen = compiled("synchronous"), []
    state = canonical(tmp_path, executor)
    with Checkpoints(tmp_path, executor) as store:
        for path in sorted(path for path in (tmp_path / str(SAVED)).rglob("*") if path.is_file()):
            whole = path.read_bytes()
            for damaged in (whole[: len(whole) // 2], _flipped(whole)):
                path.write_bytes(damaged)
                why = damage(lambda: store.restore_canonical(start(executor)), state)
                assert why is None or f"checkpoint {tmp_path / str(SAVED)} is damaged" in why[:300]
                seen += [path.parent.name] if why else []
            path.write_bytes(whole)
        assert {"d", "meta", "state"} <= set(seen)
        assert same(store.restore_canonical(start(executor)), state)
    gc.collect()  # those reports come now, and not in the middle of another test


def damage(restore: Callable[[], Any], want: Any) -> str | None:
    """The error; ``None`` if what was wanted came all the same."""
    try:
        assert same(restore(), want)
    except ValueError as error:
        return str(error)
    return None


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :]


def test_fingerprints_see_one_changed_bit_and_two_swapped_numbers():
    flat = flatten(
        {"w": jax.random.normal(jax.random.key(0), (3, 5)), "yes": np.array([True, False]), "none": np.zeros(0)}
    )
    assert sorted(flat) == ["['w']", "['yes']"]
    plain = numbers(fingerprint(flat))
    one = np.asarray(flat["['w']"]).copy()
    one.view(np.uint64)[1, 2] ^= 1 << 40
    swapped = np.asarray(flat["['w']"]).copy()
    swapped[0, 1], swapped[2, 4] = swapped[2, 4], swapped[0, 1]
    for other in ({"['w']": one}, {"['w']": swapped}, {"['yes']": np.array([False, True])}):
        changed = numbers(fingerprint({**flat, **{name: jax.numpy.asarray(leaf) for name, leaf in other.items()}}))
        assert {name for name in plain if plain[name] != changed[name]} == set(other)


def test_what_is_kept_and_what_is_refused(tmp_path):
    executor = compiled("synchronous")
    state = start(executor)
    with Checkpoints(tmp_path, executor, keep=2) as store:
        assert store.latest is None
        with pytest.raises(FileNotFoundError, match="has no checkpoint"):
            store.restore(state, problems.batch(0, 2))
        for step in (1, 2, 3):
            store.save_canonical(step, state, {"step": step})
        store.wait()
        assert (store.latest, store.note(), store.note(2)) == (3, {"step": 3}, {"step": 2})
        with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 1, only \[2, 3\]"):
            store.restore(state, problems.batch(0, 2), step=1)
        with pytest.raises(ValueError, match=r"step 3: .* already has a checkpoint of step 3"):
            store.save_canonical(3, state)
        store.save(4, executor.init(state))  # before the first step: nothing is in flight
        store.wait()
        with pytest.raises(ValueError, match="is in flight"):
            store.restore_canonical(state)
        assert same(executor.drain(store.restore(state, problems.batch(0, 2)).carry)[0], state)
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, executor, keep=0)


def test_a_half_written_checkpoint_is_never_picked(tmp_path):
    executor = compiled("synchronous")
    canonical(tmp_path, executor)
    half = tmp_path / "9.orbax-checkpoint-tmp-0"
    half.mkdir()
    (half / "state").mkdir()
    with Checkpoints(tmp_path, executor) as store:
        assert store.latest == SAVED
        store.save_canonical(9, start(executor))  # it is not in the way either
        store.wait()
        assert store.latest == 9


def test_it_records_versions_and_what_it_was_told(tmp_path):
    executor = compiled("synchronous")
    with Checkpoints(tmp_path, executor, about={"command": "test"}) as store:
        store.save_canonical(1, start(executor))
    meta = json.loads((tmp_path / "1/meta/metadata").read_text())["meta"]
    assert meta["about"]["cyclic_jax"] == cj.__version__
    assert meta["about"]["command"] == "test"
    assert meta["about"]["rule"] == "cdp-v2"
    assert meta["placement"]["executor"] == "synchronous"
