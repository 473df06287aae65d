"""Several processes that train together: how they find each other, and who speaks for them.

Start the same command once for each process, and tell each where process 0 is (``--coordinator``, ``--num-processes``,
``--process-id``), or let jax find out from SLURM, a TPU pod, Kubernetes or Open MPI (``--distributed``). ``experiments.launch``
starts several on one machine, for trying it out.
"""

import os
import sys
import time
from dataclasses import dataclass
from typing import NoReturn, TextIO

import jax
import numpy as np
from jax.experimental import multihost_utils

LAST_WORDS = (
    1.0  # seconds: when process 0 ends, jax ends the others at once, and they may have the same error to report
)


@dataclass(frozen=True)
class Processes:
    """Which processes train together; by default this one alone."""

    coordinator: str | None = None
    """HOST:PORT of process 0, as the others reach it; each process is started with the same one."""
    num_processes: int | None = None
    """How many there are, with --coordinator."""
    process_id: int | None = None
    """Which one this is, from 0, with --coordinator."""
    distributed: bool = False
    """Find the others through the cluster: SLURM, a TPU pod, Kubernetes or Open MPI."""
    heartbeat_timeout: int = 100
    """Seconds after which a silent process counts as dead, and all others end."""

    @property
    def several(self) -> bool:
        """Is this one of several?"""
        return self.distributed or self.coordinator is not None

    def check(self) -> None:
        """Refuse what does not go together.

        Raises:
            ValueError: naming the option and its value.
        """
        by_hand = {"--num-processes": self.num_processes, "--process-id": self.process_id}
        if self.distributed and (self.coordinator or by_hand != dict.fromkeys(by_hand)):
            raise ValueError(
                "--distributed finds the other processes by itself: leave --coordinator and its two companions out"
            )
        if self.coordinator is None and by_hand != dict.fromkeys(by_hand):
            raise ValueError(
                "--num-processes and --process-id need --coordinator HOST:PORT, where process 0 can be reached"
            )
        if self.coordinator is not None:
            self._check_by_hand(self.coordinator, by_hand)
        if self.heartbeat_timeout < 1:
            raise ValueError(f"--heartbeat-timeout {self.heartbeat_timeout}: it must be at least 1 second")

    def _check_by_hand(self, coordinator: str, companions: dict[str, int | None]) -> None:
        for name, value in companions.items():
            if value is None:
                raise ValueError(f"--coordinator {coordinator} needs {name} too")
        host, _, port = coordinator.rpartition(":")
        if not (host and port.isdecimal()):
            raise ValueError(f"--coordinator {coordinator}: it must be HOST:PORT, such as 10.0.0.1:1234")
        count, number = self.num_processes or 0, self.process_id or 0
        if not 0 <= number < count:
            raise ValueError(f"--process-id {number} of --num-processes {count}: it must lie in [0, {count})")

    def devices(self, num_workers: int) -> int:
        """Simulated devices of this process: one for each of its workers, or just one if ``--distributed`` is to find the others.

        Raises:
            ValueError: if the workers cannot be divided among the processes.
        """
        if self.distributed:
            return 1
        count = self.num_processes or 1
        if num_workers % count:
            raise ValueError(
                f"{num_workers} workers cannot be divided among {count} processes: set --devices, those of each process"
            )
        return num_workers // count

    def join(self) -> None:
        """Meet the others. Call it before jax starts.

        Raises:
            ValueError: if no cluster is found.
        """
        if self.coordinator is not None:
            jax.distributed.initialize(
                self.coordinator,
                self.num_processes,
                self.process_id,
                heartbeat_timeout_seconds=self.heartbeat_timeout,
            )
        elif self.distributed:
            try:
                jax.distributed.initialize(heartbeat_timeout_seconds=self.heartbeat_timeout)
            except ValueError as error:
                raise ValueError(
                    "--distributed finds no SLURM job, TPU pod, Kubernetes job or Open MPI run: give --coordinator HOST:PORT, "
                    f"--num-processes and --process-id ({error})"
                ) from error


def first() -> bool:
    """Does this process write what is written once: tables, logs, pictures?"""
    return jax.process_index() == 0


def say(text: str, file: TextIO | None = None) -> None:
    """Print it, once."""
    if first():
        print(text, file=file, flush=True)


def total(values: np.ndarray) -> np.ndarray:
    """The sum of every process's values, on all of them; all must call it."""
    if jax.process_count() == 1:
        return values
    return np.asarray(multihost_utils.process_allgather(values)).sum(axis=0)


def stop(message: str) -> NoReturn:
    """End this process with an error, and do not wait for the others, as jax would: they may be waiting for this one."""
    if not jax.distributed.is_initialized():
        sys.exit(message)
    print(f"process {jax.process_index()}: {message}", file=sys.stderr, flush=True)
    if first():
        time.sleep(LAST_WORDS)
    sys.stdout.flush()
    os._exit(1)
