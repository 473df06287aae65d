"""A profiler's trace of a few training steps, for TensorBoard or Perfetto.

The compiled step names its parts: ``F2`` and ``B1`` are the forward of stage 2 and the backward of stage 1, ``update0`` an update,
``send/…`` a message. In the synchronous executor a backward is called ``transpose(jvp(F1))``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

STEPS, SKIPPED = 3, 2  # the first steps of a process are not like the others


class Profile:
    """A trace of ``STEPS`` steps in ``folder``, or nothing if that is ``None``; a context manager around the training loop."""

    def __init__(self, folder: Path | None, total: int):
        self._folder, self._seen, self._on = folder, 0, False
        self._first = max(0, min(SKIPPED, total - STEPS))

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the call of a training step."""
        if self._folder is None:
            yield
            return
        if self._seen == self._first:
            jax.profiler.start_trace(str(self._folder))
            self._on = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        self._seen += 1
        if self._seen == self._first + STEPS:
            self._stop()

    def _stop(self) -> None:
        if self._on:
            jax.effects_barrier()
            jax.profiler.stop_trace()
            self._on = False
