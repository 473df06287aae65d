"""Traffic of sharded model states over one training step: gathered and scattered (ZeRO-3, FSDP) against point to point.

The second half of ``python -m experiments.communication``.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

import cyclic_jax as cj
from cyclic_jax.communication import Collective, zero_cdp_traffic, zero_dp_traffic
from cyclic_jax.executors.payload import PayloadFormat
from cyclic_jax.executors.ring import Ring
from cyclic_jax.executors.streams import Streams

Compiled = Callable[[Any], tuple[Collective, ...]]  # the collectives of a machine's compiled step
RULES = ("cdp-v2", "cdp-v1")


@dataclass(frozen=True)
class StateTraffic:
    """Bytes ``[N, period]`` of each way; padded: as messages of one size, the largest stage's."""

    model: cj.StagedModel
    schedule: cj.Schedule
    gathered: np.ndarray
    cyclic: dict[str, np.ndarray]
    padded: dict[str, np.ndarray]


def predict(model: cj.StagedModel, schedule: cj.Schedule) -> StateTraffic:
    """Traffic from the schedule; nothing is compiled."""
    payload = PayloadFormat(jax.eval_shape(model.init, jax.random.key(0))[0])
    sizes = [payload.stage_bytes(j) for j in range(model.num_stages)]
    largest = [payload.num_bytes] * model.num_stages
    ways = {rule: rule == "cdp-v1" for rule in RULES}
    return StateTraffic(
        model,
        schedule,
        zero_dp_traffic(schedule, sizes),
        {rule: zero_cdp_traffic(schedule, sizes, delayed=delayed) for rule, delayed in ways.items()},
        {rule: zero_cdp_traffic(schedule, largest, delayed=delayed) for rule, delayed in ways.items()},
    )


def table(traffic: StateTraffic) -> str:
    """Markdown: bytes that a worker sends in a step, the most in one tick, and who takes part in a message."""
    N = traffic.schedule.num_workers
    each = {"zero-dp, all-gather and reduce-scatter": (traffic.gathered, N)}
    for rule in RULES:
        each[f"zero, {rule}, point to point"] = (traffic.cyclic[rule], 2)
        each[f"zero, {rule} as compiled, padded to the largest stage"] = (traffic.padded[rule], 2)
    head = ["model states", "bytes a worker and step", "peak a worker and tick", "peak of all workers a tick"]
    rows = ["| " + " | ".join([*head, "participants"]) + " |", "| --- | --- | --- | --- | --- |"]
    for name, (sent, who) in each.items():
        rows.append(
            f"| {name} | {sent.sum(axis=1).mean():,.0f} | {sent.max():,.0f} | {sent.sum(axis=0).max():,.0f} | {who} |"
        )
    return "\n".join(rows)


def check(traffic: StateTraffic, loss: Any, optimizer: optax.GradientTransformation, compiled: Compiled) -> str:
    """Compare the compiled programs with the prediction.

    Raises:
        RuntimeError: if a program holds other collectives, or other bytes, than predicted.
    """
    sizes = [_point_to_point(traffic, rule, loss, optimizer, compiled) for rule in RULES]
    gathered = _gathered(traffic, loss, optimizer, compiled)
    return (
        f"compiled: zero holds collective-permute only, each message of {max(sizes):,} bytes; zero-dp holds all-gather and "
        f"reduce-scatter only, {gathered:,.0f} bytes sent by a worker a step (stages padded to a multiple of N)"
    )


def _point_to_point(traffic: StateTraffic, rule: str, loss: Any, optimizer: Any, compiled: Compiled) -> int:
    """Bytes of a message, all being equal."""
    shape = traffic.schedule.feasible.shape
    asked = cj.UpdateRule.cdp_v1(*shape) if rule == "cdp-v1" else cj.UpdateRule.freshest(traffic.schedule)
    machine = cj.make_executor("zero", traffic.model, loss, optimizer, rule=asked, schedule=traffic.schedule)
    streams = Streams.of(Ring(traffic.schedule), asked)
    found, steady = compiled(machine), streams.permutations()
    size = max((c.num_bytes for c in found), default=0)
    sent = size * sum(map(len, steady))
    as_planned = {c.pairs for c in found} == {*steady, *streams.permutations(first=True)}
    one_kind = {(c.kind, c.num_bytes) for c in found} == {("collective-permute", size)}
    if not (as_planned and one_kind and sent == traffic.padded[rule].sum()):
        raise RuntimeError(f"{rule}: predicted {traffic.padded[rule].sum():.0f} bytes, compiled {sent}: {found}")
    return size


def _gathered(traffic: StateTraffic, loss: Any, optimizer: Any, compiled: Compiled) -> float:
    """Bytes that a worker sends in a step of the baseline."""
    from benchmarks.sharded import Sharded

    N = traffic.schedule.num_workers
    moved: Counter[str] = Counter()
    for found in compiled(Sharded(traffic.model, loss, optimizer, N)):
        moved[found.kind] += found.num_bytes
    # by rings; the result of a scatter is an N-th part of what is scattered
    sent = (N - 1) / N * moved["all-gather"] + (N - 1) * moved["reduce-scatter"]
    predicted = traffic.gathered[0].sum()
    if set(moved) != {"all-gather", "reduce-scatter"} or not predicted <= sent <= 1.01 * predicted:
        raise RuntimeError(f"zero-dp: predicted {predicted:.0f} bytes gathered and scattered, compiled {sent}: {moved}")
    return sent
