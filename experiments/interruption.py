"""SIGTERM, which preempted machines get, and Ctrl-C: the run saves a checkpoint and ends with an exit code of its own."""

import os
import signal
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

EXIT_CODE = os.EX_TEMPFAIL  # 75, "try again later": the same command with --resume goes on
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(Exception):
    """The run was told to end, and its checkpoint is complete."""

    def __init__(self, run: str, step: int | None):
        where = "after its end" if step is None else f"saved after {step} steps"
        super().__init__(f"interrupted in {run}, {where}: the same command with --resume goes on")


class Interruptions:
    """Remembers a signal until it is asked for; a context manager. A second signal acts at once, as it would have without.

    With several processes, jax takes SIGTERM, and all processes stop after the same step; Ctrl-C is left alone.
    """

    def __init__(self) -> None:
        self._came, self._asked = False, 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruptions":
        if jax.process_count() == 1:
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def __call__(self) -> bool:
        """Whether to stop now. Every process asks equally often."""
        if jax.process_count() == 1:
            return self._came
        self._asked += 1
        return multihost_utils.reached_preemption_sync_point(self._asked)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
