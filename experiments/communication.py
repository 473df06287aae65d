"""Traffic over one training step: gradients, and sharded model states, by collectives against point to point.

``python -m experiments.communication`` prints bytes per worker (total, and the peak in one tick), checks them against the
compiled programs, and draws them. The formulas are those of collectives by rings and of the schedule's own messages; the compiled
programs are the synchronous and the replicated executor's, the ZeRO executor's, and the baseline that gathers and scatters.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import matplotlib
import numpy as np
import optax
import tyro

import cyclic_jax as cj
from cyclic_jax.communication import Collective, all_reduce_traffic, collectives, cyclic_traffic
from cyclic_jax.executors.payload import PayloadFormat
from cyclic_jax.executors.ring import Ring
from experiments import state_traffic
from experiments.state_traffic import StateTraffic

matplotlib.use("Agg")
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


@dataclass(frozen=True)
class Config:
    """Traffic of one model's gradients and states."""

    model: str = "tiny_resnet"
    """A key of cyclic_jax.models.MODELS."""
    image_shape: tuple[int, int, int] = (8, 8, 1)
    """H, W, C."""
    num_classes: int = 10
    """Outputs."""
    num_workers: int = 4
    """N."""
    table: Literal["cyclic", "balanced"] = "cyclic"
    """One op a tick with S = N, or cost-balanced ticks with S = 2N."""
    partition: Literal["flops", "params", "layers"] = "params"
    """What the stages are balanced by; params makes messages even."""
    check: bool = True
    """Compile the programs and compare."""
    out: Path = Path("runs/communication")
    """Folder for traffic.png."""


@dataclass(frozen=True)
class Traffic:
    """Bytes ``[N, period]`` of both ways, and the bytes of a payload padded to the largest stage."""

    model: cj.StagedModel
    schedule: cj.Schedule
    all_reduce: np.ndarray
    cyclic: np.ndarray
    padded: np.ndarray


def predict(config: Config) -> Traffic:
    """Traffic from the schedule; nothing is compiled."""
    N = config.num_workers
    stages = 2 * N if config.table == "balanced" else N
    layers = cj.models.build(config.model, num_classes=config.num_classes, image_shape=config.image_shape)
    example = jax.ShapeDtypeStruct((2, *config.image_shape), np.float32)
    model = cj.partition(layers, stages, by=config.partition, example=example)
    schedule = cj.Schedule.cyclic(N) if stages == N else cj.Schedule.balanced(N, [1] * stages, [2] * stages)
    payload = PayloadFormat(jax.eval_shape(model.init, jax.random.key(0))[0])
    sizes = [payload.stage_bytes(j) for j in range(stages)]
    return Traffic(
        model,
        schedule,
        all_reduce_traffic(N, schedule.period, sizes),
        cyclic_traffic(schedule, sizes),
        cyclic_traffic(schedule, [payload.num_bytes] * stages),
    )


def compiled(config: Config, traffic: Traffic, executor: str) -> tuple[Collective, ...]:
    """The collectives of one executor's compiled step."""
    dp = executor == "synchronous"
    rule = cj.UpdateRule.dp(*traffic.schedule.feasible.shape) if dp else cj.UpdateRule.freshest(traffic.schedule)
    schedule = None if dp else traffic.schedule
    return _of_step(
        config, traffic.model, cj.make_executor(executor, traffic.model, _loss, OPTIMIZER, rule=rule, schedule=schedule)
    )


def _of_step(config: Config, model: cj.StagedModel, machine: Any) -> tuple[Collective, ...]:
    create = partial(cj.TrainState.create, model, OPTIMIZER, num_workers=config.num_workers)
    rows = 2 * config.num_workers
    batch = (np.zeros((rows, *config.image_shape), np.float32), np.zeros(rows, np.int32))
    state = jax.eval_shape(lambda: create(jax.random.key(0)))
    return collectives(machine.lower(machine.carry_struct(state), batch).compile().as_text())


def _loss(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()


def check(config: Config, traffic: Traffic) -> str:
    """Compare the compiled programs with the prediction.

    Raises:
        RuntimeError: if a program holds other collectives, or other bytes, than predicted.
    """
    found = compiled(config, traffic, "replicated")
    routes = Ring(traffic.schedule).permutations()
    pairs = sum(len(pairs) * times for pairs, times in routes)
    sent = pairs * found[0].num_bytes if found else 0
    point_to_point = {(c.kind, c.num_bytes) for c in found} == {("collective-permute", found[0].num_bytes)}
    as_planned = Counter(c.pairs for c in found) == Counter(pairs for pairs, _ in routes)
    if not (point_to_point and as_planned and sent == traffic.padded.sum()):
        raise RuntimeError(f"predicted {traffic.padded.sum():.0f} bytes point to point, compiled {sent}: {found}")
    reduced = compiled(config, traffic, "synchronous")
    gradient = sum(c.num_bytes for c in reduced)
    N = config.num_workers
    # gradients that are equal (of two biases that are added, as at the end of a residual block) are reduced once
    share = gradient * 2 * (N - 1) / N / traffic.all_reduce[0].sum()
    if {c.kind for c in reduced} != {"all-reduce"} or not 0.99 <= share <= 1:
        raise RuntimeError(f"predicted one all-reduce of the gradient, compiled {reduced}")
    return (
        f"compiled: replicated holds collective-permute only, {pairs} messages of {found[0].num_bytes:,} bytes a step "
        f"(padded to the largest stage); dp holds all-reduce only, {gradient:,} bytes"
    )


def table(traffic: Traffic) -> str:
    """Markdown: bytes that a worker sends in a step, the most it sends in one tick, and who takes part."""
    N = traffic.schedule.num_workers
    rows = [
        "| gradients | bytes a worker and step | peak a worker and tick | peak of all workers a tick | participants |"
    ]
    rows.append("| --- | --- | --- | --- | --- |")
    each = {
        f"dp, ring all-reduce at the end of {traffic.schedule.period} ticks": (traffic.all_reduce, N),
        f"cdp, point to point ({traffic.schedule.name} table)": (traffic.cyclic, 2),
        "cdp as compiled, padded to the largest stage": (traffic.padded, 2),
    }
    for name, (sent, who) in each.items():
        rows.append(
            f"| {name} | {sent.sum(axis=1).mean():,.0f} | {sent.max():,.0f} | {sent.sum(axis=0).max():,.0f} | {who} |"
        )
    return "\n".join(rows)


def plot(traffic: Traffic, states: StateTraffic, path: Path) -> None:
    """Bytes that all workers send at each tick of a step: gradients above, model states below."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, figsize=(7, 6), layout="constrained", sharex=True)
    ways = {"dp: all-reduce": traffic.all_reduce, "cdp-v2: point to point": traffic.cyclic}
    _bars(panels[0], "gradients (every worker holds all states)", ways)
    ways = {"zero-dp: gather, scatter": states.gathered, "cdp-v2: point to point": states.cyclic["cdp-v2"]}
    _bars(panels[1], "sharded states: parameters and gradients", ways)
    panels[1].set(xlabel="tick of a training step", xticks=range(traffic.schedule.period))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bars(axes: Any, title: str, ways: dict[str, np.ndarray]) -> None:
    for k, (name, sent) in enumerate(ways.items()):
        ticks = np.arange(sent.shape[1])
        axes.bar(ticks + 0.4 * (k - 0.5), sent.sum(axis=0) / 2**20, width=0.4, label=name)
    axes.margins(y=0.3)  # room for the legend
    axes.set(title=title, ylabel="MiB sent by all workers")
    axes.legend()


def run(config: Config) -> str:
    """Both tables and, with ``config.check``, the lines about the compiled programs."""
    traffic = predict(config)
    states = state_traffic.predict(traffic.model, traffic.schedule)
    config.out.mkdir(parents=True, exist_ok=True)
    plot(traffic, states, config.out / "traffic.png")
    parts = [table(traffic), *([check(config, traffic)] if config.check else []), state_traffic.table(states)]
    if config.check:
        of_step = partial(_of_step, config, traffic.model)
        parts.append(state_traffic.check(states, _loss, OPTIMIZER, of_step))
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    config = tyro.cli(Config, args=argv, description=__doc__)
    cj.simulate_devices(config.num_workers)
    try:
        print(run(config))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
