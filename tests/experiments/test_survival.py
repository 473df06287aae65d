"""A study that is killed at random moments and resumed is, bit for bit, the study that was left alone."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cyclic_jax.executors import EXECUTORS

KILLED = [name for name in ("replicated", "pipeline", "zero") if name in EXECUTORS]
# N = 3: a worker's loss comes in the call after that of its step, so some are on their way when a checkpoint is written
SIZES = [
    "--model=residual_mlp",
    "--num-workers=3",
    "--num-stages=3",
    "--batch-per-worker=4",
    "--devices=3",
    "--seeds=1",
]


def command(folder: Path, rules: list[str], *more: str) -> list[str]:
    files = ["--out", str(folder / "out"), "--checkpoint-dir", str(folder / "checkpoints")]
    return [sys.executable, "-m", "experiments.accuracy", *SIZES, "--lr=0.005", "--rules", *rules, *files, *more]


def environment(cache: Path) -> dict[str, str]:
    """The children compile once."""
    return {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def lines(folder: Path) -> list[dict]:
    path = folder / "out/results.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def numbers(folder: Path) -> dict[tuple, float | list]:
    """Everything that must be equal, by what it is; each of it is there once."""
    found: dict[tuple, float | list] = {}
    for line in lines(folder):
        kind, rule = line["kind"], line.get("rule")
        if kind in ("step", "evaluation"):
            assert (kind, rule, line["step"]) not in found
            found[kind, rule, line["step"]] = line["loss"]
        elif kind == "result":
            assert (kind, rule) not in found
            found[kind, rule] = [line["test_accuracy"], line["test_loss"], line["steps"]]
    return found


def run(arguments: list[str], cache: Path) -> None:
    subprocess.run(arguments, env=environment(cache), check=True, capture_output=True, timeout=600)


def kill_when(arguments: list[str], cache: Path, folder: Path, rule: str, step: int, delay: float) -> bool:
    """Start, kill −9 ``delay`` seconds after ``step`` was logged; whether a checkpoint was being written."""
    child = subprocess.Popen(arguments, env=environment(cache), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 600
    while child.poll() is None and time.monotonic() < end:
        if any(line.get("rule") == rule and line.get("step", -1) >= step for line in lines(folder)):
            time.sleep(delay)
            break
        time.sleep(0.005)
    os.kill(child.pid, signal.SIGKILL)  # not yet waited for: the process id is still its own
    assert child.wait() == -signal.SIGKILL, "it ended before it was killed"
    return any("tmp" in path.name for path in (folder / "checkpoints").glob("*/*"))


def survive(tmp_path: Path, executors: list[str], kills: int, steps: int, seed: int) -> int:
    """Compare; returns how many kills hit a checkpoint that was being written."""
    rules, cache, rng = [f"cdp-v2@{name}" for name in executors], tmp_path / "cache", random.Random(seed)
    more = ["--steps", str(steps), "--save-every", "3", "--eval-every", "20", "--resume"]
    run(command(tmp_path / "alone", rules, *more), cache)
    killed, writing = command(tmp_path / "killed", rules, *more), 0
    for rule in rules:
        for step in sorted(rng.sample(range(steps * 3 // 4), kills)):
            writing += kill_when(killed, cache, tmp_path / "killed", rule, step, rng.uniform(0, 0.1))
    run(killed, cache)
    want, got = numbers(tmp_path / "alone"), numbers(tmp_path / "killed")
    assert sum(key[0] == "step" for key in want) == steps * len(rules)
    assert sum(key[0] == "evaluation" for key in want) == steps // 20 * len(rules)
    assert got == want
    return writing


def test_killed_once_in_each_executor(tmp_path):
    survive(tmp_path, KILLED, kills=1, steps=60, seed=os.getpid())


@pytest.mark.slow
@pytest.mark.parametrize("executor", KILLED)
def test_killed_ten_times(executor, tmp_path):
    hit = survive(tmp_path, [executor], kills=10, steps=400, seed=0)
    print(f"{executor}: {hit} of 10 kills hit a checkpoint that was being written")
