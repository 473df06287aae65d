"""The time of a training step by latency and bandwidth: what the devices compute, what they wait for each other, and for messages.

With a schedule, the time is :meth:`Schedule.makespan` with overlap: an op waits only for its device and for what it needs, one
message of the padded size after it was sent. A backward takes two forwards. What several groups have to average is not
overlapped: the executors do it inside the last backward of each stage, and the next op waits for it. The baselines without a
schedule overlap all that can be: gradients are reduced while earlier layers go backward, parameters gathered one layer ahead.
"""

from dataclasses import dataclass

from cyclic_jax.planning.work import Machine, Work
from cyclic_jax.schedule import Schedule
from cyclic_jax.schedule.messages import Moving


@dataclass(frozen=True)
class Timing:
    """Seconds of one training step.

    Attributes:
        micro_batches: of B rows, in a step, on all devices together.
        compute: mean work of the devices that take part.
        bubble: waiting for other devices; uneven stages are part of it.
        exposed: further waiting, for messages.
        tick_bytes: the most that one device sends at a time.
    """

    micro_batches: int
    compute: float
    bubble: float
    exposed: float
    tick_bytes: float

    @property
    def step(self) -> float:
        """All together."""
        return self.compute + self.bubble + self.exposed


def scheduled(
    work: Work,
    machine: Machine,
    schedule: Schedule,
    moving: Moving,
    message_bytes: float,
    groups: int = 1,
    devices: int | None = None,
) -> Timing:
    """A schedule on a ring of devices, ``groups`` times.

    Args:
        work: S stages.
        machine: for its speed and its links.
        schedule: workers are the micro-batches of a group's step.
        moving: what the messages are, as in :meth:`Schedule.makespan`.
        message_bytes: of each.
        groups: rings side by side.
        devices: of a ring, among which the work is shared; by default one for each stage.
    """
    forward = work.forward_seconds(machine)
    backward = [2 * one for one in forward]
    compute = 3 * sum(forward) * schedule.num_workers / (devices or work.num_stages)
    waiting = schedule.makespan(forward, backward, True, 0.0, moving)
    sending = schedule.makespan(forward, backward, True, machine.send(message_bytes), moving)
    return Timing(
        micro_batches=schedule.num_workers * groups,
        compute=compute,
        bubble=max(waiting - compute, 0.0),
        exposed=sending - waiting + over_groups(work, machine, groups),
        tick_bytes=message_bytes,
    )


def over_groups(work: Work, machine: Machine, groups: int) -> float:
    """Seconds in which the groups average their sums, stage after stage."""
    return sum(machine.all_reduce(groups, size) for size in work.params_bytes) if groups > 1 else 0.0


def data_parallel(work: Work, machine: Machine) -> Timing:
    """One all-reduce at the end, or one for each layer as soon as its gradient is there, whichever is better."""
    N, forward, sizes = machine.devices, _layer_seconds(work, machine), _layer_bytes(work)
    compute = 3 * sum(forward)
    at_end = compute + (machine.all_reduce(N, sum(sizes)) if N > 1 else 0.0)
    clock, link = sum(forward), 0.0
    for seconds, size in zip(reversed(forward), reversed(sizes), strict=True):
        clock += 2 * seconds
        link = max(link, clock) + (machine.all_reduce(N, size) if N > 1 and size else 0.0)
    end = min(at_end, max(clock, link))
    return Timing(N, compute, 0.0, end - compute, 2 * (N - 1) / N * sum(sizes))


def fsdp(work: Work, machine: Machine) -> Timing:
    """ZeRO-3: each layer's parameters are gathered twice, its gradient scattered once; gathers go one layer ahead."""
    N, forward, sizes = machine.devices, _layer_seconds(work, machine), _layer_bytes(work)
    passes = [*zip(forward, sizes, [0.0] * len(sizes), strict=True)]
    passes += [*zip([2 * one for one in forward[::-1]], sizes[::-1], sizes[::-1], strict=True)]
    link = there = _gather(machine, passes[0][1])  # the link is free again; a layer's parameters are there
    clock = 0.0
    for k, (seconds, _, scattered) in enumerate(passes):
        began = max(clock, there)
        if k + 1 < len(passes):
            link = there = max(link, began) + _gather(machine, passes[k + 1][1])
        clock = began + seconds
        if scattered:
            link = max(link, clock) + _gather(machine, scattered)
    compute, largest = 3 * sum(forward), max(sizes)
    return Timing(N, compute, 0.0, max(clock, link) - compute, (N - 1) / N * largest)


def _gather(machine: Machine, num_bytes: float) -> float:
    return machine.all_gather(machine.devices, num_bytes) if machine.devices > 1 and num_bytes else 0.0


def _layer_seconds(work: Work, machine: Machine) -> list[float]:
    return [max(cost.flops, 1.0) / machine.flops for cost in work.costs]


def _layer_bytes(work: Work) -> list[float]:
    """Of each layer's parameters, all of one dtype on average."""
    counts = [cost.params for cost in work.costs]
    scale = sum(work.params_bytes) / max(1, sum(counts))
    return [count * scale for count in counts]
