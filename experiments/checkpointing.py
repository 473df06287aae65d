"""Checkpoints of a study: a folder for each run, and what a run goes on from beside its state.

Losses are in results.jsonl, which is on disk before a checkpoint is begun; a checkpoint holds how many there were, and what of the
next ones had been reported.
"""

from collections.abc import Callable
from typing import Any

import cyclic_jax as cj
from cyclic_jax.checkpoint import CANONICAL, Checkpoints
from experiments.config import as_json, fixed, rule_and_executor
from experiments.run import Losses, Run, check_finite
from experiments.training import Study


def refuse_overwriting(study: Study) -> None:
    """Raise ValueError if there are checkpoints of a run, and the study is not to go on from them."""
    config = study.config
    if config.checkpoint_dir is None or config.resume:
        return
    for rule in study.executors:
        for seed in range(config.seeds):
            folder = config.checkpoint_dir / Run(rule, seed).name
            if folder.is_dir() and any(folder.iterdir()):
                raise ValueError(f"{folder} already holds checkpoints: go on with --resume, or name another folder")


class Keeper:
    """The checkpoints of one run; a context manager.

    Args:
        study: what it belongs to; ``study.config.checkpoint_dir`` is set.
        rule: a key of ``study.executors``.
        seed: of the run.
        sync: called before a checkpoint is begun: what was logged so far must then be on disk.
    """

    def __init__(self, study: Study, rule: str, seed: int, sync: Callable[[], None]):
        config = study.config
        assert config.checkpoint_dir is not None
        self._executor, self._canonical, self._sync = study.executors[rule], config.checkpoint_form == CANONICAL, sync
        identity = {"rule": rule_and_executor(config, rule)[0], "seed": seed, **fixed(as_json(config))}
        identity |= {"total_steps": study.total_steps, "data": study.data.description}
        folder = config.checkpoint_dir / Run(rule, seed).name
        self._store = Checkpoints(folder, self._executor, identity=identity, about={"config": as_json(config)})
        self._note = self._store.note() if self._store.latest is not None else {}

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    @property
    def latest(self) -> int:
        """Training steps begun at the newest checkpoint, 0 without one."""
        return self._store.latest or 0

    @property
    def known_losses(self) -> int:
        """How many losses were complete, and logged, at the newest checkpoint."""
        return self._note.get("losses", 0)

    @property
    def seconds(self) -> float:
        """Of training up to there."""
        return self._note.get("seconds", 0.0)

    def restore(self, state: cj.TrainState, batch: Any, losses: Losses) -> Any:
        """The carry at the newest checkpoint; ``losses`` gets what had been reported of its next steps.

        Raises:
            ValueError: if the checkpoint is of another run or damaged.
        """
        restored = self._store.restore(state, batch)
        losses.partial = {int(step): reported for step, reported in restored.note["partial"].items()}
        return restored.carry

    def save(self, begun: int, carry: Any, losses: Losses) -> Any:
        """A checkpoint after ``begun`` training steps; returns the carry to go on with.

        Nothing is saved that is not finite: what is in flight is finished on a copy first, and looked at.

        Raises:
            FloatingPointError: if a loss or a parameter is not finite.
            OSError: if this checkpoint or the one before could not be written.
        """
        losses.catch_up()
        state, last = self._executor.drain(carry)
        losses.check(last)
        check_finite(state, losses.run)
        if not self._canonical:
            self._store.save(begun, carry, self._noted(losses))
            return carry
        losses.catch_up(last)
        self._store.save_canonical(begun, state, self._noted(losses))
        return self._executor.init(state)

    def save_last(self, total: int, state: cj.TrainState, losses: Losses) -> None:
        """The canonical state at the end, complete when this returns. Raises as :meth:`save`."""
        if self.latest < total:
            self._store.save_canonical(total, state, self._noted(losses))
        self.wait()

    def wait(self) -> None:
        """Until the last checkpoint is complete. Raises OSError if it cannot be."""
        self._store.wait()

    def _noted(self, losses: Losses) -> dict[str, Any]:
        self._sync()
        partial = {str(step): reported for step, reported in losses.partial.items()}
        return {"losses": len(losses.run.losses), "partial": partial, "seconds": losses.run.seconds}
