"""Who sends what to whom, and how much time it has.

Every message is a pair of ops: it leaves when the one has ended and must be there when the other starts. ``slack`` is the number
of whole ticks between the two: 0 means that it is needed in the very next tick.

- ``"gradients"`` (every worker holds a full copy): worker i adds its gradient of a stage to the partial sum and sends it to i+1;
  worker N−1 completes the sum and hands it to e, the first worker that can use it in its next forward; from there it rides the
  forwards e → e+1 → … → e−1 around the ring.
- ``"states"`` (sharded parameters, stage j owned by worker e, as above; N−1−j for S = N): two streams of parameters ride around
  the ring, along the forwards and along the backwards; the gradient sum rides with the backwards and ends at the owner.
- ``"delayed_states"``: likewise under ``cdp-v1``, where the owner itself sends to worker 0 in the place of worker N−1.
- ``"activations"`` (one stage per device): activations go to the next stage's device, cotangents to the one before.

All three are derived; see the documentation of the method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cyclic_jax.schedule.ops import BACKWARD, FORWARD, Op

if TYPE_CHECKING:
    from cyclic_jax.schedule.table import Schedule

Moving = Literal["gradients", "states", "delayed_states", "activations"]


@dataclass(frozen=True, order=True)
class Message:
    """One message of the steady state.

    Attributes:
        tick: the last tick of the sending op, modulo the period: it is sent when this tick ends.
        sender: worker, or device for ``"activations"``.
        receiver: likewise.
        kind: ``"partial"``, ``"hand_off"`` and ``"sum"`` of gradients (the hand-off is the finished sum's first hop),
            ``"forward_parameters"``, ``"backward_parameters"``, ``"activation"``
            or ``"cotangent"``.
        stage: whose gradient, parameters or input this is.
        slack: whole ticks between the end of the sending op and the start of the one that needs it.
        worker: whose micro-batch it belongs to (the sender's for partial sums); −1 for finished sums and parameters.
    """

    tick: int
    sender: int
    receiver: int
    kind: str
    stage: int
    slack: int
    worker: int = -1


Place = tuple[Op, int, int]  # op, worker, step


@dataclass(frozen=True)
class Dependency:
    """What a message connects: ``needed`` cannot start before ``leaves`` has ended and the message has arrived."""

    kind: str
    stage: int
    leaves: Place
    needed: Place
    ends: tuple[int, int]  # sender, receiver
    worker: int = -1


def messages(schedule: Schedule, moving: Moving) -> tuple[Message, ...]:
    """All messages of one period, in order of their ticks.

    Raises:
        ValueError: for an unknown ``moving``, workers that have no ring, or a table in which a message would be late.
    """
    found = (_message(schedule, dependency) for dependency in dependencies(schedule, moving))
    return tuple(sorted(message for message in found if message.sender != message.receiver))


def dependencies(schedule: Schedule, moving: Moving) -> list[Dependency]:
    """What lies behind the messages, those that a worker sends itself included."""
    makers = {
        "gradients": _gradients,
        "states": _states,
        "delayed_states": _delayed_states,
        "activations": _activations,
    }
    if moving not in makers:
        raise ValueError(f"moving={moving!r} is unknown: expected one of {', '.join(makers)}")
    return makers[moving](schedule)


def _message(schedule: Schedule, d: Dependency) -> Message:
    end = schedule.end(*d.leaves)
    slack = schedule.start(*d.needed) - end
    if slack < 0:
        raise ValueError(
            f"{d.kind} of stage {d.stage}, {d.ends[0]} to {d.ends[1]}, would be {-slack} ticks late:\n{schedule}"
        )
    return Message((end - 1) % schedule.period, *d.ends, d.kind, d.stage, slack, d.worker)


def first_user(schedule: Schedule, stage: int) -> int:
    """e(j): the worker whose next forward of the stage is the first that can use the finished sum."""
    return int(schedule.feasible[:, stage].argmax())


def _between_workers(kind: str, stage: int, leaves: Place, needed: Place, worker: int = -1) -> Dependency:
    return Dependency(kind, stage, leaves, needed, (leaves[1], needed[1]), worker)


def _gradients(schedule: Schedule) -> list[Dependency]:
    N, found = schedule.num_workers, []
    _check_ring(schedule)
    for j in range(schedule.num_stages):
        forward, backward, e = Op(FORWARD, j), Op(BACKWARD, j), first_user(schedule, j)
        found += _partial_sums(backward, j, N)
        found.append(_between_workers("hand_off", j, (backward, N - 1, 0), (forward, e, 1)))
        for k in range(e, e + N - 1):
            # worker k mod N of the next round belongs to the training step after
            here, there = (forward, k % N, 1 + k // N), (forward, (k + 1) % N, 1 + (k + 1) // N)
            found.append(_between_workers("sum", j, here, there))
    return found


def _partial_sums(backward: Op, stage: int, num_workers: int) -> list[Dependency]:
    hops = range(num_workers - 1)
    return [_between_workers("partial", stage, (backward, i, 0), (backward, i + 1, 0), i) for i in hops]


def _check_ring(schedule: Schedule) -> None:
    if schedule.num_workers > 1 and schedule.offset == 0:
        raise ValueError(
            f"workers that do everything at the same time have no ring: they need an all-reduce\n{schedule}"
        )


def _states(schedule: Schedule) -> list[Dependency]:
    N, found = schedule.num_workers, []
    _check_ring(schedule)
    for j in range(schedule.num_stages):
        forward, backward, e = Op(FORWARD, j), Op(BACKWARD, j), first_user(schedule, j)
        for kind, op in (("forward_parameters", forward), ("backward_parameters", backward)):
            found += [_between_workers(kind, j, (op, i, 0), (op, (i + 1) % N, (i + 1) // N)) for i in range(N)]
        found += _partial_sums(backward, j, N)
        found.append(_between_workers("hand_off", j, (backward, N - 1, 0), (forward, e, 1)))
    return found


def _delayed_states(schedule: Schedule) -> list[Dependency]:
    """A message N−1 → 0 leaves from the owner instead, when its last op before that moment has ended."""

    def from_owner(d: Dependency) -> Dependency:
        if not d.kind.endswith("_parameters") or d.needed[1:] != (0, 1):
            return d
        e, until = first_user(schedule, d.stage), schedule.end(*d.leaves)
        places = [(slot.op, e, step) for slot in schedule.program for step in (0, 1)]
        leaves = max(
            (place for place in places if schedule.end(*place) <= until), key=lambda place: schedule.end(*place)
        )
        return _between_workers(d.kind, d.stage, leaves, d.needed)

    return [from_owner(dependency) for dependency in _states(schedule)]


def _activations(schedule: Schedule) -> list[Dependency]:
    found = []
    for i in range(schedule.num_workers):
        for j in range(schedule.num_stages - 1):
            down = (Op(FORWARD, j), i, 0), (Op(FORWARD, j + 1), i, 0)
            up = (Op(BACKWARD, j + 1), i, 0), (Op(BACKWARD, j), i, 0)
            found.append(Dependency("activation", j + 1, *down, (j, j + 1), i))
            found.append(Dependency("cotangent", j, *up, (j + 1, j), i))
    return found
