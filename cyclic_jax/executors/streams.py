"""Streams: the table and its messages, arranged for workers that share one sharded copy of the model.

Worker e(j), the first whose next forward may use the finished sum of stage j, owns the stage. Two streams carry its parameters
around the ring, one along the forwards and one along the backwards, each hop one block ahead of use; a place in a block (a beat,
:mod:`.ring`) has one box for the stream that its op reads. Partial sums ride with the backwards; worker N−1 hands the finished
one to the owner.

A stage that is fresh wherever the schedule allows is **swapped**: its owner writes the newest version into each stream as it
passes. A stage that is always delayed is not: the link N−1 → 0 of its streams is replaced by owner → 0, which brings the version
that all workers use in the step after. Only in a run's first step do its streams go once around with what they began with,
theta_{T−1}.
"""

from dataclasses import dataclass
from functools import cached_property

from cyclic_jax.executors.ring import Pairs, Ring
from cyclic_jax.rules import UpdateRule
from cyclic_jax.schedule import BACKWARD, FORWARD, Op


@dataclass(frozen=True)
class Streams:
    """See the module's text.

    Attributes:
        ring: the table in blocks and beats.
        swapped: for each stage.

    Raises:
        ValueError: for a table in which an owner would be late, or would have moved on before it sends.
    """

    ring: Ring
    swapped: tuple[bool, ...]

    @classmethod
    def of(cls, ring: Ring, rule: UpdateRule) -> "Streams":
        """For a rule.

        Raises:
            ValueError: if some stage is neither delayed for all workers nor fresh wherever the schedule allows.
        """
        feasible = ring.schedule.feasible
        for j, column in enumerate(rule.fresh.T):
            if column.any() and (column != feasible[:, j]).any():
                allowed = [i for i, fresh in enumerate(feasible[:, j]) if fresh]
                raise ValueError(
                    f"rule {rule.name!r} wants workers {[i for i, fresh in enumerate(column) if fresh]} to be fresh on stage {j}: "
                    f"a stage whose parameters ride around has to be fresh for all of {allowed}, or for none (cdp-v1); "
                    "the replicated executor runs any rule"
                )
        return cls(ring, tuple(bool(column.any()) for column in rule.fresh.T))

    def __post_init__(self) -> None:
        for j, owner in enumerate(self.owners):
            update = [self._place(Op(FORWARD, j), owner, step) for step in (0, 1)]
            if update[0] >= self.num_workers * len(self.ring.beats):
                raise ValueError(f"worker {owner} would update stage {j} a step late:\n{self.ring.schedule}")
            for kind in (FORWARD, BACKWARD):
                leaves = self._place(Op(kind, j), 0, 1) - len(self.ring.beats)  # a block ahead of use
                if not (self.swapped[j] or update[0] <= leaves < update[1]):
                    raise ValueError(
                        f"worker {owner} would send stage {j} for {kind}{j} too early or too late:\n{self.ring.schedule}"
                    )

    def _place(self, op: Op, worker: int, step: int) -> int:
        """Beats from the start of step 0 to where a worker does an op."""
        beat, block = next((beat, ops.index(op)) for beat, ops in enumerate(self.ring.beats) if op in ops)
        return (step * self.num_workers + worker + block) * len(self.ring.beats) + beat

    @property
    def num_workers(self) -> int:
        """N."""
        return self.ring.schedule.num_workers

    @property
    def owners(self) -> tuple[int, ...]:
        """e(j) for each stage."""
        return self.ring.first_users

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """For each stage, how many earlier ones its owner has."""
        return tuple(self.owners[:j].count(owner) for j, owner in enumerate(self.owners))

    def owned(self, worker: int, rank: int) -> int | None:
        """The stage that a worker has in a rank."""
        return next(
            (j for j, place in enumerate(zip(self.owners, self.ranks, strict=True)) if place == (worker, rank)), None
        )

    def start(self, beat: int, worker: int) -> int | None:
        """The stage whose parameters lie in a box before the first block."""
        op = self.ring.op(beat, -1 if self.ring.late[beat] else 0, worker)
        return None if op is None else op.stage

    def riding(self, beat: int, block: int, first: bool) -> Pairs:
        """Who passes parameters on when a beat ends; ``first``: worker 0's next op in it belongs to the run's first step."""
        N, found = self.num_workers, []
        for worker in range(N if N > 1 else 0):
            op = self.ring.op(beat, block, worker)
            if op is not None and (worker < N - 1 or first or self.swapped[op.stage]):
                found.append((worker, (worker + 1) % N))
        return tuple(found)

    def from_owner(self, beat: int, block: int) -> int | None:
        """The stage that its owner sends to worker 0 when a beat ends."""
        op = self.ring.op(beat, block + 1, 0)
        return None if op is None or self.swapped[op.stage] else op.stage

    def sums(self, beat: int, block: int) -> Pairs:
        """Who passes a partial sum on when a beat ends."""
        ops = [self.ring.op(beat, block, worker) for worker in range(self.num_workers - 1)]
        return tuple((w, w + 1) for w, op in enumerate(ops) if op is not None and op.kind == BACKWARD)

    def permutations(self, first: bool = False) -> list[Pairs]:
        """The pairs of each permutation that a period runs: the first one, or one of the steady state."""
        found: list[Pairs] = []
        for beat in range(len(self.ring.beats)):
            for block in range(self.num_workers):
                found += [self.riding(beat, block, first), self.sums(beat, block), self._owner_sends(beat, block)]
            found += [((self.num_workers - 1, h.receiver),) for h in self.ring.hand_offs(beat)]
        return [kept for pairs in found if (kept := tuple(pair for pair in pairs if pair[0] != pair[1]))]

    def _owner_sends(self, beat: int, block: int) -> Pairs:
        stage = self.from_owner(beat, block)
        return () if stage is None else ((self.owners[stage], 0),)
