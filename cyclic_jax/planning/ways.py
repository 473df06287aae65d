"""All executors and baselines: where each can run, what it needs and how long it takes, and the best of them.

A model of L layers gives at most L stages. On more devices than that, a ring of n ≤ L devices runs several times side by side, as
the executors do on a mesh ``(data, cyclic)``; n should divide the devices, else some are left without work. Of all such n, a way
takes the fastest that fits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cyclic_jax.executors.model_parallel import MAX_WORKERS
from cyclic_jax.executors.payload import PayloadFormat
from cyclic_jax.planning import footprint, timing
from cyclic_jax.planning.footprint import Footprint, message_bytes
from cyclic_jax.planning.timing import Timing
from cyclic_jax.planning.work import Machine, Work
from cyclic_jax.schedule import Schedule

MAX_RING = 32  # makespans of longer rings take long to compute
WorkFor = Callable[[int], Work]  # number of stages -> the model cut so


@dataclass(frozen=True)
class Way:
    """An executor or a baseline.

    Attributes:
        name: for tables.
        devices: of one ring of n; 0 where there is no ring.
        footprint: of a device, with n stages.
        timing: of a step, on all devices of the machine, in so many groups.
        max_ring: the largest n.
    """

    name: str
    devices: Callable[[int], int]
    footprint: Callable[[Work, Machine], Footprint]
    timing: Callable[[Work, Machine, int], Timing]
    max_ring: int = MAX_RING


@dataclass(frozen=True)
class Choice:
    """A way on a machine: with which ring, on how many of its devices, and what that means; or the ``reason`` why not."""

    name: str
    ring: int
    groups: int
    devices: int
    footprint: Footprint | None
    timing: Timing | None
    reason: str

    @property
    def fits(self) -> bool:
        """May it run?"""
        return not self.reason


def choices(work_for: WorkFor, num_layers: int, machine: Machine) -> list[Choice]:
    """The best ring of each way; :func:`best` picks among them.

    Args:
        work_for: cuts the model; called with numbers of stages up to ``num_layers``.
        num_layers: L.
        machine: devices and links.
    """
    return [_choose(way, work_for, num_layers, machine) for way in WAYS]


def best(found: Sequence[Choice], machine: Machine) -> Choice | None:
    """The fastest that fits, if any does."""
    return min((c for c in found if c.fits), key=lambda c: seconds(c, machine), default=None)


def seconds(choice: Choice, machine: Machine) -> float:
    """For as many micro-batches as there are devices, so that ways with other numbers of them in a step compare."""
    assert choice.timing is not None
    return choice.timing.step / choice.timing.micro_batches * machine.devices


def rings(way: Way, num_layers: int, devices: int) -> list[int]:
    """Every n whose rings take all devices; where there is none, some that leave a few devices without work."""
    if way.devices(1) == 0:
        return [1]
    longest = min(num_layers, way.max_ring)
    if way.name == "interleaved":
        return [n for n in (2, 4, 8) if n <= longest]
    whole = [n for n in range(2, longest + 1) if devices % way.devices(n) == 0]
    return whole or [n for n in (2, 3, 4, 8, 16, 32) if n <= longest and way.devices(n) <= devices]


def _choose(way: Way, work_for: WorkFor, num_layers: int, machine: Machine) -> Choice:
    found = []
    for n in rings(way, num_layers, machine.devices):
        work = work_for(n)
        groups = 1 if way.devices(n) == 0 or way.name == "interleaved" else machine.devices // way.devices(n)
        needs = way.footprint(work, machine)
        short = f"needs {needs.total / 2**30:.3g} GiB of {machine.memory / 2**30:.3g}"
        reason = short if needs.total > machine.memory else ""
        used = 1 if way.name == "interleaved" else groups * way.devices(n) or machine.devices
        found.append(Choice(way.name, n, groups, used, needs, way.timing(work, machine, groups), reason))
    if not found:
        reason = f"a ring of two stages takes {way.devices(2)} devices and two layers, not {machine.devices} and {num_layers}"
        return Choice(way.name, 0, 0, 0, None, None, reason)
    fitting = [c for c in found if c.fits]
    if fitting:
        return min(fitting, key=lambda c: seconds(c, machine))
    return min(found, key=lambda c: c.footprint.total if c.footprint else 0)


# ---- the ways -----------------------------------------------------------------------------------------------


def _one_stage(replicas: bool) -> Callable[[Work, Machine], Footprint]:
    def of(work: Work, machine: Machine) -> Footprint:
        n = work.num_stages
        return footprint.one_stage(work, Schedule.pipeline(n), range(n, 0, -1) if replicas else [1] * n)

    return of


def _replicated(work: Work, machine: Machine, groups: int) -> Timing:
    payload = PayloadFormat(work.structs[0]).num_bytes
    return timing.scheduled(work, machine, Schedule.cyclic(work.num_stages), "gradients", payload, groups)


def _zero(work: Work, machine: Machine, groups: int) -> Timing:
    """A backward's tick sends parameters and a gradient."""
    sent = 2 * max(work.params_bytes)
    return timing.scheduled(work, machine, Schedule.cyclic(work.num_stages), "states", sent, groups)


def _pipeline(work: Work, machine: Machine, groups: int) -> Timing:
    n = work.num_stages
    return timing.scheduled(work, machine, Schedule.pipeline(n), "activations", message_bytes(work), groups)


def _model_parallel(work: Work, machine: Machine, groups: int) -> Timing:
    """As the pipeline in lockstep; sums go around the replicas at the end of each of n blocks, which is not overlapped."""
    n = work.num_stages
    found = timing.scheduled(
        work, machine, Schedule.pipeline(n), "activations", message_bytes(work), groups, devices=n * (n + 1) // 2
    )
    sums = 2 * n * machine.send(max(work.params_bytes))
    return replace(found, exposed=found.exposed + sums, tick_bytes=max(found.tick_bytes, 2 * max(work.params_bytes)))


def _flushed(order: str, times: int) -> tuple[Callable[[Work, Machine], Footprint], Callable[..., Timing]]:
    make = Schedule.gpipe if order == "gpipe" else Schedule.one_f_one_b

    def needs(work: Work, machine: Machine) -> Footprint:
        return footprint.flushed(work, times * work.num_stages, order)

    def takes(work: Work, machine: Machine, groups: int) -> Timing:
        n = work.num_stages
        return timing.scheduled(work, machine, make(times * n, n), "activations", message_bytes(work), groups)

    return needs, takes


def _interleaved(work: Work, machine: Machine, groups: int) -> Timing:
    """All micro-batches one after the other, on one device."""
    n = work.num_stages
    return Timing(n, 3 * sum(work.forward_seconds(machine)) * n, 0.0, 0.0, 0.0)


def _none(n: int) -> int:
    return 0


def _each(n: int) -> int:
    return n


WAYS: tuple[Way, ...] = (
    Way("data parallel", _none, lambda w, m: footprint.data_parallel(w), lambda w, m, g: timing.data_parallel(w, m)),
    Way("synchronous", _none, lambda w, m: footprint.synchronous(w), lambda w, m, g: timing.data_parallel(w, m)),
    Way("FSDP (ZeRO-3)", _none, lambda w, m: footprint.fsdp(w, m.devices), lambda w, m, g: timing.fsdp(w, m)),
    Way("GPipe, M = n", _each, *_flushed("gpipe", 1)),
    Way("GPipe, M = 4n", _each, *_flushed("gpipe", 4)),
    Way("1F1B, M = n", _each, *_flushed("1f1b", 1)),
    Way("1F1B, M = 4n", _each, *_flushed("1f1b", 4)),
    Way("replicated", _each, lambda w, m: footprint.replicated(w, Schedule.cyclic(w.num_stages)), _replicated),
    Way("zero", _each, lambda w, m: footprint.zero(w, Schedule.cyclic(w.num_stages)), _zero),
    Way("pipeline", _each, _one_stage(replicas=False), _pipeline),
    Way("model_parallel", lambda n: n * (n + 1) // 2, _one_stage(replicas=True), _model_parallel, MAX_WORKERS),
    Way("interleaved", _each, lambda w, m: footprint.interleaved(w, Schedule.cyclic(w.num_stages)), _interleaved),
)
