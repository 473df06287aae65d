"""What the interleaved executor holds at each of its turns, replayed from shapes alone.

Finer than a curve over ticks: one op at a time, and beside residuals also what travels between stages and the gradients. A value
with two uses, such as the input of a stage that is also its residual, is one buffer. The working memory inside an op is left out,
and so is the second copy that a carry keeps of a value which two of its buffers hold.
"""

from collections.abc import Hashable
from typing import Any

import jax

from cyclic_jax.executors.stage_op import StageOp, split
from cyclic_jax.executors.turns import Turn, turns
from cyclic_jax.schedule import FORWARD, Schedule

PyTree = Any
Held = dict[str, dict[Hashable, int]]  # by the executor's name of it, the buffers and their bytes


def tree_bytes(tree: PyTree) -> int:
    """Bytes of all leaves, arrays or structs."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def held_by_turn(schedule: Schedule, ops: list[StageOp], params: tuple[PyTree, ...]) -> list[int]:
    """Bytes during each turn of a period in the steady state, parameters, optimizer and the batch itself not counted.

    Args:
        schedule: the table.
        ops: traced, one per stage.
        params: structs of each stage's parameters: gradients have their size.
    """
    replay = _Replay(schedule, ops, [tree_bytes(part) for part in params])
    for late in (False, True):  # the first period fills what is in flight; the second is like all that follow
        peaks = [replay.turn(turn) for turn in turns(schedule) if late or not turn.late]
    return peaks


class _Replay:
    def __init__(self, schedule: Schedule, ops: list[StageOp], gradients: list[int]):
        self.N, self.ops, self.gradients = schedule.num_workers, ops, gradients
        self.held: Held = {}
        self.made = 0

    def turn(self, turn: Turn) -> int:
        """Bytes while it runs: what was there, and what it makes."""
        done = (self.forward if turn.op.kind == FORWARD else self.backward)(turn.worker, turn.op.stage)
        buffers: dict[Hashable, int] = {}
        for part in self.held.values():
            buffers |= part
        for name in done:
            del self.held[name]
        return sum(buffers.values())

    def forward(self, i: int, j: int) -> list[str]:
        """Takes ``x``, makes residuals and the next ``x``."""
        op = self.ops[j]
        if j == 0:
            self.held[f"x{i}"] = self.new(i, "input", op.stage.input_struct)
        x = list(self.held[f"x{i}"].items())
        shared = {place: x[k] for k, place in op.input_residuals.items()}
        made = list(self.new(i, ("residual", j), op.residual_structs).items())
        residuals = [shared.get(place, buffer) for place, buffer in enumerate(made)]
        self.held[f"residuals{i}/{j}"] = dict(residuals)
        # under another name while both are there; the old one goes after this turn
        self.held[f"used{i}"] = self.held.pop(f"x{i}")
        made = list(self.new(i, ("x", j + 1), op.output_struct).items())
        outputs = dict(residuals[op.output_residuals[k]] if k in op.output_residuals else y for k, y in enumerate(made))
        self.held[f"cotangent{i}" if op.loss else f"x{i}"] = outputs
        return [f"used{i}"]

    def backward(self, i: int, j: int) -> list[str]:
        """Takes residuals and a cotangent, makes the cotangent before it and the gradient."""
        done = [f"residuals{i}/{j}", f"used{i}"]
        # the last stage of a model without a loss has its output where a cotangent of that shape will be
        self.held[f"used{i}"] = (
            self.held.pop(f"cotangent{i}") if f"cotangent{i}" in self.held else self.held.pop(f"x{i}")
        )
        if j:
            self.held[f"cotangent{i}"] = self.new(i, ("cotangent", j), split(self.ops[j].stage.input_struct)[0])
        self.held.setdefault(f"sum{j}", {f"sum{j}": self.gradients[j]})
        if i:
            self.held[f"gradient{j}"] = {f"gradient{j}": self.gradients[j]}
            done.append(f"gradient{j}")
        return [*done, f"sum{j}"] if i == self.N - 1 else done

    def new(self, i: int, label: Hashable, structs: PyTree) -> dict[Hashable, int]:
        """Fresh buffers, one per leaf; a worker's next step makes others."""
        self.made += 1
        return {(self.made, i, label, k): tree_bytes(leaf) for k, leaf in enumerate(jax.tree.leaves(structs))}


def predicted_bytes(
    schedule: Schedule, ops: list[StageOp], carry: PyTree, batch: PyTree, params: tuple[PyTree, ...]
) -> int:
    """Peak bytes of the compiled step: what is held throughout, and the largest turn.

    Args:
        schedule: the table.
        ops: traced, one per stage.
        carry: structs of the carry that ``init`` makes: both versions of the parameters, optimizer and statistics.
        batch: structs of the N micro-batches.
        params: structs of each stage's parameters.
    """
    return tree_bytes(carry) + tree_bytes(batch) + max(held_by_turn(schedule, ops, params))
