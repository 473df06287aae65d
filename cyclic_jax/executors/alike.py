"""Which stages run the same program: then one copy of it, on whichever device has its turn, serves them all.

A transformer's inner blocks differ in their parameters and in where their layers stand in the model, which the random streams
depend on; the first are data on each device, and the second is given to the program as a number.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from cyclic_jax.executors.stage_op import StageOp, split

PyTree = Any


def alike(ops: Sequence[StageOp], params: Sequence[PyTree]) -> tuple[int, ...]:
    """For each stage the first one whose program is the same; its own number where there is none.

    Two programs are the same if they read and write arrays of the same shapes and names, do the same operations in the same order
    in forward and backward, and close over equal constants. The first stage (inputs instead of messages) and the last (targets
    and loss) are always alone. Nothing is executed.

    Args:
        ops: of all stages, traced with the number of the first layer.
        params: structs of each stage's parameters.
    """
    found = list(range(len(ops)))
    seen: list[tuple[int, PyTree, str, list[np.ndarray]]] = []
    structs = [_structs(op, p) for op, p in zip(ops, params, strict=True)]
    for j in range(1, len(ops) - 1):
        if structs[j] not in [structs[k] for k in range(1, len(ops) - 1) if k != j]:
            continue  # nothing to compare with: spare the tracing
        text, constants = _program(ops[j], params[j])
        for k, struct, other, others in seen:
            if struct == structs[j] and text == other and _equal(constants, others):
                found[j] = k
                break
        else:
            seen.append((j, structs[j], text, constants))
    return tuple(found)


def _structs(op: StageOp, params: PyTree) -> PyTree:
    """Names, shapes and dtypes of all that a program reads and writes."""
    leaves, structure = jax.tree.flatten((params, op.inputs_struct, op.output_struct, op.residual_structs))
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _program(op: StageOp, params: PyTree) -> tuple[str, list[np.ndarray]]:
    """The text of forward and backward, and the constants that they close over."""
    traced = (
        jax.make_jaxpr(op.forward)(params, op.inputs_struct),
        jax.make_jaxpr(op.backward)(params, op.residual_structs, split(op.output_struct)[0]),
    )
    return "\n".join(map(str, traced)), [np.asarray(value) for jaxpr in traced for value in _constants(jaxpr)]


def _constants(closed: Any) -> Iterator[Any]:
    """Of a closed jaxpr and of all those inside it."""
    yield from getattr(closed, "consts", ())
    for equation in getattr(closed, "jaxpr", closed).eqns:
        for value in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _constants(value)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def _equal(constants: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return len(constants) == len(others) and all(map(np.array_equal, constants, others))
