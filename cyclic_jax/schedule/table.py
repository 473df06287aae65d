"""The schedule as a table: who does what, when.

All workers run the same program, ``offset`` ticks after their neighbour; every training step repeats it ``period`` ticks later.
So worker i starts an op of step t at tick ``period * t + offset * i + slot.start``. Everything else (who may be fresh, what is
live, who talks to whom, how long a step takes) is derived from this table and from nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cyclic_jax.schedule import build, derived, makespan, messages, text
from cyclic_jax.schedule.messages import Moving
from cyclic_jax.schedule.ops import BACKWARD, FORWARD, Op, Slot

Costs = float | Sequence[float]


@dataclass(frozen=True)
class Schedule:
    """A frozen table, validated on construction.

    Attributes:
        num_workers: N. For a pipeline with one stage per device a worker is a micro-batch of the step.
        num_stages: S.
        program: the ops of one worker in one training step, in order. Ops of one tick may share it.
        period: ticks from one training step to the next.
        offset: ticks from one worker to the next; 0 where N = 1.
        name: for messages; two tables with other names are equal if the rest is.

    Raises:
        ValueError: if a worker does not do F0 … F(S−1), B(S−1) … B0 exactly once in this order, ops overlap, or the workers
            do not all start within one period.

    Examples:
        >>> print(Schedule.cyclic(3))
        tick      0   1   2   3   4   5
        worker 0  F0  F1  F2  B2  B1  B0
        worker 1  B1' B0' F0  F1  F2  B2
        worker 2  F2' B2' B1' B0' F0  F1
    """

    num_workers: int
    num_stages: int
    program: tuple[Slot, ...]
    period: int
    offset: int
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.num_workers == 1:
            object.__setattr__(self, "offset", 0)
        _validate(self)

    # ---- constructors ---------------------------------------------------------------------------------------

    @classmethod
    def cyclic(cls, num_workers: int, num_stages: int | None = None) -> "Schedule":
        """One op per tick, neighbours 2S/N ticks apart (arXiv 2403.08837, Figure 1, for S = N).

        Raises:
            ValueError: unless ``num_workers`` divides 2·``num_stages``.
        """
        return cls(*build.cyclic(num_workers, num_workers if num_stages is None else num_stages), name="cyclic")

    @classmethod
    def balanced(
        cls,
        num_workers: int,
        forward_costs: Sequence[float],
        backward_costs: Sequence[float],
        ticks_per_offset: int = 3,
    ) -> "Schedule":
        """``ticks_per_offset * N`` ticks of the least possible largest cost: short ops share a tick (derived).

        Args:
            num_workers: N.
            forward_costs: time of each stage's forward, any unit; their number is S.
            backward_costs: likewise.
            ticks_per_offset: k, the offset between neighbours.
        """
        return cls(*build.balanced(num_workers, forward_costs, backward_costs, ticks_per_offset), name="balanced")

    @classmethod
    def pipeline(cls, num_workers: int) -> "Schedule":
        """Period 3 with S = N, for a backward that takes two forwards: F one tick, B two (derived)."""
        return cls(*build.pipeline(num_workers), name="pipeline")

    @classmethod
    def simultaneous(cls, num_workers: int, num_stages: int) -> "Schedule":
        """Plain data parallelism: everybody does the same at the same time."""
        return cls(*build.simultaneous(num_workers, num_stages), name="simultaneous")

    @classmethod
    def accumulation(cls, num_workers: int, num_stages: int) -> "Schedule":
        """Gradient accumulation: one worker after the other, as on a single device."""
        return cls(*build.accumulation(num_workers, num_stages), name="accumulation")

    @classmethod
    def spread(cls, num_workers: int, num_stages: int) -> "Schedule":
        """Neighbours 2S/N ops apart for any N and S, in ticks fine enough for it; the cyclic table where N divides 2S.

        Examples:
            >>> print(Schedule.spread(4, 1))
            tick      0   1   2   3
            worker 0  F0  -   B0  -
            worker 1  -   F0  -   B0
            worker 2  B0' -   F0  -
            worker 3  -   B0' -   F0
        """
        return cls(*build.spread(num_workers, num_stages), name="spread")

    @classmethod
    def gpipe(cls, num_micro_batches: int, num_stages: int) -> "Schedule":
        """All forwards, then all backwards, then a flush (Huang et al., arXiv 1811.06965); workers are micro-batches."""
        return cls(*build.gpipe(num_micro_batches, num_stages), name="gpipe")

    @classmethod
    def one_f_one_b(cls, num_micro_batches: int, num_stages: int) -> "Schedule":
        """One forward, one backward, with a flush (Narayanan et al., arXiv 2104.04473); workers are micro-batches."""
        return cls(*build.one_f_one_b(num_micro_batches, num_stages), name="1f1b")

    @classmethod
    def parse(cls, drawing: str) -> "Schedule":
        """The schedule that ``str`` drew."""
        return cls(*text.parse(drawing))

    def __str__(self) -> str:
        return text.draw(self)

    # ---- the table ------------------------------------------------------------------------------------------

    @cached_property
    def slots(self) -> Mapping[Op, Slot]:
        """Each op's place in a worker's program."""
        return {slot.op: slot for slot in self.program}

    def start(self, op: Op, worker: int = 0, step: int = 0) -> int:
        """The tick in which ``worker`` starts ``op`` of training step ``step``."""
        return self.period * step + self.offset * worker + self.slots[op].start

    def end(self, op: Op, worker: int = 0, step: int = 0) -> int:
        """The first tick after ``op``."""
        return self.start(op, worker, step) + self.slots[op].length

    def ops_at(self, tick: int, worker: int) -> tuple[tuple[Op, int], ...]:
        """``(op, step)`` of all that ``worker`` is doing in ``tick``, in order; a step below 0 is a bubble."""
        step, phase = divmod(tick - self.offset * worker, self.period)
        return tuple((slot.op, step) for slot in self.program if slot.start <= phase < slot.start + slot.length)

    # ---- what follows from it -------------------------------------------------------------------------------

    @cached_property
    def feasible(self) -> np.ndarray:
        """Bool ``[N, S]``, read-only: may worker i use the newest version of stage j in its forward? (derived)

        Examples:
            >>> Schedule.cyclic(3).feasible.astype(int).tolist()
            [[0, 0, 1], [0, 1, 1], [1, 1, 1]]
        """
        return derived.feasible(self)

    def live_activations(self, stage_bytes: Sequence[float] | None = None) -> np.ndarray:
        """``[N, period]``: stage activations that each worker holds at each tick of the steady state.

        Counted from the start of a stage's forward to the end of its backward, in stages, or weighed by ``stage_bytes``. Sum over
        axis 0 for all workers together.

        Raises:
            ValueError: unless ``stage_bytes`` has S entries.

        Examples:
            >>> Schedule.cyclic(3).live_activations().sum(axis=0).tolist()  # N(N+1)/2 at every tick (derived)
            [6, 6, 6, 6, 6, 6]
        """
        return derived.live_activations(self, stage_bytes)

    def stage_users(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """For each tick of the steady state and each stage, the workers that use it."""
        return derived.stage_users(self)

    def messages(self, moving: Moving = "gradients") -> tuple[messages.Message, ...]:
        """What is sent in one period of the steady state. See :mod:`cyclic_jax.schedule.messages`.

        Args:
            moving: ``"gradients"`` between workers that each hold a full copy; ``"states"`` between owners of sharded
                parameters, ``"delayed_states"`` likewise under ``cdp-v1``; ``"activations"`` between devices that each hold
                one stage.
        """
        return messages.messages(self, moving)

    def makespan(
        self,
        forward: Costs,
        backward: Costs,
        overlap: bool = False,
        transfer: float = 0.0,
        moving: Moving = "gradients",
    ) -> float:
        """Time of one training step in the steady state. See :mod:`cyclic_jax.schedule.makespan`.

        Args:
            forward: time of a forward, one for all stages or one each; any unit.
            backward: likewise.
            overlap: false: all meet at the end of every tick; true: an op waits only for what it needs.
            transfer: time of one message.
            moving: which messages bind; with ``"activations"`` the resource is the stage's device, not the worker.

        Raises:
            ValueError: for costs that are not finite and positive or not S many, a negative ``transfer``, an unknown ``moving``.

        Examples:
            A backward of two forwards costs a third more than the ideal if all wait for each other at every tick (derived):

            >>> schedule = Schedule.cyclic(4)
            >>> schedule.makespan(1, 2), schedule.makespan(1, 2, overlap=True), schedule.ideal(1, 2)
            (16.0, 12.0, 12.0)
        """
        return makespan.makespan(self, forward, backward, overlap, transfer, moving)

    def ideal(self, forward: Costs, backward: Costs, moving: Moving = "gradients") -> float:
        """The least time that any order of the ops could take: the work of one worker, or of the busiest stage's device.

        Arguments and errors are those of :meth:`makespan`.
        """
        return makespan.ideal(self, forward, backward, moving)


def _validate(schedule: Schedule) -> None:
    N, S = schedule.num_workers, schedule.num_stages
    if N < 1 or S < 1:
        raise ValueError(f"num_workers={N}, num_stages={S}: both must be at least 1")
    order = [Op(FORWARD, j) for j in range(S)] + [Op(BACKWARD, j) for j in reversed(range(S))]
    given = [slot.op for slot in schedule.program]
    if given != order:
        place = next(
            (k for k, pair in enumerate(zip(given, order, strict=False)) if pair[0] != pair[1]),
            min(len(given), len(order)),
        )
        has, wants = (str(ops[place]) if place < len(ops) else "nothing" for ops in (given, order))
        raise ValueError(
            f"op {place} of the program is {has} instead of {wants}: a worker does F0 … F{S - 1}, then B{S - 1} … B0, each once. "
            f"The program: {' '.join(map(str, given))}"
        )
    _validate_ticks(schedule)
    if not 0 <= schedule.offset * (N - 1) < max(schedule.period, 1):
        raise ValueError(
            f"offset={schedule.offset} ticks between {N} workers do not fit in a period of {schedule.period} ticks:\n"
            f"{schedule}"
        )


def _validate_ticks(schedule: Schedule) -> None:
    free, last = 0, None  # the first tick that is free for a further op, and the op before
    for slot in schedule.program:
        if slot.length < 1:
            raise ValueError(f"{slot.op} has length {slot.length}: at least 1 tick is needed")
        shares = last is not None and slot.start == last.start and slot.length == last.length == 1
        if slot.start < free and not shares:
            raise ValueError(
                f"{slot.op} starts at tick {slot.start}, before {last.op if last else 'tick 0'} has ended:\n"
                f"{text.draw_program(schedule)}"
            )
        free, last = slot.start + slot.length, slot
    if free > schedule.period:
        raise ValueError(
            f"the program ends at tick {free}, after the next step has begun at tick {schedule.period}:\n"
            f"{text.draw_program(schedule)}"
        )
