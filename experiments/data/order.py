"""Which examples a training step sees: a pure function of (seed, step), so every update rule sees the same data.

Each epoch is a permutation drawn from (seed, epoch) and cut into whole batches; what is left over at its end is dropped from
that epoch only, another permutation leaves over other examples.
"""

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4)
def epoch_order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of one epoch: int64 ``[num_examples]``, read-only; the same for one version of NumPy."""
    order = np.random.default_rng((seed, epoch)).permutation(num_examples)
    order.flags.writeable = False
    return order


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """Whole batches in an epoch.

    Raises:
        ValueError: if ``batch_size`` is below 1 or above ``num_examples``.

    >>> steps_per_epoch(10, 3)
    3
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: at least 1 is needed")
    if batch_size > num_examples:
        raise ValueError(
            f"batch_size={batch_size} is larger than the training split, which has {num_examples} examples"
        )
    return num_examples // batch_size


def check_stream(num_examples: int, batch_size: int, seed: int, start_step: int) -> None:
    """Refuse a stream that cannot start: raises ValueError, see :func:`steps_per_epoch`; seed and step must be >= 0."""
    steps_per_epoch(num_examples, batch_size)
    for name, value in (("seed", seed), ("start_step", start_step)):
        if value < 0:
            raise ValueError(f"{name}={value}: it must not be negative")


def step_indices(num_examples: int, batch_size: int, seed: int, step: int) -> np.ndarray:
    """Indices of the examples of training step ``step``: int64 ``[batch_size]``.

    >>> first, second = (step_indices(6, 3, seed=0, step=k) for k in range(2))
    >>> sorted([*first.tolist(), *second.tolist()])
    [0, 1, 2, 3, 4, 5]
    """
    epoch, position = divmod(step, steps_per_epoch(num_examples, batch_size))
    return epoch_order(num_examples, seed, epoch)[position * batch_size : (position + 1) * batch_size]
