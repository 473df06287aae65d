"""What becomes of a study that is interrupted, runs into a fault, or is resumed with other options."""

import dataclasses
import functools
import json
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import accuracy, training
from experiments.checkpointing import Keeper
from experiments.config import Config
from experiments.interruption import EXIT_CODE, Interrupted, Interruptions
from experiments.log import Log
from experiments.run import Evaluation, Run
from experiments.running import run_all
from experiments.training import prepare, train

STEPS = 12
SMALL = Config(
    model="residual_mlp",
    num_workers=3,  # late losses of step t come in call t + 1 for N >= 3
    num_stages=3,
    batch_per_worker=4,
    steps=STEPS,
    seeds=1,
    lr=0.005,
    schedule="constant",
    rules=("cdp-v2",),
    executor="replicated",
    save_every=2,
)


def config(folder: Path, **changes: Any) -> Config:
    return dataclasses.replace(SMALL, **{"out": folder / "out", "checkpoint_dir": folder / "checkpoints", **changes})


compiled = functools.cache(lambda executor: prepare(dataclasses.replace(SMALL, executor=executor)))


def study(folder: Path, executor: str = "replicated", **changes: Any) -> training.Study:
    """What the options leave alone is compiled once."""
    return dataclasses.replace(compiled(executor), config=config(folder, executor=executor, **changes))


def lines(folder: Path, kind: str) -> list[dict]:
    every = [json.loads(line) for line in (folder / "out/results.jsonl").read_text().splitlines()]
    return [line for line in every if line["kind"] == kind]


def losses(folder: Path) -> list[float]:
    """In order, each step once."""
    found = lines(folder, "step")
    assert [line["step"] for line in found] == list(range(len(found)))
    return [line["loss"] for line in found]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The study that nothing happens to."""
    folder = tmp_path_factory.mktemp("alone")
    run_all(study(folder))
    return folder


@pytest.fixture
def at_step(monkeypatch) -> Callable[[int, Callable[[], None]], None]:
    """Let something happen once the loss of a step has been logged."""

    def plan(step: int, what: Callable[[], None]) -> None:
        real = Log.step

        def log_step(self, run, here, *rest):
            real(self, run, here, *rest)
            if here == step:
                what()

        monkeypatch.setattr(Log, "step", log_step)

    return plan


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


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    mine = study(folder)
    with Log(folder / "out", mine.config) as log, Keeper(mine, "cdp-v2", 0, log.sync) as keeper:
        run = Run("cdp-v2", 0)
        asked = iter(range(STEPS))
        with pytest.raises(Interrupted):
            train(
                mine,
                "cdp-v2",
                0,
                lambda step, loss: log.step(run, step, loss, 0.1),
                run=run,
                keeper=keeper,
                stop=lambda: next(asked) == 4,
            )
    meta = json.loads((folder / "checkpoints/cdp-v2-seed0/5/meta/metadata").read_text())["meta"]
    assert (meta["note"]["losses"], len(meta["note"]["partial"]["4"])) == (4, 2)  # one worker's loss is on its way
    return folder


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


# ---- faults -------------------------------------------------------------------------------------------------


class Poisoned:
    """The data, but for the micro-batch of worker 1 at step 5."""

    def __init__(self, data: Any, poison: Callable[[np.ndarray, np.ndarray], None]):
        self._data, self._poison = data, poison

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def batches(self, size: int, seed: int, start_step: int = 0, **options: Any) -> Iterator[Any]:
        for step, (x, y) in enumerate(self._data.batches(size, seed, start_step, **options), start_step):
            x, y = x.astype(np.float32), y.copy()
            if step == 5:
                self._poison(x[size // 3 : 2 * size // 3], y[size // 3 : 2 * size // 3])
            yield x, y


def poisoned(poison: Callable[[np.ndarray, np.ndarray], None], folder: Path, **options: Any) -> training.Study:
    mine = study(folder, **options)
    return dataclasses.replace(mine, data=Poisoned(mine.data, poison))


@pytest.fixture(scope="module")
def unpoisoned(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpoisoned")
    run_all(poisoned(nothing, folder))
    return folder


def blank(images: np.ndarray, labels: np.ndarray) -> None:
    images[:] = np.nan


def nothing(images: np.ndarray, labels: np.ndarray) -> None:
    pass


def test_nan_in_one_micro_batch(unpoisoned, tmp_path):
    with pytest.raises(FloatingPointError, match=r"the loss of worker 1 at step 5 is nan \(rule cdp-v2, seed 0\)"):
        run_all(poisoned(blank, tmp_path, save_every=1))
    run_all(poisoned(nothing, tmp_path, resume=True))  # the last checkpoint is one from before
    assert losses(tmp_path) == losses(unpoisoned)


@jax.custom_vjp
def stings(x: jax.Array, bad: jax.Array) -> jax.Array:
    """The identity, with a gradient that is not a number where ``bad``."""
    return x


stings.defvjp(lambda x, bad: (x, bad), lambda bad, g: (jnp.where(bad, jnp.nan, g), None))


def test_a_gradient_that_is_not_finite_is_never_saved(tmp_path, monkeypatch):
    """Its loss is; the parameters are looked at before they are saved."""

    def marked(images: np.ndarray, labels: np.ndarray) -> None:
        labels[0] = -1

    real = training.cross_entropy
    monkeypatch.setattr(training, "cross_entropy", lambda y, labels: real(stings(y, (labels < 0).any()), abs(labels)))
    message = r"the parameters of stage 0, 1, 2 are not finite after step 5, though every loss was.*rule cdp-v2, seed 0"
    mine = prepare(config(tmp_path, save_every=1))
    mine = dataclasses.replace(mine, data=Poisoned(mine.data, marked))
    with pytest.raises(FloatingPointError, match=message):
        run_all(mine)
    assert sorted(path.name for path in (tmp_path / "checkpoints/cdp-v2-seed0").iterdir()) == ["4", "5"]
    with pytest.raises(FloatingPointError, match=r"the loss of worker \d at step 6 is nan"):
        run_all(dataclasses.replace(mine, config=config(tmp_path / "b", save_every=8)))


# the storage library's threads report to an event loop that its failure has closed
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk(alone, tmp_path, at_step, monkeypatch, capsys):
    """No file may grow beyond 8 KB: the losses fit, a checkpoint does not."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    at_step(4, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, most)))
    try:
        with pytest.raises(OSError, match=r"could not be written to .*; the last complete one is of step \d+"):
            run_all(study(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert len(losses(tmp_path)) < STEPS
    monkeypatch.undo()
    run_all(study(tmp_path, resume=True))
    assert losses(tmp_path) == losses(alone)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_checkpoint_is_named_and_the_older_one_can_be_used(interrupted, alone, tmp_path):
    shutil.copytree(interrupted, tmp_path, dirs_exist_ok=True)
    (newest,) = (tmp_path / "checkpoints/cdp-v2-seed0").glob("5")
    for path in newest.glob("state/**/d/*"):
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=f"checkpoint {newest} is damaged: .*; delete it to go on from step 4"):
        run_all(study(tmp_path, resume=True))
    shutil.rmtree(newest)
    run_all(study(tmp_path, resume=True))
    assert losses(tmp_path) == losses(alone)


def test_data_that_is_damaged_while_training(unpoisoned, tmp_path):
    """A shard that was cut short after it was opened, say; once it is repaired, the run goes on."""

    def cut(images: np.ndarray, labels: np.ndarray) -> None:
        raise ValueError("cifar10-train.tfrecord-00000-of-00001: truncated since it was opened, in record 7")

    with pytest.raises(ValueError, match="truncated since it was opened, in record 7"):
        run_all(poisoned(cut, tmp_path))
    run_all(poisoned(nothing, tmp_path, resume=True))
    assert losses(tmp_path) == losses(unpoisoned)


def test_missing_files_end_the_program_with_one_line(tmp_path):
    options = ["--dataset=fashion_mnist", f"--data-dir={tmp_path}", f"--devices={jax.device_count()}"]
    with pytest.raises(SystemExit, match=f"error: .*{tmp_path}"):
        accuracy.main([*options, f"--out={tmp_path}/out"])


# ---- evaluation ---------------------------------------------------------------------------------------------


def test_evaluation_while_training_goes_on(alone, tmp_path, capsys):
    """It changes no loss, and what it sees is the newest complete step: one less than has begun."""
    run_all(study(tmp_path, checkpoint_dir=None, eval_every=5))
    assert losses(tmp_path) == losses(alone)
    first, second = lines(tmp_path, "evaluation")
    assert [first["step"], first["begun"], second["step"], second["begun"]] == [4, 5, 9, 10]
    short = train(dataclasses.replace(study(tmp_path), total_steps=4), "cdp-v2", 0, lambda step, loss: None)
    assert first["loss"] == pytest.approx(short.test_loss, rel=1e-5)
    assert first["accuracy"] == pytest.approx(short.test_accuracy)
    assert abs(second["loss"] / short.test_loss - 1) > 1e-3
    assert "2 evaluations during training, best" in capsys.readouterr().err
