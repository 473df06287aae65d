"""What a study leaves behind: a table, JSON lines, TensorBoard scalars and a picture of the losses."""

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import matplotlib
import numpy as np

from experiments.config import Options
from experiments.training import Run

matplotlib.use("Agg")


class Log:
    """JSON lines and TensorBoard scalars in ``folder``, written as the run goes; a context manager. Without a folder, nothing."""

    def __init__(self, folder: Path | None, config: Options):
        from tensorboardX import SummaryWriter

        self._writers: dict[str, Any] = {}
        self._file: IO[str] | None = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)  # of an earlier study, like its results.jsonl
        self._file = (folder / "results.jsonl").open("w")
        self._make_writer = lambda name: SummaryWriter(str(folder / "tensorboard" / name))
        self._line(kind="config", **dataclasses.asdict(config))

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        for writer in self._writers.values():
            writer.close()

    def step(self, rule: str, seed: int, step: int, loss: float, lr: float) -> None:
        """One training step."""
        self._line(kind="step", rule=rule, seed=seed, step=step, loss=loss, lr=lr)
        self._scalars(rule, seed, step, {"loss": loss, "lr": lr})

    def result(self, run: Run) -> None:
        """The end of one run."""
        values = {name: getattr(run, name) for name in ("test_accuracy", "test_loss", "final_loss", "seconds")}
        self._line(kind="result", rule=run.rule, seed=run.seed, steps=len(run.losses), **values)
        self._scalars(
            run.rule, run.seed, len(run.losses), {"test_accuracy": run.test_accuracy, "test_loss": run.test_loss}
        )

    def baseline(self, name: str, test_loss: float) -> None:
        """What the test costs without a model."""
        self._line(kind="baseline", name=name, test_loss=test_loss)

    def _line(self, **values: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(values, default=str) + "\n")
            self._file.flush()

    def _scalars(self, rule: str, seed: int, step: int, values: dict[str, float]) -> None:
        if self._file is None:
            return
        name = f"{rule}-seed{seed}"
        if name not in self._writers:
            self._writers[name] = self._make_writer(name)
        for tag, value in values.items():
            self._writers[name].add_scalar(tag, value, step)


def by_rule(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs grouped by rule, in the order they came."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.rule, []).append(run)
    return groups


def spread(values: Sequence[float], digits: int) -> str:
    """Mean ± sample standard deviation; the mean alone for one value.

    >>> spread([1.0, 3.0], 2), spread([1.0], 2)
    ('2.00 ± 1.41', '1.00')
    """
    deviation = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{deviation}"


def table(runs: Sequence[Run]) -> str:
    """Markdown: rule, test accuracy (mean ± sample standard deviation over seeds), final loss, seconds a run."""
    rows = ["| rule | test accuracy (%) | final loss | time (s) |", "| --- | --- | --- | --- |"]
    for rule, group in by_rule(runs).items():
        accuracy = spread([100 * run.test_accuracy for run in group], 2)
        rows.append(f"| {rule} | {accuracy} | {_loss_and_time(group)} |")
    return "\n".join(rows)


def loss_table(runs: Sequence[Run], executors: Mapping[str, str], baselines: Mapping[str, float]) -> str:
    """Markdown: rule, its executor, test loss (mean ± sample standard deviation over seeds), final training loss, seconds a run.

    Args:
        runs: of every rule and seed.
        executors: the name of each rule's executor.
        baselines: test losses without a model, by name.
    """
    rows = [
        "| rule | executor | test loss (nats/char) | final train loss | time (s) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for rule, group in by_rule(runs).items():
        loss = spread([run.test_loss for run in group], 3)
        rows.append(f"| {rule} | {executors[rule]} | {loss} | {_loss_and_time(group)} |")
    rows += [f"| {name} | none | {loss:.3f} | | |" for name, loss in baselines.items()]
    return "\n".join(rows)


def _loss_and_time(group: Sequence[Run]) -> str:
    loss, seconds = (np.mean([getattr(run, name) for run in group]) for name in ("final_loss", "seconds"))
    return f"{loss:.4f} | {seconds:.1f}"


def plot_losses(runs: Sequence[Run], path: Path) -> None:
    """Training loss of every rule: the mean over seeds, smoothed over 2 % of the run, on a logarithmic axis."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for rule, group in by_rule(runs).items():
        losses = np.mean([run.losses for run in group], axis=0)
        window = max(1, len(losses) // 50)
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        axes.plot(np.arange(len(smooth)) + window, smooth, label=f"{rule} ({len(group)} seeds)", linewidth=1.5)
    axes.set(xlabel="training step", ylabel="training loss", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
