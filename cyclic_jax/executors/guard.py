"""The guard: a body that runs or does not, and changes its state in place.

A staggered program asks at every tick "which op is mine". ``lax.switch`` and ``lax.cond`` copy every array they return, also those
that a branch hands through untouched; a ``while_loop`` that runs zero or one times updates its carry in place. So the choice is a
chain of guarded bodies, each over just the buffers that its op changes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

Memory = dict[str, Any]  # a device's buffers by name
TURN = "turn"


def in_turn(memory: Memory) -> Memory:
    """``memory`` whose guarded bodies run one after the other, as they are written.

    Without it, the compiler sees nothing between a body that reads a buffer and a later one that changes it, and copies the
    buffer to be safe. With it each guard waits for a count that the one before hands on.
    """
    return {**memory, TURN: jax.numpy.zeros((), jax.numpy.int32)}


def when(predicate: jax.Array, body: Callable[[Memory], Memory], memory: Memory, changes: Sequence[str]) -> Memory:
    """``{**memory, **body(memory)}`` if ``predicate``, else ``memory``.

    Args:
        predicate: bool scalar; may differ between devices, but a body with a collective needs one that is equal on all
            devices that take part.
        body: reads any buffer, returns those named in ``changes``.
        memory: all buffers.
        changes: names of the buffers that the body changes.
    """

    turn = memory.get(TURN)
    if turn is not None:
        predicate, changes = predicate & (turn >= 0), [*changes, TURN]  # it is; but the compiler has to wait for it

    def run(carry: tuple[jax.Array, Memory]) -> tuple[jax.Array, Memory]:
        changed = body({**memory, **carry[1]})
        if turn is not None:
            changed = {**changed, TURN: changed[TURN] + 1}
        return jax.numpy.zeros_like(carry[0]), {name: changed[name] for name in changes}

    start = (predicate, {name: memory[name] for name in changes})
    _, changed = jax.lax.while_loop(lambda carry: carry[0], run, start)
    return {**memory, **changed}
