"""What a study trains, as frozen dataclasses: the options that all studies share, those of the accuracy study, and its presets.

The presets use the hyper-parameters that the authors publish with their code (8 workers, 4 stages by flops). They do not use
their mask by default: with 4 stages theirs leaves workers 4 to 7 without any delay, which no cyclic schedule can run; the rule
``cdp-v2-published`` asks for it, ``cdp-v2`` is the method's own mask, which a schedule can run.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

import cyclic_jax as cj
from experiments.processes import Processes


@dataclass(frozen=True)
class Options:
    """What every study has: rules, workers, stages, optimizer, seeds."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; parameters are float32."""
    rules: tuple[str, ...] = ("dp", "cdp-v1", "cdp-v2", "cdp-v2@replicated")
    """dp, cdp-v1, cdp-v2, or cdp-v2-published: the mask of the authors' code, for the synchronous executor only. A rule may
    name its executor: cdp-v2@replicated."""
    num_workers: int = 4
    """N: micro-batches of a step."""
    num_stages: int = 4
    """S: stages of the model."""
    partition: Literal["flops", "params", "layers", "activations", "pipeline_memory"] = "flops"
    """What the stages are balanced by; pipeline_memory evens out what the devices of the pipeline executor hold."""
    executor: str = "synchronous"
    """How rules are realised that do not name their executor: a name that cyclic_jax.make_executor knows."""
    stream_dtype: Literal["float32", "bfloat16"] = "float32"
    """What parameters are rounded to while they travel between the devices of the zero executor."""
    devices: int | None = None
    """Simulated CPU devices of each process; by default together one for each worker. Without effect on GPUs and TPUs."""
    processes: Annotated[Processes, tyro.conf.OmitArgPrefixes] = field(default_factory=Processes)
    """Which processes train together."""
    seeds: int = 3
    """How many seeds; they set the parameters, the order of the data and the dropout."""
    steps: int | None = None
    """Training steps, instead of epochs."""
    epochs: float = 10.0
    """Passes over the training split."""
    batch_per_worker: int = 16
    """B: rows of a micro-batch."""
    optimizer: str = "sgd"
    """sgd, adamw or muon (from optax)."""
    lr: float = 0.05
    """Peak learning rate."""
    momentum: float = 0.9
    """Of sgd."""
    weight_decay: float = 5e-4
    """Added to the gradient for sgd, decoupled for the others."""
    schedule: Literal["constant", "step", "cosine"] = "cosine"
    """Of the learning rate; step multiplies it by drop_factor every drop_every epochs."""
    warmup_epochs: float = 0.0
    """Linear warm-up."""
    drop_every: float = 30.0
    """Epochs between drops."""
    drop_factor: float = 0.2
    """What a drop multiplies the learning rate by."""
    out: Path = Path("runs")
    """Folder for results.jsonl, TensorBoard scalars and loss.png."""
    checkpoint_dir: Path | None = None
    """Folder for checkpoints, with a subfolder for each rule and seed; by default none are written."""
    save_every: int = 100
    """Training steps between two checkpoints."""
    checkpoint_form: Literal["in-flight", "canonical"] = "in-flight"
    """in-flight: what goes on is bit for bit what would have been, with the same executor and devices. canonical: the schedule is
    drained at each checkpoint, and any executor goes on, on any number of devices that it can use."""
    resume: bool = False
    """Go on from the newest checkpoints, and start what has none; finished runs are not repeated."""
    eval_every: int | None = None
    """Training steps between two evaluations while training goes on; by default there is only the one at the end."""
    profile: Path | None = None
    """Folder for the profiler's trace of three steps of each run."""

    @property
    def global_batch(self) -> int:
        """Rows of one training step."""
        return self.num_workers * self.batch_per_worker


@dataclass(frozen=True)
class Config(Options):
    """Train update rules side by side on the same data and seeds."""

    dataset: str = "digits"
    """digits, fashion_mnist, cifar10, imagenet2012 or synthetic."""
    data_dir: Path | None = None
    """Where fashion_mnist's IDX files or the prepared tensorflow-datasets folder are."""
    model: str = "tiny_resnet"
    """tiny_resnet, residual_mlp, resnet18, resnet50 or vit_b16."""
    out: Path = Path("runs/accuracy")
    """Folder for results.jsonl, TensorBoard scalars and loss.png."""


_AUTHORS = Config(num_workers=8, num_stages=4, schedule="step", seeds=1, rules=("dp", "cdp-v1", "cdp-v2"))
_CIFAR = replace(_AUTHORS, dataset="cifar10", batch_per_worker=64, lr=0.05, drop_factor=0.2, epochs=101)
_IMAGENET = replace(
    _AUTHORS, dataset="imagenet2012", batch_per_worker=32, lr=0.1, weight_decay=1e-4, drop_factor=0.1, epochs=91
)

PRESETS: dict[str, tuple[str, Config]] = {
    "digits": ("Handwritten digits, embedded: minutes on a laptop.", Config()),
    "cifar10-resnet18": ("The authors' setting.", replace(_CIFAR, model="resnet18", weight_decay=5e-4)),
    "cifar10-resnet50": ("The authors' setting.", replace(_CIFAR, model="resnet50", weight_decay=1e-3)),
    "imagenet-resnet18": ("The authors' setting.", replace(_IMAGENET, model="resnet18")),
    "imagenet-resnet50": ("The authors' setting.", replace(_IMAGENET, model="resnet50")),
}


# what may differ when a study is resumed
FREE = frozenset({"rules", "seeds", "executor", "devices", "processes", "data_dir", "out", "eval_every", "profile"})
FREE |= {"checkpoint_dir", "save_every", "checkpoint_form", "resume"}
RULES = ("dp", "cdp-v1", "cdp-v2", "cdp-v2-published")


def published_mask(num_workers: int, num_stages: int) -> np.ndarray:
    """The mask of the authors' simulation: fresh iff i + j >= S − 1, whatever N is. Bool ``[N, S]``.

    For N > S its later workers are never delayed, which no cyclic schedule can run.
    """
    workers, stages = np.ogrid[:num_workers, :num_stages]
    return workers + stages >= num_stages - 1


def rule_and_executor(config: Options, entry: str) -> tuple[str, str]:
    """``cdp-v2@replicated`` names both; without ``@`` the executor is the configured one."""
    name, _, executor = entry.partition("@")
    return name, executor or config.executor


def make_rule(config: Options, entry: str) -> cj.UpdateRule:
    """The rule of an entry of ``config.rules``, for the configured workers and stages."""
    name, executor = rule_and_executor(config, entry)
    if name not in RULES:
        raise nearest("rule", name, RULES)
    if name != "cdp-v2-published":
        return cj.UpdateRule.named(name, config.num_workers, config.num_stages)
    if executor != "synchronous":
        raise ValueError(f"rule {name!r} is one that no cyclic schedule can run: only --executor synchronous can")
    return cj.UpdateRule.custom(published_mask(config.num_workers, config.num_stages), name=name)


def as_json(config: Options) -> dict[str, Any]:
    """All options as JSON values."""
    return json.loads(json.dumps(asdict(config), default=str))


def fixed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a run and its resumption must share, of :func:`as_json`. What an executor and its devices may be is checked by the
    checkpoint itself."""
    return {name: value for name, value in options.items() if name not in FREE}


def check(config: Options) -> None:
    """Refuse values that no study can have.

    Raises:
        ValueError: naming the option and its value.
    """
    config.processes.check()
    positive = ["num_workers", "num_stages", "seeds", "batch_per_worker", "epochs", "lr", "drop_every", "drop_factor"]
    positive += [
        "save_every",
        *(name for name in ("steps", "devices", "eval_every") if getattr(config, name) is not None),
    ]
    for name in positive:
        if not getattr(config, name) > 0:
            raise ValueError(f"{name}={getattr(config, name)}: it must be positive")
    for name in ("weight_decay", "warmup_epochs", "momentum"):
        if not getattr(config, name) >= 0:
            raise ValueError(f"{name}={getattr(config, name)}: it must not be negative")
    if config.resume and config.checkpoint_dir is None:
        raise ValueError("resume=True: name the folder to go on from with --checkpoint-dir")
    if not config.rules:
        raise ValueError("rules is empty: name at least one, such as cdp-v2")
    if config.stream_dtype != "float32" and not any(rule_and_executor(config, r)[1] == "zero" for r in config.rules):
        raise ValueError(f"stream_dtype={config.stream_dtype!r}: only the zero executor has streams, as in cdp-v2@zero")
    twice = [rule for rule in config.rules if config.rules.count(rule) > 1]
    if twice:
        raise ValueError(f"rule {twice[0]!r} is named {len(twice)} times: once is enough, seeds are set by --seeds")


def nearest(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for an unknown name."""
    known = list(known)
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)[0]
    return ValueError(f"unknown {kind} {name!r}: did you mean {near!r}? Known: {', '.join(known)}")
