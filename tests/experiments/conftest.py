"""Studies that several tests look at, and a way to let something happen in the middle of one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.checkpointing import Keeper
from experiments.interruption import Interrupted
from experiments.log import Log
from experiments.run import Run
from experiments.running import run_all
from experiments.training import train
from tests.experiments.studies import STEPS, study


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
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
