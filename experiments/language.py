"""Train update rules and executors side by side on a character-level language model.

``python -m experiments.language`` trains a small causal transformer on the language reference that Python's ``help()`` prints
(``pydoc_data.topics``: real text, in the standard library, no network), on four simulated devices: plain data parallelism
(``dp``) and both cyclic rules at once, and ``cdp-v2`` again with the staggered ``replicated`` executor. It prints the loss on the
last tenth of the text, in nats per character, beside what counting characters and pairs of characters gives. Minutes on two cores.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import cyclic_jax as cj
from experiments import report
from experiments.config import Options, check, make_rule, rule_and_executor
from experiments.data.ngram import bigram_loss, unigram_loss
from experiments.data.text import Text, python_topics
from experiments.processes import say
from experiments.running import command, heading, run_all
from experiments.training import Study, make_study


@dataclass(frozen=True)
class Config(Options):
    """Train update rules side by side on a character-level language model."""

    context: int = 32
    """T: characters of a row, the most that a prediction can look back on."""
    width: int = 64
    """Of a token."""
    depth: int = 4
    """Blocks of the transformer."""
    heads: int = 4
    """Of attention."""
    dropout: float = 0.0
    """Rate."""
    rules: tuple[str, ...] = ("dp", "cdp-v1", "cdp-v2", "cdp-v2@replicated")
    """dp, cdp-v1, cdp-v2 or cdp-v2-published, each with its executor if it needs another: cdp-v2@replicated."""
    seeds: int = 1
    """How many seeds; they set the parameters, the order of the data and the dropout."""
    epochs: float = 3.0
    """How often as many characters are read as the training split has; windows lie at random places."""
    batch_per_worker: int = 8
    """B: rows of a micro-batch."""
    optimizer: str = "adamw"
    """sgd, adamw or muon (from optax)."""
    lr: float = 2e-3
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Added to the gradient for sgd, decoupled for the others."""
    warmup_epochs: float = 0.3
    """Linear warm-up."""
    out: Path = Path("runs/language")
    """Folder for results.jsonl, TensorBoard scalars and loss.png."""


def prepare(config: Config) -> Study:
    """Check the whole configuration and build what the rules share; nothing is compiled yet."""
    check(config)
    for entry in config.rules:
        make_rule(config, entry)
    data = python_topics(config.context)
    layers = cj.models.causal_transformer(
        len(data.alphabet),
        context=config.context,
        width=config.width,
        depth=config.depth,
        heads=config.heads,
        dropout=config.dropout,
        dtype=jnp.dtype(config.dtype),
    )
    return make_study(config, data, layers, jax.ShapeDtypeStruct((config.context,), np.int32))


def baselines(data: Text) -> dict[str, float]:
    """Test losses of counting, in nats per character."""
    splits = data.train, data.test, len(data.alphabet)
    return {"unigram, add-one": unigram_loss(*splits), "bigram, add-one": bigram_loss(*splits)}


def run_study(config: Config) -> str:
    """Run the whole study, write its files, and return the table."""
    study = prepare(config)
    say(heading(study, "causal transformer"), sys.stderr)
    counted = baselines(study.data)
    executors = {entry: rule_and_executor(config, entry)[1] for entry in study.executors}
    return report.loss_table(run_all(study, counted), executors, counted)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    command(tyro.cli(Config, args=argv, description=__doc__), run_study)


if __name__ == "__main__":
    main()
