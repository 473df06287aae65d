"""Start several processes on this machine that train together, for trying it out.

``python -m experiments.launch --processes 2 --devices-per-process 2 -- accuracy --rules cdp-v2`` runs
``python -m experiments.accuracy --rules cdp-v2`` twice; each process simulates two CPU devices, and they talk over the loopback
interface. Process 0 prints as it would alone, lines of the others begin with their number. When one process ends with an error, the
others have ``--grace`` seconds to end too and are then killed; so they have after a SIGTERM, which goes on to all of them. The exit
code is that of the first one that failed.
"""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

import tyro

EXPERIMENTS = ("accuracy", "language")
POLL = 0.1  # seconds


@dataclass(frozen=True)
class Config:
    """Start several processes on this machine that train together. After ``--``: an experiment and its options."""

    processes: int = 2
    """How many."""
    devices_per_process: int = 2
    """Simulated CPU devices of each."""
    grace: float = 10.0
    """Seconds that the processes have to end, once one has failed or SIGTERM has come."""


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    config = tyro.cli(Config, args=argv[:cut], description=__doc__)
    try:
        commands = make_commands(config, argv[cut + 1 :])
    except ValueError as error:
        sys.exit(f"error: {error}")
    sys.exit(run(commands, config.grace))


def make_commands(config: Config, experiment: Sequence[str]) -> list[list[str]]:
    """The command of each process.

    Raises:
        ValueError: for a value that cannot be, or an experiment that does not train on several processes.
    """
    for name in ("processes", "devices_per_process", "grace"):
        if not getattr(config, name) > 0:
            raise ValueError(f"{name}={getattr(config, name)}: it must be positive")
    if not experiment or experiment[0] not in EXPERIMENTS:
        named = repr(experiment[0]) if experiment else "nothing"
        raise ValueError(
            f"{named} stands after --: name an experiment, {' or '.join(EXPERIMENTS)}, and then its options"
        )
    command = [sys.executable, "-m", f"experiments.{experiment[0]}", *experiment[1:]]
    together = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(config.processes)]
    together += ["--devices", str(config.devices_per_process)]
    return [[*command, *together, "--process-id", str(k)] for k in range(config.processes)]


def free_port() -> int:
    """A port on the loopback interface that nobody listens on just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(commands: Sequence[Sequence[str]], grace: float) -> int:
    """Run all commands at once until all have ended.

    Args:
        commands: process 0 prints as it would alone, the others behind their number.
        grace: seconds from the first failure, or from a SIGTERM, which each of them gets, to the killing of those that still run.

    Returns:
        0, or the exit code of the first that failed (128 + signal where a signal ended it).
    """
    together = Together(commands, grace)
    before = signal.signal(signal.SIGTERM, together.terminate)
    try:
        return together.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        together.kill()  # also when a KeyboardInterrupt ends the waiting


class Together:
    """Processes that end together: see :func:`run`."""

    def __init__(self, commands: Sequence[Sequence[str]], grace: float):
        self._grace, self._deadline = grace, float("inf")
        self._children = [_start(k, command) for k, command in enumerate(commands)]
        self._copies = [_copying(k, child) for k, child in enumerate(self._children) if child.stdout]

    def wait(self) -> int:
        """Until all have ended, or the time is up. The exit code of the first that failed."""
        first = 0
        while None in (codes := [child.poll() for child in self._children]) and time.monotonic() < self._deadline:
            first = first or self._failed(codes)
            time.sleep(POLL)
        self.kill()
        return first or self._failed([child.poll() for child in self._children])

    def _failed(self, codes: Sequence[int | None]) -> int:
        """The exit code of one that has failed, or 0; from then on the others have to hurry."""
        for k, number in enumerate(codes):
            if number:
                code = number if number > 0 else 128 - number
                print(
                    f"process {k} ended with code {code}; the others end within {self._grace:g} s",
                    file=sys.stderr,
                    flush=True,
                )
                self._hurry()
                return code
        return 0

    def _hurry(self) -> None:
        self._deadline = min(self._deadline, time.monotonic() + self._grace)

    def terminate(self, number: int, frame: FrameType | None) -> None:
        """A handler of SIGTERM: it goes on to all, which may end by themselves."""
        self._hurry()
        for child in self._children:
            child.send_signal(number)

    def kill(self) -> None:
        """What still runs."""
        for child in self._children:
            child.kill()
            child.wait()
        for copy in self._copies:
            copy.join(timeout=self._grace)


def _start(k: int, command: Sequence[str]) -> subprocess.Popen[str]:
    if k == 0:
        return subprocess.Popen(command, text=True)
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")


def _copying(k: int, child: "subprocess.Popen[str]") -> threading.Thread:
    thread = threading.Thread(target=_copy, args=(k, child), daemon=True)
    thread.start()
    return thread


def _copy(k: int, child: "subprocess.Popen[str]") -> None:
    assert child.stdout is not None
    with child.stdout as lines:
        for line in lines:
            if not line.startswith("[Gloo] Rank"):  # what the transport says of every connection
                print(f"[process {k}] {line.rstrip()}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
