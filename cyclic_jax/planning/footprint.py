"""Bytes on each device, by executor and baseline.

What a compiled step takes as arguments follows from shapes: states, activations and payloads between steps, and the batch. What it
needs beside them is estimated: the working memory of the largest backward, and the copies that the executor makes of parameters
and of messages; the tests compare both with the compiler's figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from cyclic_jax.executors.interleaved_memory import held_by_turn, tree_bytes
from cyclic_jax.executors.lanes import Lanes
from cyclic_jax.executors.payload import PayloadFormat
from cyclic_jax.executors.ring import Ring
from cyclic_jax.executors.shares import make_shares
from cyclic_jax.executors.slots import Slots, per_stage
from cyclic_jax.executors.stage_op import split
from cyclic_jax.executors.streams import Streams
from cyclic_jax.planning.work import Work
from cyclic_jax.rules import UpdateRule
from cyclic_jax.schedule import Schedule

PyTree = Any

SCALARS = 4 + 4 + 8  # step, calls, the run's key


@dataclass(frozen=True)
class Footprint:
    """Bytes of one device.

    Attributes:
        states: parameters, optimizer state and statistics, in all versions and with their padding.
        activations: residuals and what else waits for a backward.
        payloads: gradients and messages on their way.
        batch: the rows of a step that this device is given.
        working: what an op needs while it runs.
        between_steps: activations and payloads outlive a step, so they are arguments of its program.
    """

    states: int
    activations: int
    payloads: int
    batch: int
    working: int
    between_steps: bool = True

    @property
    def arguments(self) -> int:
        """Of the compiled step."""
        return self.states + self.batch + (self.activations + self.payloads if self.between_steps else 0)

    @property
    def temporaries(self) -> int:
        """What the compiled step allocates beside them: temporaries, and results that take no argument's place."""
        return self.total - self.arguments

    @property
    def total(self) -> int:
        """All together."""
        return self.states + self.activations + self.payloads + self.batch + self.working


def data_parallel(work: Work) -> Footprint:
    """One copy of everything; activations live and die within a step."""
    params, _, state = _sizes(work)
    whole = jax.eval_shape(work.optimizer.init, work.structs[0])  # one count of steps, not one a stage
    return _all_at_once(work, params + tree_bytes(whole) + state + 4 + 8)


def synchronous(work: Work) -> Footprint:
    """The executor of that name on a device for each worker: its view, what is pending, and theta_{t-1}, made anew each step."""
    params, optimizer, state = _sizes(work)
    return _all_at_once(work, 2 * params + optimizer + state + 4 + 8 + work.num_stages, made=params)


def fsdp(work: Work, members: int) -> Footprint:
    """1/N of parameters and optimizer state (estimated: no padding); two layers gathered, a gradient, all residuals."""
    params, optimizer, state = _sizes(work)
    counts = [cost.params for cost in work.costs]
    largest = params * max(counts) // max(1, sum(counts))
    working = max(work.working - max(work.params_bytes), 0)
    activations = sum(work.residual_bytes)
    return Footprint(
        -(-(params + optimizer) // members) + state, activations, 3 * largest, tree_bytes(work.batch), working, False
    )


def replicated(work: Work, schedule: Schedule) -> Footprint:
    """A full copy, a pending sum for each stage, the activations of one micro-batch, one box for each beat of the ring."""
    params, optimizer, state = _sizes(work)
    ring, payload = Ring(schedule), PayloadFormat(work.structs[0]).num_bytes
    boxes = len(ring.beats) + max(ring.boxes) + 1
    return Footprint(
        states=2 * params + optimizer + state + SCALARS,
        activations=_one_micro_batch(work),
        payloads=boxes * payload,
        batch=tree_bytes(work.batch),
        working=work.working + 2 * payload,
    )


def zero(work: Work, schedule: Schedule) -> Footprint:
    """Parameters and optimizer state of the stages that a device owns, each padded to the largest of its rank.

    Beside them for each beat of the ring a stage of parameters and a sum on their way, the finished sums that wait, and the
    activations of one micro-batch. For the freshest rule of the table.
    """
    ring, payload = Ring(schedule), PayloadFormat(work.structs[0]).num_bytes
    beats, waiting = len(ring.beats), max(ring.boxes) + 1
    return Footprint(
        states=_owned(work, Streams.of(ring, UpdateRule.freshest(schedule))) + _sizes(work)[2] + SCALARS,
        activations=_one_micro_batch(work),
        payloads=(2 * beats + waiting) * payload,
        batch=tree_bytes(work.batch),
        working=work.working
        + 3 * payload,  # copies: the version seen, a stream and a sum on both sides of a permutation
    )


def one_stage(work: Work, schedule: Schedule, replicas: Sequence[int]) -> Footprint:
    """The pipeline (one replica a stage) and model-parallel executors: one stage a device, padded to the largest."""
    (params, state), N = work.structs, schedule.num_workers
    waiting = [-(-n // k) for n, k in zip(Lanes(schedule).slots, replicas, strict=True)]
    gradients, messages = per_stage(params).num_bytes, _messages(work).num_bytes
    several = max(replicas) > 1
    optimizer = per_stage(work.opt_states).num_bytes
    return Footprint(
        states=2 * gradients + optimizer + per_stage(state, N).num_bytes + SCALARS,
        activations=_residuals(work, waiting),
        payloads=(2 if several else 1) * gradients + 2 * messages,
        batch=tree_bytes(work.batch),
        # copies: the finished sum, the version updated; messages on both sides of a permutation
        working=work.working + 2 * gradients + optimizer // 3 + (2 if several else 3) * messages,
    )


def flushed(work: Work, micro_batches: int, order: str) -> Footprint:
    """GPipe (all forwards first: M micro-batches wait on every device) or 1F1B (S − j of them)."""
    (params, state), S, M = work.structs, work.num_stages, micro_batches
    waiting = [M] * S if order == "gpipe" else [min(M, n) for n in Lanes(Schedule.pipeline(S)).slots]
    gradients, messages = per_stage(params).num_bytes, _messages(work).num_bytes
    optimizer = per_stage(work.opt_states).num_bytes
    return Footprint(
        states=gradients + optimizer + per_stage(state, M).num_bytes + 4 + 8,
        activations=_residuals(work, waiting),
        payloads=gradients + 2 * messages,
        batch=-(-M // S) * tree_bytes(work.batch),
        working=work.working + gradients + optimizer // 3 + (2 if order == "gpipe" else 3) * messages,
    )


def interleaved(work: Work, schedule: Schedule) -> Footprint:
    """One device: two versions, and the activations and gradients of all N micro-batches that take turns on it.

    The total alone is meant: how much of it is an argument depends on where a step begins.
    """
    params, optimizer, state = _sizes(work)
    N = schedule.num_workers
    held = max(held_by_turn(schedule, work.ops, work.structs[0]))
    states = 2 * params + optimizer + N * state + SCALARS
    return Footprint(states, held, 0, N * tree_bytes(work.batch), 0)


def message_bytes(work: Work) -> int:
    """Of a message between stages: activations with the targets, or cotangents, padded to the largest."""
    return _messages(work).num_bytes


# ---- parts --------------------------------------------------------------------------------------------------


def _sizes(work: Work) -> tuple[int, int, int]:
    """Parameters, optimizer state, statistics of one worker."""
    return sum(work.params_bytes), tree_bytes(work.opt_states), tree_bytes(work.structs[1])


def _all_at_once(work: Work, states: int, made: int = 0) -> Footprint:
    """All residuals during the backward, or two copies of the parameters at the update, whichever is more."""
    params, activations = sum(work.params_bytes), sum(work.residual_bytes)
    backward = work.working + params - max(work.params_bytes)  # gradients of all stages are held at its end
    working = max(backward, 2 * params - activations)
    return Footprint(states, activations, made, tree_bytes(work.batch), working, between_steps=False)


def _owned(work: Work, streams: Streams) -> int:
    """Parameters and optimizer state on a device of the ZeRO executor."""

    def update(gradient: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = work.optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    stages = {rank: [j for j, r in enumerate(streams.ranks) if r == rank] for rank in set(streams.ranks)}
    shares = [make_shares(work.optimizer.init, update, work.structs[0], owned) for owned in stages.values()]
    return sum(tree_bytes(jax.eval_shape(share.empty)) for share in shares)


def _one_micro_batch(work: Work) -> int:
    """What a worker of a ring keeps: every stage's residuals, activations and cotangents between stages, targets and loss."""
    between = [op.output_struct for op in work.ops[:-1]]
    boundaries = sum(tree_bytes(x) + tree_bytes(split(x)[0]) for x in between)
    return sum(work.residual_bytes) + boundaries + tree_bytes(work.batch[1]) + tree_bytes(work.ops[-1].output_struct)


def _messages(work: Work) -> Slots:
    leaving = [op.output_struct for op in work.ops[:-1]]
    return per_stage([*((y, work.batch[1]) for y in leaving), *(split(y)[0] for y in leaving)])


def _residuals(work: Work, counts: Sequence[int]) -> int:
    return per_stage([op.residual_structs for op in work.ops], counts).num_bytes
