"""The ring: the schedule's table and gradient messages, arranged for one program that all devices run.

Worker i is a block behind worker i − 1, so what is op k·offset + s of worker 0's program is done by all workers at the same place
s of a block, each in its own block. A **block** is ``offset`` ticks, a **beat** one place in it where a worker may do one op (a
tick has several beats where short ops share it). In block b worker i does block ``(b − i) mod N`` of the program; a message
along the ring is needed exactly one block later, in the same beat.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from cyclic_jax.schedule import BACKWARD, FORWARD, Op, Schedule

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class HandOff:
    """Worker N−1's finished sum of ``stage`` goes to worker ``receiver``, in block ``block``, into box ``box``."""

    stage: int
    block: int
    receiver: int
    box: int


@dataclass(frozen=True)
class Ring:
    """See the module's text. Refuses tables whose ring does not close."""

    schedule: Schedule

    def __post_init__(self) -> None:
        s = self.schedule
        if s.num_workers > 1 and s.period != s.num_workers * s.offset:
            raise ValueError(
                f"the ring does not close: {s.num_workers} workers, {s.offset} ticks apart, in a period of {s.period} ticks:\n{s}"
            )

    @cached_property
    def _offset(self) -> int:
        return self.schedule.offset or self.schedule.period

    @cached_property
    def beats(self) -> tuple[tuple[Op | None, ...], ...]:
        """For each beat, the op of each block of the program."""
        places = sorted({place for place, _ in self._placed.values()})
        grid = {place: [None] * self.schedule.num_workers for place in places}
        for op, (place, block) in self._placed.items():
            grid[place][block] = op  # type: ignore[call-overload]
        return tuple(tuple(grid[place]) for place in places)

    @cached_property
    def late(self) -> tuple[bool, ...]:
        """For each beat: is its message sent at the start of the next block?

        A message of a block's last tick would hold up the end of the block; sent a little later it travels during the next
        block's first ticks, and still arrives in time, if a block has several ticks.
        """
        ticks = [place[0] for place in sorted({place for place, _ in self._placed.values()})]
        return tuple(tick == self._offset - 1 and self._offset > 1 for tick in ticks)

    @cached_property
    def _placed(self) -> dict[Op, tuple[tuple[int, int], int]]:
        """For each op its place in a block, (tick, turn within the tick), and its block."""
        placed, turns = {}, dict.fromkeys((slot.start for slot in self.schedule.program), 0)
        for slot in self.schedule.program:
            block, tick = divmod(slot.start, self._offset)
            placed[slot.op] = ((tick, turns[slot.start]), block)
            turns[slot.start] += 1
        return placed

    def op(self, beat: int, block: int, worker: int) -> Op | None:
        """What a worker does in a beat of block ``block`` of the steady state."""
        return self.beats[beat][(block - worker) % self.schedule.num_workers]

    @cached_property
    def _riding(self) -> set[tuple[str, int, int]]:
        kinds = {"partial": BACKWARD, "sum": FORWARD}
        return {(kinds[m.kind], m.stage, m.sender) for m in self.schedule.messages() if m.kind in kinds}

    def pairs(self, beat: int, block: int) -> Pairs:
        """Senders and receivers along the ring when this beat ends."""
        N, found = self.schedule.num_workers, []
        for worker in range(N):
            op = self.op(beat, block, worker)
            if op is not None and (op.kind, op.stage, worker) in self._riding:
                found.append((worker, (worker + 1) % N))
        return tuple(found)

    def permutations(self) -> list[tuple[Pairs, int]]:
        """Of each permutation in the program, its pairs and how often a period runs it: blocks that are alike share one."""
        found: list[tuple[Pairs, int]] = []
        last = self.schedule.num_workers - 1
        for beat in range(len(self.beats)):
            routes = Counter(self.pairs(beat, block) for block in range(self.schedule.num_workers))
            found += [(pairs, times) for pairs, times in routes.items() if pairs]
            found += [(((last, h.receiver),), 1) for h in self.hand_offs(beat) if h.receiver != last]
        return found

    @cached_property
    def first_users(self) -> tuple[int, ...]:
        """e(j) for each stage: who gets its finished sum first."""
        return tuple(int(column.argmax()) for column in self.schedule.feasible.T)

    def hand_offs(self, beat: int) -> tuple[HandOff, ...]:
        """The finished sums that leave worker N−1 in this beat."""
        N, found = self.schedule.num_workers, []
        for block in range(N):
            op = self.op(beat, block, N - 1)
            if op is not None and op.kind == BACKWARD:
                found.append(HandOff(op.stage, block, self.first_users[op.stage], self.boxes[op.stage]))
        return tuple(found)

    @cached_property
    def boxes(self) -> tuple[int, ...]:
        """For each stage, the box that holds its finished sum from the hand-off to its first use.

        Two stages share a box unless one arrives while the other waits.
        """
        schedule, last = self.schedule, self.schedule.num_workers - 1

        def key(op: Op, worker: int, step: int) -> tuple[int, int]:
            return schedule.start(op, worker, step), self._placed[op][0][1]

        waits = [(key(Op(BACKWARD, j), last, 0), key(Op(FORWARD, j), e, 1)) for j, e in enumerate(self.first_users)]
        boxes: list[int] = []
        for j in range(schedule.num_stages):
            taken = {boxes[k] for k in range(j) if _clash(waits[j], waits[k], schedule.period)}
            boxes.append(next(box for box in range(j + 1) if box not in taken))
        return tuple(boxes)


Wait = tuple[tuple[int, int], tuple[int, int]]


def _clash(a: Wait, b: Wait, period: int) -> bool:
    """Does one arrive while the other waits, in any pair of steps? A beat uses what waits before it stores what arrives."""
    for shift in range(-2 * period, 3 * period, period):
        moved = tuple((tick + shift, turn) for tick, turn in b)
        if a[0] <= moved[0] < a[1] or moved[0] <= a[0] < moved[1]:
            return True
    return False
