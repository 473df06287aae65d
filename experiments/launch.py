"""Start several processes on this machine that train together, for trying it out.

``python -m experiments.launch --processes 2 --devices-per-process 2 -- accuracy --rules cdp-v2`` runs
``python -m experiments.accuracy --rules cdp-v2`` twice; each process simulates two CPU devices, and they talk over the loopback
interface. Process 0 prints as it would alone, lines of the others begin with their number. When one process ends with an error, the
others have ``--grace`` seconds to end too and are then killed; the exit code is that of the first one that failed.
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
    """Seconds that the others have to end, once one has failed."""


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
    """Run all commands at once until all have ended, SIGTERM going to each of them.

    Args:
        commands: process 0 prints as it would alone, the others behind their number.
        grace: seconds from the first failure to the killing of those that still run.

    Returns:
        0, or the exit code of the first that failed (128 + signal where a signal ended it).
    """
    children = [_start(k, command) for k, command in enumerate(commands)]

    def forward(number: int, frame: FrameType | None) -> None:
        for child in children:
            child.send_signal(number)

    before = signal.signal(signal.SIGTERM, forward)
    try:
        return _wait(children, grace)
    finally:
        signal.signal(signal.SIGTERM, before)
        for child in children:  # also when a KeyboardInterrupt ends the waiting
            child.kill()
            child.wait()


def _start(k: int, command: Sequence[str]) -> subprocess.Popen[str]:
    if k == 0:
        return subprocess.Popen(command, text=True)
    child = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
    threading.Thread(target=_copy, args=(k, child), daemon=True).start()
    return child


def _copy(k: int, child: "subprocess.Popen[str]") -> None:
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("[Gloo] Rank"):  # what the transport says of every connection
            continue
        print(f"[process {k}] {line.rstrip()}", file=sys.stderr, flush=True)


def _wait(children: Sequence["subprocess.Popen[str]"], grace: float) -> int:
    """The exit code of the first that fails; after that, not longer than ``grace`` seconds."""
    code, deadline = 0, float("inf")
    while time.monotonic() < deadline:
        codes = [child.poll() for child in children]
        failed = [(k, number) for k, number in enumerate(codes) if number]
        if failed and code == 0:
            k, number = failed[0]
            code, deadline = (number if number > 0 else 128 - number), time.monotonic() + grace
            print(f"process {k} ended with code {code}; the others end within {grace:g} s", file=sys.stderr, flush=True)
        if None not in codes:
            return code
        time.sleep(POLL)
    return code


if __name__ == "__main__":
    main()
