"""Train update rules side by side on the same data and seeds.

``python -m experiments.accuracy`` trains a small ResNet on the embedded handwritten digits, on four simulated devices, under plain
data parallelism (``dp``) and both cyclic rules. ``python -m experiments.accuracy PRESET --help`` lists every option; presets:
digits (default), cifar10-resnet18, cifar10-resnet50, imagenet-resnet18, imagenet-resnet50.
"""

import sys
from collections.abc import Sequence

import tyro
from tqdm import tqdm

import cyclic_jax as cj
from experiments import report
from experiments.config import PRESETS, Config, check, make_rule
from experiments.training import Run, Study, prepare, train


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0].startswith("-"):
        argv = ["digits", *argv]
    config = tyro.extras.overridable_config_cli(PRESETS, args=argv, description=__doc__)
    try:
        check(config)
        cj.simulate_devices(config.num_workers if config.devices is None else config.devices)
        print(run_study(config))
    except (ValueError, FloatingPointError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")


def run_study(config: Config) -> str:
    """Run the whole study, write its files, and return the table."""
    study = prepare(config)
    print(heading(study), file=sys.stderr)
    runs: list[Run] = []
    with report.Log(config.out, config) as log:
        for seed in range(config.seeds):
            for rule in study.executors:
                runs.append(one_run(study, rule, seed, log))
                log.result(runs[-1])
    report.plot_losses(runs, config.out / "loss.png")
    return report.table(runs)


def one_run(study: Study, rule: str, seed: int, log: report.Log) -> Run:
    """One rule with one seed, behind a progress bar that shows the loss."""
    every = 0.2 if sys.stderr.isatty() else 5.0  # seconds; a log file wants fewer lines
    with tqdm(total=study.total_steps, desc=f"{rule} seed {seed}", unit="step", mininterval=every) as bar:

        def on_step(step: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            bar.update()
            log.step(rule, seed, step, loss, float(study.learning_rates[step]))

        return train(study, rule, seed, on_step)


def heading(study: Study) -> str:
    """What is about to be trained."""
    config, pairs = study.config, study.config.num_workers * study.config.num_stages
    masks = {name: int(make_rule(config, name).fresh.sum()) for name in study.executors}
    return (
        f"{study.data.name}: {study.data.description}\n"
        f"{config.num_workers} workers x {config.batch_per_worker} rows, {study.total_steps} steps, "
        f"{config.executor} executor unless a rule names another\n"
        f"masks: {', '.join(f'{name} fresh on {fresh}' for name, fresh in masks.items())} of {pairs} pairs (worker, stage); "
        f"cdp-v2 is the method's mask, cdp-v2-published that of the authors' code\n"
        f"{config.model} in {config.num_stages} stages by {config.partition}:\n"
        f"{study.model.describe()}"
    )


if __name__ == "__main__":
    main()
