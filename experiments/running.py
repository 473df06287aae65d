"""Running a study: every rule with every seed, the files it leaves behind, and the errors a person sees."""

import sys
import traceback
from collections.abc import Callable, Mapping
from typing import TypeVar

from tqdm import tqdm

import cyclic_jax as cj
from experiments import processes, report
from experiments.config import Options, check, make_rule
from experiments.training import Run, Study, train

AnyOptions = TypeVar("AnyOptions", bound=Options)


def command(config: AnyOptions, run_study: Callable[[AnyOptions], str]) -> None:
    """Print what ``run_study(config)`` returns; an error in the configuration or the data ends the program with one line."""
    try:
        check(config)
        devices = config.processes.devices(config.num_workers) if config.devices is None else config.devices
        cj.simulate_devices(devices)
        config.processes.join()
        processes.say(run_study(config))
    except (ValueError, FloatingPointError, FileNotFoundError) as error:
        processes.stop(f"error: {error}")
    except Exception:
        if config.processes.several:
            processes.stop(traceback.format_exc())
        raise


def run_all(study: Study, baselines: Mapping[str, float] | None = None) -> list[Run]:
    """Train every rule with every seed, and write results.jsonl, TensorBoard scalars and loss.png.

    Args:
        study: from :func:`experiments.training.make_study`.
        baselines: test losses without a model, by name, for results.jsonl.
    """
    config, runs = study.config, list[Run]()
    with report.Log(config.out if processes.first() else None, config) as log:
        for name, loss in (baselines or {}).items():
            log.baseline(name, loss)
        for seed in range(config.seeds):
            for rule in study.executors:
                runs.append(one_run(study, rule, seed, log))
                log.result(runs[-1])
    if processes.first():
        report.plot_losses(runs, config.out / "loss.png")
    return runs


def one_run(study: Study, rule: str, seed: int, log: report.Log) -> Run:
    """One rule with one seed, behind a progress bar that shows the loss."""
    every = 0.2 if sys.stderr.isatty() else 5.0  # seconds; a log file wants fewer lines
    with tqdm(
        total=study.total_steps,
        desc=f"{rule} seed {seed}",
        unit="step",
        mininterval=every,
        disable=not processes.first(),
    ) as bar:

        def on_step(step: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            bar.update()
            log.step(rule, seed, step, loss, float(study.learning_rates[step]))

        return train(study, rule, seed, on_step)


def heading(study: Study, model: str) -> str:
    """What is about to be trained; ``model`` is what the model is called."""
    config, pairs = study.config, study.config.num_workers * study.config.num_stages
    masks = {name: int(make_rule(config, name).fresh.sum()) for name in study.executors}
    return (
        f"{study.data.name}: {study.data.description}\n"
        f"{config.num_workers} workers x {config.batch_per_worker} rows, {study.total_steps} steps, "
        f"{config.executor} executor unless a rule names another\n"
        f"masks: {', '.join(f'{name} fresh on {fresh}' for name, fresh in masks.items())} of {pairs} pairs (worker, stage); "
        f"cdp-v2 is the method's mask, cdp-v2-published that of the authors' code\n"
        f"{model} in {config.num_stages} stages by {config.partition}:\n"
        f"{study.model.describe()}"
    )
