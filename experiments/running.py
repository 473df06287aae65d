"""Running a study: every rule with every seed, the files it leaves behind, and the errors a person sees."""

import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TypeVar

from tqdm import tqdm

import cyclic_jax as cj
from experiments import processes, report
from experiments.checkpointing import Keeper, refuse_overwriting
from experiments.config import Options, check, make_rule
from experiments.interruption import EXIT_CODE, Interrupted, Interruptions
from experiments.log import Log
from experiments.run import Evaluation, Run
from experiments.training import Study, train

AnyOptions = TypeVar("AnyOptions", bound=Options)


def command(config: AnyOptions, run_study: Callable[[AnyOptions], str]) -> None:
    """Print what ``run_study(config)`` returns.

    An error in the configuration, the data, the files or the numbers ends the program with one line and exit code 1. A run that
    was interrupted and has saved a checkpoint ends it with :data:`experiments.interruption.EXIT_CODE`.
    """
    try:
        check(config)
        devices = config.processes.devices(config.num_workers) if config.devices is None else config.devices
        cj.simulate_devices(devices)
        config.processes.join()
        processes.say(run_study(config))
    except (ValueError, FloatingPointError, OSError) as error:
        processes.stop(f"error: {error}")
    except Interrupted as interrupted:
        processes.say(str(interrupted), sys.stderr)
        sys.exit(EXIT_CODE)
    except Exception:
        if config.processes.several:
            processes.stop(traceback.format_exc())
        raise


def run_all(study: Study, baselines: Mapping[str, float] | None = None) -> list[Run]:
    """Train every rule with every seed, and write results.jsonl, TensorBoard scalars and loss.png; a summary goes to stderr.

    A resumed study goes on where its checkpoints are, and does not repeat what is finished.

    Args:
        study: from :func:`experiments.training.make_study`.
        baselines: test losses without a model, by name, for results.jsonl.

    Raises:
        ValueError: if there are checkpoints and the study is not to be resumed, or they are of another study.
        Interrupted: if a signal ended it; there is a checkpoint then.
    """
    config, runs = study.config, list[Run]()
    refuse_overwriting(study)
    with (
        Log(config.out, config, resume=config.resume, write=processes.first()) as log,
        Interruptions() if config.checkpoint_dir else nullcontext(lambda: False) as stop,
    ):
        for name, loss in (baselines or {}).items():
            log.baseline(name, loss)
        for seed in range(config.seeds):
            for rule in study.executors:
                runs.append(log.finished(rule, seed) or one_run(study, rule, seed, log, stop))
                if stop() and len(runs) < config.seeds * len(study.executors):
                    raise Interrupted(runs[-1].name, None)
    if processes.first():
        report.plot_losses(runs, config.out / "loss.png")
    processes.say(report.summary(runs), sys.stderr)
    return runs


def one_run(study: Study, rule: str, seed: int, log: Log, stop: Callable[[], bool] = lambda: False) -> Run:
    """One rule with one seed, from its newest checkpoint if there is one, behind a progress bar that shows the loss."""
    every = 0.2 if sys.stderr.isatty() else 5.0  # seconds; a log file wants fewer lines
    with Keeper(study, rule, seed, log.sync) if study.config.checkpoint_dir else nullcontext() as keeper:
        run = log.rewind(rule, seed, keeper.known_losses, keeper.latest) if keeper else Run(rule, seed)
        run.seconds = keeper.seconds if keeper else 0.0
        with tqdm(
            total=study.total_steps,
            initial=len(run.losses),
            desc=f"{rule} seed {seed}",
            unit="step",
            mininterval=every,
            disable=not processes.first(),
        ) as bar:

            def on_step(step: int, loss: float) -> None:
                bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
                bar.update()
                log.step(run, step, loss, float(study.learning_rates[step]))

            def on_evaluation(evaluation: Evaluation) -> None:
                run.evaluations.append(evaluation)
                log.evaluation(run, evaluation)

            train(study, rule, seed, on_step, run=run, keeper=keeper, on_evaluation=on_evaluation, stop=stop)
    log.result(run)
    return run


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
