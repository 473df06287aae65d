"""What is known of one run, a rule with a seed: its losses as they come in, its evaluations, its time."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import cyclic_jax as cj

READ_LATE = 4  # calls whose metrics are not read yet
READ_TOGETHER = 16  # calls whose metrics several processes exchange at once


class Evaluation(NamedTuple):
    """On the test split, during training.

    Attributes:
        step: updates that the evaluated parameters have received.
        begun: training steps begun by then; in a staggered executor one more.
        accuracy: share of labels.
        loss: mean.
    """

    step: int
    begun: int
    accuracy: float
    loss: float


@dataclass
class Run:
    """One rule with one seed.

    Attributes:
        losses: mean over workers, one per training step.
        evaluations: during training.
        seconds: of the training steps; compilation and evaluations are not counted.
    """

    rule: str
    seed: int
    losses: list[float] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    test_accuracy: float = float("nan")
    test_loss: float = float("nan")
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """Of its folders."""
        return f"{self.rule}-seed{self.seed}"

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last 20 steps."""
        return float(np.mean(self.losses[-20:]))


class Clock:
    """Adds to ``run.seconds`` what passes from now on."""

    def __init__(self, run: Run):
        self._run, self._since = run, time.perf_counter()

    def read(self) -> None:
        """Bring ``run.seconds`` up to date."""
        now = time.perf_counter()
        self._run.seconds += now - self._since
        self._since = now

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Time in here does not count."""
        self.read()
        yield
        self._since = time.perf_counter()


class Losses:
    """Collects each worker's loss until all workers have reported a step: in a staggered executor some come a call later.

    The newest metrics stay unread, so that the devices need not wait for the host.
    """

    def __init__(self, run: Run, num_workers: int, on_step: Callable[[int, float], None]):
        self.run, self._num_workers, self._on_step = run, num_workers, on_step
        self._unread = deque[cj.Metrics]()
        self._together = 1 if jax.process_count() == 1 else READ_TOGETHER
        self.partial: dict[int, list[float]] = {}
        """Of steps that some workers have reported and others have not."""

    def add(self, metrics: cj.Metrics) -> None:
        """One call's metrics. Raises as :meth:`catch_up`, for those of a few calls before."""
        self._unread.append(metrics)
        if len(self._unread) >= READ_LATE + self._together:
            self._read([self._unread.popleft() for _ in range(self._together)])

    def catch_up(self, *more: cj.Metrics) -> None:
        """Read all that was added, then ``more``; waits for the devices.

        Raises:
            FloatingPointError: for a loss that is not finite; names step and worker.
        """
        self._read([*self._unread, *more])
        self._unread.clear()

    def check(self, metrics: cj.Metrics) -> None:
        """Raise as :meth:`catch_up`, for metrics that will come again."""
        for one in cj.read_metrics([metrics]):
            self._finite(one)

    def _read(self, calls: list[cj.Metrics]) -> None:
        """The same in every process, so that all go on or all stop."""
        for metrics in cj.read_metrics(calls):
            for step, loss in self._finite(metrics):
                self.partial.setdefault(step, []).append(loss)
                if len(self.partial[step]) == self._num_workers:
                    self.run.losses.append(float(np.mean(self.partial.pop(step))))
                    self._on_step(step, self.run.losses[-1])

    def _finite(self, metrics: cj.Metrics) -> list[tuple[int, float]]:
        """(step, loss) of every worker that reports one."""
        found, run = [], self.run
        for worker in np.flatnonzero(metrics.step >= 0):
            step, loss = int(metrics.step[worker]), float(metrics.loss[worker])
            if not np.isfinite(loss):
                raise FloatingPointError(
                    f"the loss of worker {worker} at step {step} is {loss} (rule {run.rule}, seed {run.seed})"
                )
            found.append((step, loss))
        return found


def check_finite(state: cj.TrainState, run: Run) -> None:
    """Refuse parameters that are not finite; waits for the devices.

    Raises:
        FloatingPointError: naming the stages and the newest step whose gradient can be the cause.
    """
    bad = [j for j, good in enumerate(np.asarray(_finite(state.params))) if not good]
    if bad:
        raise FloatingPointError(
            f"the parameters of stage {', '.join(map(str, bad))} are not finite after step {int(state.step) - 1}, though every "
            f"loss was: a gradient of that step or of one before was not (rule {run.rule}, seed {run.seed})"
        )


@jax.jit
def _finite(params: tuple[object, ...]) -> jax.Array:
    """Bool ``[S]``."""

    def stage(tree: object) -> jax.Array:
        leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        return jnp.all(jnp.array([jnp.isfinite(leaf).all() for leaf in leaves]))

    return jnp.stack([stage(tree) for tree in params])
