"""Traffic: bytes per worker and tick from the schedule, and the collectives that a compiled program holds."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cyclic_jax.schedule import BACKWARD, Schedule

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all", "collective-broadcast")
_ITEMSIZE = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
_ITEMSIZE |= {"f64": 8, "s64": 8, "u64": 8, "c64": 8, "c128": 16}


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program.

    Attributes:
        kind: one of ``KINDS``.
        num_bytes: of the result on one device.
        pairs: senders and receivers of a ``collective-permute``.
        groups: the text of ``replica_groups`` of the others.
    """

    kind: str
    num_bytes: int
    pairs: tuple[tuple[int, int], ...] = ()
    groups: str = ""


def collectives(compiled_text: str | None) -> tuple[Collective, ...]:
    """The collectives in a compiled program's text, each once however often a loop runs it.

    Args:
        compiled_text: ``executor.lower(...).compile().as_text()``.

    Examples:
        >>> line = "%p = f32[4]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,2}}"
        >>> collectives(line)
        (Collective(kind='collective-permute', num_bytes=16, pairs=((0, 1), (1, 2)), groups=''),)
    """
    found = []
    for line in (compiled_text or "").splitlines():
        match = re.search(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(", line)
        if match:
            found.append(Collective(match[2], _num_bytes(match[1], bool(match[3])), _pairs(line), _groups(line)))
    return tuple(found)


def _num_bytes(shapes: str, is_start: bool) -> int:
    """Of all arrays of the result; a ``-start`` shows operand and result, so half of them."""
    arrays = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", shapes)
    total = sum(_ITEMSIZE[dtype] * int(np.prod([int(n) for n in dims.split(",") if n])) for dtype, dims in arrays)
    return total // 2 if is_start else total


def _pairs(line: str) -> tuple[tuple[int, int], ...]:
    match = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", line)
    return tuple((int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", match[1])) if match else ()


def _groups(line: str) -> str:
    match = re.search(r"replica_groups=(mesh\[[^\]]*\] \{[^}]*\}|\{\{.*?\}\}|\[[^ ]*)", line)
    return match[1].rstrip(",") if match else ""


def cyclic_traffic(schedule: Schedule, stage_bytes: Sequence[int]) -> np.ndarray:
    """Bytes ``[N, period]`` that each worker sends at the end of each tick of the steady state: one stage at a time.

    Args:
        schedule: of the replicated executor.
        stage_bytes: of each stage's gradient.

    Examples:
        >>> cyclic_traffic(Schedule.cyclic(2), [10, 10]).tolist()
        [[0.0, 10.0, 10.0, 10.0], [10.0, 0.0, 10.0, 0.0]]
    """
    _check_sizes(schedule, stage_bytes)
    traffic = np.zeros((schedule.num_workers, schedule.period))
    for message in schedule.messages("gradients"):
        traffic[message.sender, message.tick] += stage_bytes[message.stage]
    return traffic


def all_reduce_traffic(num_workers: int, period: int, stage_bytes: Sequence[int]) -> np.ndarray:
    """The same for plain data parallelism: a ring all-reduce of the whole gradient when the last backward has ended.

    Each worker sends 2(N − 1)/N of the gradient's bytes (Patarasuk & Yuan, 2009), all at the end of the step.
    """
    traffic = np.zeros((num_workers, period))
    traffic[:, -1] = 2 * (num_workers - 1) / num_workers * sum(stage_bytes)
    return traffic


def zero_cdp_traffic(
    schedule: Schedule,
    stage_bytes: Sequence[int],
    *,
    gradient_bytes: Sequence[int] | None = None,
    delayed: bool = False,
) -> np.ndarray:
    """Bytes ``[N, period]`` that each worker sends at the end of each tick, with sharded states that travel point to point.

    Two streams of parameters and one of gradient sums (``schedule.messages("states")``).

    Args:
        schedule: of the ZeRO executor.
        stage_bytes: of each stage's parameters, as they travel.
        gradient_bytes: of each stage's gradient; by default as many.
        delayed: under ``cdp-v1``, where owners send in the place of worker N−1.

    Examples:
        >>> zero_cdp_traffic(Schedule.cyclic(2), [10, 10]).tolist()
        [[10.0, 10.0, 20.0, 20.0], [20.0, 10.0, 10.0, 10.0]]
    """
    gradient_bytes = stage_bytes if gradient_bytes is None else gradient_bytes
    for sizes in (stage_bytes, gradient_bytes):
        _check_sizes(schedule, sizes)
    traffic = np.zeros((schedule.num_workers, schedule.period))
    for message in schedule.messages("delayed_states" if delayed else "states"):
        size = stage_bytes if message.kind.endswith("_parameters") else gradient_bytes
        traffic[message.sender, message.tick] += size[message.stage]
    return traffic


def zero_dp_traffic(schedule: Schedule, stage_bytes: Sequence[int]) -> np.ndarray:
    """The same for fully sharded data parallelism (ZeRO-3, FSDP): all workers run the program of worker 0 at the same time.

    When a tick ends, a backward's gradient is reduced and scattered, and the stage that the next op needs is gathered, before its
    forward and again before its backward. By rings, each of the three sends (N − 1)/N of the stage's bytes per worker.

    Examples:
        >>> zero_dp_traffic(Schedule.cyclic(2), [10, 10]).tolist()
        [[5.0, 5.0, 10.0, 10.0], [5.0, 5.0, 10.0, 10.0]]
    """
    _check_sizes(schedule, stage_bytes)
    N, at_tick = schedule.num_workers, np.zeros(schedule.period)
    for slot in schedule.program:
        share = (N - 1) / N * stage_bytes[slot.op.stage]
        at_tick[slot.start - 1] += share  # the first one at the end of the period before
        if slot.op.kind == BACKWARD:
            at_tick[slot.start + slot.length - 1] += share
    return np.tile(at_tick, (N, 1))


def _check_sizes(schedule: Schedule, stage_bytes: Sequence[int]) -> None:
    if len(stage_bytes) != schedule.num_stages:
        raise ValueError(f"{len(stage_bytes)} stage sizes for {schedule.num_stages} stages")
