"""Train update rules side by side on the same data and seeds.

``python -m experiments.accuracy`` trains a small ResNet on the embedded handwritten digits, on four simulated devices, under plain
data parallelism (``dp``) and both cyclic rules at once, and under ``cdp-v2`` again with the staggered ``replicated`` executor.
``python -m experiments.accuracy PRESET --help`` lists every option; presets:
digits (default), cifar10-resnet18, cifar10-resnet50, imagenet-resnet18, imagenet-resnet50.
"""

import sys
from collections.abc import Sequence

import tyro

from experiments import report
from experiments.config import PRESETS, Config
from experiments.processes import say
from experiments.running import command, heading, run_all
from experiments.training import prepare


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0].startswith("-"):
        argv = ["digits", *argv]
    config = tyro.extras.overridable_config_cli(PRESETS, args=argv, description=__doc__)
    command(config, run_study)


def run_study(config: Config) -> str:
    """Run the whole study, write its files, and return the table."""
    study = prepare(config)
    say(heading(study, config.model), sys.stderr)
    return report.table(run_all(study))


if __name__ == "__main__":
    main()
