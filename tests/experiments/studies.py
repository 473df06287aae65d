"""A small study whose schedule keeps losses in flight, compiled once for all tests of a process."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from experiments import training
from experiments.config import Config
from experiments.training import prepare

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
