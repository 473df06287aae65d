"""Starting processes that train together: what they print, how they end."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from experiments import launch
from experiments.processes import Processes

ROOT = Path(__file__).parent.parent.parent
TINY = ["--model", "residual_mlp", "--num-workers", "2", "--num-stages", "2", "--lr", "0.005", "--seeds", "1"]


def launched(tmp_path: Path, *options: str, processes: int = 2, devices: int = 1) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "experiments.launch",
        f"--processes={processes}",
        f"--devices-per-process={devices}",
    ]
    command += ["--", "accuracy", *TINY, "--out", str(tmp_path / "runs"), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


def test_two_processes_train_as_one_and_write_once(tmp_path):
    options = ("--steps", "25", "--rules", "cdp-v2@replicated")
    two = launched(tmp_path / "two", *options)
    one = launched(tmp_path / "one", *options, processes=1, devices=2)
    assert (two.returncode, one.returncode) == (0, 0), two.stderr + one.stderr
    rows = [[line.split("|")[:4] for line in run.stdout.splitlines()[-3:]] for run in (two, one)]
    assert rows[0] == rows[1]  # all but the time
    assert two.stdout.count("| rule |") == two.stderr.count("workers x 16 rows") == 1
    assert losses(tmp_path / "two/runs") == losses(tmp_path / "one/runs")
    assert len(losses(tmp_path / "two/runs")) == 25


def test_all_processes_stop_at_the_same_loss(tmp_path):
    """The same error from both, and no process waits for the other (where one is quick, jax may end the other before it speaks)."""
    result = launched(tmp_path, "--steps", "30", "--rules", "cdp-v2", "--lr", "1e30", "--schedule", "constant")
    assert result.returncode == 1
    errors = [line for line in result.stderr.splitlines() if "error: the loss of worker" in line]
    assert len(errors) in (1, 2)
    assert len({line.split("error: ")[1] for line in errors}) == 1


def test_an_idle_process_is_refused(tmp_path):
    result = launched(tmp_path, "--steps", "2", "--rules", "cdp-v2@pipeline", devices=2)
    assert result.returncode == 1
    assert "the mesh has 2 of 4 devices and leaves processes [1] of 2 without work" in result.stderr


DIES = """
import os, signal, sys, threading, time
from pathlib import Path

from experiments import accuracy

options = sys.argv[1:]
log = Path(options[options.index("--out") + 1]) / "results.jsonl"


def die():
    while not (log.exists() and log.read_text().count('"step"') > 10):
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


threading.Thread(target=die, daemon=True).start()
accuracy.main(options)
"""


def test_a_process_killed_in_training_ends_the_run(tmp_path, capfd):
    """The other one waits for its messages, and would do so until jax's heartbeats time out."""
    options = ["accuracy", *TINY, "--steps", "20000", "--rules", "cdp-v2@replicated", "--out", str(tmp_path)]
    lives, dies = launch.make_commands(launch.Config(devices_per_process=1), options)
    dies = [dies[0], "-c", DIES, *dies[3:]]
    assert launch.run([lives, dies], grace=2.0) == 128 + signal.SIGKILL
    assert "process 1 ended with code 137; the others end within 2 s" in capfd.readouterr().err
    assert 10 < len(losses(tmp_path)) < 20000


# ---- how they end, with any commands ------------------------------------------------------------------------


def python(*lines: str) -> list[str]:
    return [sys.executable, "-c", "\n".join(lines)]


FOREVER = python("import signal, time", "signal.signal(signal.SIGTERM, signal.SIG_IGN)", "time.sleep(60)")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others(victim, capfd):
    """SIGKILL, as when memory runs out; the others ignore anything milder."""
    suicide = python("import os, signal", "os.kill(os.getpid(), signal.SIGKILL)")
    commands = [suicide if k == victim else FOREVER for k in range(3)]
    start = time.monotonic()
    assert launch.run(commands, grace=1.0) == 128 + signal.SIGKILL
    assert 1.0 <= time.monotonic() - start < 10.0
    assert f"process {victim} ended with code 137; the others end within 1 s" in capfd.readouterr().err


def test_others_may_end_by_themselves():
    slow = python("import time, sys", "time.sleep(0.5)", "sys.exit(3)")
    start = time.monotonic()
    assert launch.run([python("import sys; sys.exit(7)"), slow], grace=30) == 7
    assert time.monotonic() - start < 10


def test_output_and_success(capfd):
    assert launch.run([python("print('zero')"), python("print('one')", "print('[Gloo] Rank 0 is')")], grace=1) == 0
    captured = capfd.readouterr()
    assert captured.out == "zero\n"
    assert captured.err == "[process 1] one\n"


def test_sigterm_reaches_every_process():
    exits = python(
        "import signal, sys, time", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))", "time.sleep(60)"
    )
    threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert launch.run([exits, exits], grace=10) == 75
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_sigterm_that_is_ignored_kills_in_time():
    threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    start = time.monotonic()
    assert launch.run([FOREVER, FOREVER], grace=1.0) == 128 + signal.SIGKILL
    assert time.monotonic() - start < 15


def test_refused():
    config = launch.Config()
    with pytest.raises(ValueError, match="'memory' stands after --: name an experiment, accuracy or language"):
        launch.make_commands(config, ["memory"])
    with pytest.raises(ValueError, match="nothing stands after --"):
        launch.make_commands(config, [])
    with pytest.raises(ValueError, match="processes=0: it must be positive"):
        launch.make_commands(launch.Config(processes=0), ["accuracy"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distributed": True, "coordinator": "a:1"}, "--distributed finds the other processes by itself"),
        ({"process_id": 0}, "need --coordinator HOST:PORT"),
        ({"coordinator": "a:1", "process_id": 0}, "--coordinator a:1 needs --num-processes too"),
        ({"coordinator": "a", "num_processes": 2, "process_id": 0}, "--coordinator a: it must be HOST:PORT"),
        (
            {"coordinator": "a:1", "num_processes": 2, "process_id": 2},
            r"--process-id 2 of --num-processes 2: .* \[0, 2\)",
        ),
        ({"heartbeat_timeout": 0}, "--heartbeat-timeout 0"),
    ],
)
def test_flags_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        Processes(**options).check()


def test_simulated_devices_of_a_process():
    assert Processes().devices(4) == 4
    assert Processes("a:1", 2, 0).devices(4) == 2
    assert Processes(distributed=True).devices(4) == 1
    with pytest.raises(ValueError, match="4 workers cannot be divided among 3 processes: set --devices"):
        Processes("a:1", 3, 0).devices(4)
