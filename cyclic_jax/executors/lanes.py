"""Lanes: a pipeline's table, arranged for one program that all devices run.

Device j owns stage j. Micro-batch m follows micro-batch m − 1 ``offset`` ticks later, without end, so device j does the same ops
in every **block** of ``offset`` ticks: each for a micro-batch of its own. An op that starts at tick s of a micro-batch's program is
done in block b for micro-batch b − s // offset, in phase s mod offset. Its message leaves when it ends, and is needed in the very
next tick: partial permutations, one a phase, in which only those take part whose op ends there.
"""

from dataclasses import dataclass
from functools import cached_property

from cyclic_jax.schedule import BACKWARD, FORWARD, Op, Schedule

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Turn:
    """An op that starts (or ends) in a phase of each block, for the micro-batch that began ``age`` blocks before."""

    op: Op
    age: int


@dataclass(frozen=True)
class Lanes:
    """See the module's text.

    Raises:
        ValueError: for a table with other than one stage a worker, whose period is not N offsets, where a device has two ops at a
            time, or where a message has to wait.
    """

    schedule: Schedule

    def __post_init__(self) -> None:
        s = self.schedule
        if s.num_workers != s.num_stages:
            raise ValueError(
                f"one stage a device needs as many stages as workers, got {s.num_stages} and {s.num_workers}"
            )
        if s.num_workers > 1 and s.period != s.num_workers * s.offset:
            raise ValueError(
                f"the pipeline flushes: {s.num_workers} micro-batches, {s.offset} ticks apart, in a period of {s.period}:\n{s}"
            )
        for tick, users in enumerate(s.stage_users()):
            for j, workers in enumerate(users):
                if len(workers) > 1:
                    raise ValueError(f"device {j} has the ops of workers {workers} at tick {tick}:\n{s}")
        for message in s.messages("activations"):
            if message.slack:
                raise ValueError(
                    f"the {message.kind} of stage {message.stage} waits {message.slack} ticks; "
                    f"a pipeline's table leaves no slack:\n{s}"
                )
        if self._start(Op(FORWARD, 0)) >= self.offset:
            raise ValueError(f"a worker's first forward starts at tick {self._start(Op(FORWARD, 0))}:\n{s}")

    @property
    def offset(self) -> int:
        """Ticks of a block."""
        return self.schedule.offset or self.schedule.period

    def _start(self, op: Op) -> int:
        return self.schedule.slots[op].start

    def _end(self, op: Op) -> int:
        return self._start(op) + self.schedule.slots[op].length

    def age(self, op: Op) -> int:
        """Blocks from the start of a micro-batch to the start of its op."""
        return self._start(op) // self.offset

    @cached_property
    def turns(self) -> tuple[tuple[Turn, ...], ...]:
        """For each phase of a block the ops that start in it, at most one a device."""
        phases: list[list[Turn]] = [[] for _ in range(self.offset)]
        for op in self.schedule.slots:
            phases[self._start(op) % self.offset].append(Turn(op, self.age(op)))
        return tuple(map(tuple, phases))

    @cached_property
    def sends(self) -> tuple[tuple[Turn, ...], ...]:
        """For each phase the ops that end in it and whose result goes to another stage; ages are those of their end."""
        phases: list[list[Turn]] = [[] for _ in range(self.offset)]
        for op in self.schedule.slots:
            age, phase = divmod(self._end(op) - 1, self.offset)
            if 0 <= receiver(op) < self.schedule.num_stages:
                phases[phase].append(Turn(op, age))
        return tuple(map(tuple, phases))

    @cached_property
    def pairs(self) -> tuple[Pairs, ...]:
        """For each phase, which stage sends to which when it ends."""
        return tuple(tuple(sorted((turn.op.stage, receiver(turn.op)) for turn in turns)) for turns in self.sends)

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """For each device, how many micro-batches wait there between forward and backward."""
        stages = range(self.schedule.num_stages)
        return tuple(-(-(self._end(Op(BACKWARD, j)) - self._start(Op(FORWARD, j))) // self.offset) for j in stages)


def receiver(op: Op) -> int:
    """The stage that an op's result goes to."""
    return op.stage + (1 if op.kind == FORWARD else -1)
