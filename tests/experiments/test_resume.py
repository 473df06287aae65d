"""What becomes of a study that is interrupted, and of one that is resumed with other options."""

import dataclasses
import signal
import struct
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import accuracy
from experiments.interruption import EXIT_CODE, Interrupted, Interruptions
from experiments.log import Log
from experiments.run import Evaluation, Run
from experiments.running import run_all
from experiments.training import prepare
from tests.experiments.studies import SMALL, STEPS, config, lines, losses, study

# ---- interruptions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_goes_on(number, alone, tmp_path, at_step, monkeypatch):
    at_step(2, lambda: signal.raise_signal(number))
    with pytest.raises(Interrupted, match=r"cdp-v2-seed0, saved after \d+ steps: the same command with --resume"):
        run_all(study(tmp_path, save_every=1000))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert 3 <= len(losses(tmp_path)) < STEPS
    monkeypatch.undo()
    run_all(study(tmp_path, save_every=1000, resume=True))
    assert losses(tmp_path) == losses(alone)
    (result,), (want,) = lines(tmp_path, "result"), lines(alone, "result")
    assert result["test_loss"] == want["test_loss"]
    assert result["steps"] == STEPS


def test_the_exit_code(tmp_path, at_step, monkeypatch, capsys):
    options = ["--model=residual_mlp", "--num-workers=2", "--num-stages=2", "--batch-per-worker=4", "--steps=12"]
    options += [
        f"--out={tmp_path}/out",
        f"--checkpoint-dir={tmp_path}/c",
        f"--devices={jax.device_count()}",
        "--seeds=1",
    ]
    at_step(2, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as end:
        accuracy.main([*options, "--rules", "dp", "cdp-v2"])
    assert end.value.code == EXIT_CODE == 75
    assert "the same command with --resume goes on" in capsys.readouterr().err
    monkeypatch.undo()
    accuracy.main([*options, "--rules", "dp", "cdp-v2", "--resume"])
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 4
    assert "cdp-v2 seed 0: 12 steps in" in printed.err


def test_a_second_signal_acts_at_once():
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append("as before"))
    try:
        with Interruptions() as stop:
            assert not stop()
            signal.raise_signal(signal.SIGTERM)
            assert (stop(), came) == (True, [])
            signal.raise_signal(signal.SIGTERM)
            assert came == ["as before"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_without_checkpoints_a_signal_ends_it_as_ever(tmp_path, at_step):
    at_step(2, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run_all(study(tmp_path, checkpoint_dir=None))


# ---- going on -----------------------------------------------------------------------------------------------


def test_a_canonical_checkpoint_goes_on_in_another_executor_on_other_devices(alone, tmp_path, at_step, monkeypatch):
    at_step(4, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Interrupted):
        run_all(study(tmp_path, checkpoint_form="canonical"))
    monkeypatch.undo()
    run_all(study(tmp_path, executor="interleaved", resume=True))
    np.testing.assert_allclose(losses(tmp_path), losses(alone), rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resume": False}, "already holds checkpoints: go on with --resume"),
        ({"lr": 0.1}, "lr is 0.005 there and 0.1 here"),
        ({"model": "tiny_resnet"}, "model is 'residual_mlp' there and 'tiny_resnet' here"),
        ({"num_workers": 1}, "num_workers is 3 there and 1 here"),
        ({"steps": 20}, "steps is 12 there and 20 here"),
        ({"executor": "pipeline"}, "executor is 'replicated' there and 'pipeline' here.*canonical"),
        ({"out": Path("elsewhere")}, "has 0 of the 4 losses before the checkpoint.*--out"),
    ],
)
def test_other_options_are_refused_before_anything_is_touched(changes, message, interrupted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in interrupted.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=message):
        run_all(prepare(dataclasses.replace(config(interrupted, resume=True), **changes)))
    assert {path: path.read_bytes() for path in interrupted.rglob("*") if path.is_file()} == before


def test_another_rule_in_the_place_of_a_checkpoint_is_refused(interrupted, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/cdp-v1-seed0").symlink_to(interrupted / "checkpoints/cdp-v2-seed0")
    with pytest.raises(ValueError, match="rule is 'cdp-v2' there and 'cdp-v1' here"):
        run_all(prepare(config(tmp_path, rules=("cdp-v1",), resume=True)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resume": True}, "resume=True: name the folder .* with --checkpoint-dir"),
        ({"save_every": 0}, "save_every=0"),
        ({"eval_every": -1}, "eval_every=-1"),
    ],
)
def test_bad_options(change, message):
    with pytest.raises(ValueError, match=message):
        prepare(dataclasses.replace(SMALL, **change))


def test_half_a_line_and_later_lines_are_dropped(tmp_path):
    run = Run("dp", 0)
    with Log(tmp_path, SMALL) as log:
        for step in range(5):
            log.step(run, step, step / 10, 0.1)
            log.step(Run("dp", 1), step, 7.0, 0.1)
        log.evaluation(run, Evaluation(2, 3, 0.5, 1.5))
        log.evaluation(run, Evaluation(3, 4, 0.6, 1.4))
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"kind": "step", "rule": "dp", "seed": 0, "st')
    with Log(tmp_path, SMALL, resume=True) as log:
        known = log.rewind("dp", 0, losses=2, begun=3)
        assert (known.losses, known.evaluations) == ([0.0, 0.1], [Evaluation(2, 3, 0.5, 1.5)])
        assert log.finished("dp", 0) is None
        log.step(known, 2, 0.25, 0.1)
        log.result(dataclasses.replace(known, test_accuracy=0.5, test_loss=1.0, seconds=3.0))
    with Log(tmp_path, SMALL, resume=True) as log:
        finished = log.finished("dp", 0)
        assert finished is not None
        assert (finished.losses, finished.seconds) == ([0.0, 0.1, 0.25], 3.0)
        assert log.rewind("dp", 1, losses=5, begun=5).losses == [7.0] * 5


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """What TensorBoard shows: a file that begins at a step hides what earlier files hold from there on."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    shown: dict[tuple[str, int], float] = {}
    for path in sorted(folder.glob("events*")):
        content, position = path.read_bytes(), 0
        while position < len(content):
            (length,) = struct.unpack_from("<Q", content, position)
            event = Event.FromString(content[position + 12 : position + 12 + length])
            position += length + 16
            if event.session_log.status == SessionLog.START:
                shown = {key: value for key, value in shown.items() if key[1] < event.step}
            for value in event.summary.value:
                assert (value.tag, event.step) not in shown
                shown[value.tag, event.step] = value.simple_value
    return shown


def test_tensorboard_goes_on(tmp_path):
    """Three steps and an evaluation are lost, the evaluation at the checkpoint is not."""
    known = Run("dp", 0)

    def some(log: Log, first: int, last: int) -> None:
        for step in range(first, last):
            log.step(known, step, float(step), 0.1)

    with Log(tmp_path, SMALL) as log:
        some(log, 0, 5)
        log.evaluation(known, Evaluation(5, 6, 0.5, 1.5))  # at the checkpoint: 6 begun, 5 losses complete
        some(log, 5, 8)
        log.evaluation(known, Evaluation(7, 8, 0.6, 1.4))
    with Log(tmp_path, SMALL, resume=True) as log:
        log.rewind("dp", 0, losses=5, begun=6)
        some(log, 5, 7)
    shown = scalars(tmp_path / "tensorboard/dp-seed0")
    assert {step for tag, step in shown if tag == "loss"} == set(range(7))
    assert {step for tag, step in shown if tag == "test_loss"} == {5}
