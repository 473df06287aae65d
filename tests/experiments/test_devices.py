"""Devices, slots and utilisation are counted in a run, and a wrong run is seen."""

import dataclasses
import json

import pytest

from cyclic_jax.executors.one_stage import OneStage
from cyclic_jax.executors.stage_work import StageWork
from experiments import devices
from experiments.noted_run import WAYS, Event, make, run_noted


def test_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(devices.cj, "simulate_devices", lambda count: None)  # the tests have ten
    devices.main(["--num-workers", "2", "3", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * len(WAYS) + 2
    assert lines[2] == "| 2 | DP x MP | 4 (4) | 1 (1) | 4 (4) | 0.500 (0.500) |"
    assert lines[6] == "| 3 | CDP x MP | 6 (6) | 1 (1) | 6 (6) | 0.500 (0.500) |"
    assert lines[7] == "| 3 | CDP pipeline | 3 (3) | 3 (3) | 6 (6) | 1.000 (1.000) |"
    found = json.loads((tmp_path / "devices.json").read_text())
    assert [r["counted"]["devices"] for r in found] == [4, 3, 2, 9, 6, 3]
    assert (tmp_path / "devices.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("way", WAYS)
def test_every_op_is_noted_once_and_no_bubble(way):
    """Two steps of two workers and stages: late micro-batches of the second step are still in flight in a cyclic schedule."""
    executor, steps = make(way, 2), 2
    events = run_noted(executor, 2, steps)
    begun = {(e.stage, e.micro_batch) for e in events if e.kind == "F" and e.stage == 0}
    assert len(begun) == 2 * steps
    assert {e.micro_batch[1] for e in events} == set(range(steps if way == "DP x MP" else 2 * steps))
    ended = {e.micro_batch for e in events if e.kind == "B" and e.stage == 0}
    assert len(ended) == (2 * steps if way == "DP x MP" else 2 * steps - 1)
    devices.check(events)


def test_a_wrong_placement_is_seen(monkeypatch):
    """All micro-batches on the first replica of stage 0: a device less, and two slots on it."""
    executor, phase = make("CDP x MP", 2), OneStage._phase

    def misplaced(self, *args):
        replicas, self.replicas = self.replicas, (1, 1)
        memory = phase(self, *args)
        self.replicas = replicas
        return memory

    monkeypatch.setattr(OneStage, "_phase", misplaced)
    events = run_noted(executor, 2, 3)
    counted = devices.count(events, 6, 18)
    assert (counted.devices, counted.slots, counted.all_slots) == (2, 2, 3)
    right = devices.Count(*devices.FORMULAS["CDP x MP"](2))
    with pytest.raises(RuntimeError, match=r"CDP x MP, N = 2: counted Count\(devices=2, slots=2"):
        devices.check_rows([devices.Row("CDP x MP", 2, counted, right)])


def test_ops_that_do_not_run_are_seen(monkeypatch):
    executor = make("CDP pipeline", 2)
    backward = StageWork.backward

    def lazy(self, memory, j, m, mine):
        return backward(self, memory, j, m, mine & (j == 1))

    monkeypatch.setattr(StageWork, "backward", lazy)
    counted = devices.count(run_noted(executor, 2, 3), 6, 18)
    assert counted.utilisation == pytest.approx((1 + 3) / 6)
    assert counted.slots > 2


def test_notes_that_no_run_could_make():
    first = Event(0, 0, "F", 0, (0, 0))
    with pytest.raises(RuntimeError, match="device 0 does two ops at tick 0"):
        devices.check([first, Event(0, 0, "F", 0, (0, 1))])
    with pytest.raises(RuntimeError, match="ran before F0 of its micro-batch had ended"):
        devices.check([first, Event(1, 0, "F", 1, (0, 0))])
    with pytest.raises(RuntimeError, match="1 ops ran twice"):
        devices.check([first, dataclasses.replace(first, device=1)])
    whole = [first, Event(1, 1, "F", 1, (0, 0)), Event(1, 2, "B", 1, (0, 0)), Event(0, 4, "B", 0, (0, 0))]
    devices.check(whole)
    with pytest.raises(RuntimeError, match="ran before B1 of its micro-batch had ended"):
        devices.check([*whole[:3], dataclasses.replace(whole[3], tick=3)])


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--num-workers", "5"], r"num_workers=\(5,\): some of 2, 3 and 4"), (["--steps", "2"], "steps=2: at least 3")],
)
def test_bad_input(options, message):
    with pytest.raises(SystemExit, match=f"error: {message}"):
        devices.main(options)
