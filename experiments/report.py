"""What a study says at its end: a table, a summary of each run, and a picture of the losses."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

from experiments.run import Run

matplotlib.use("Agg")


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


def summary(runs: Sequence[Run]) -> str:
    """One line for each run: how far, how long, the losses, and its best evaluation during training."""
    return "\n".join(map(_in_words, runs))


def _in_words(run: Run) -> str:
    text = f"{run.rule} seed {run.seed}: {len(run.losses)} steps in {run.seconds:.1f} s, training loss {run.final_loss:.4f}, "
    text += f"test loss {run.test_loss:.4f}, test accuracy {100 * run.test_accuracy:.2f} %"
    if run.evaluations:
        best = max(run.evaluations, key=lambda evaluation: evaluation.accuracy)
        text += f"; {len(run.evaluations)} evaluations during training, best {100 * best.accuracy:.2f} % at step {best.step}"
    return text


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
