"""Several processes: what each of them brings to a step, and how all of them read its numbers.

With ``jax.distributed`` every process runs the same program over all devices, and owns some of them. The executors take each
process's own rows of the batch; a process finds out which those are with :func:`local_rows`. Losses stay on the devices that made
them; :func:`read_metrics` brings them to every process, so that all take the same decisions. With one process nothing changes.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from cyclic_jax.executors.base import Batch, Executor
from cyclic_jax.executors.placing import own_rows, place
from cyclic_jax.state import Metrics


def local_rows(executor: Executor, rows: int) -> np.ndarray:
    """Which rows of a batch this process provides: int64, ascending; possibly none (model parallelism). With one process, all.

    Args:
        executor: from :func:`cyclic_jax.make_executor`.
        rows: of the whole batch, a multiple of ``executor.num_workers``.

    Raises:
        ValueError: if ``rows`` cannot be divided among the workers.

    Examples:
        In every process::

            own = cj.local_rows(executor, rows=64)
            carry, metrics = executor.step(carry, (inputs[own], targets[own]))
    """
    if rows < 1 or rows % executor.num_workers:
        raise ValueError(f"a batch of {rows} rows cannot be divided among {executor.num_workers} workers")
    spans = own_rows(executor.batch_sharding, rows).values()
    return np.concatenate([np.arange(0), *(np.arange(span.start, span.stop) for span in spans)])


def global_batch(executor: Executor, batch: Batch, *, rows: int) -> Batch:
    """One global batch out of every process's own rows, ready for ``step``, which then neither copies nor moves it.

    ``step`` does this by itself where every process has rows. In the model-parallel executor some may have none, and must be told
    how many there are.

    Args:
        executor: from :func:`cyclic_jax.make_executor`.
        batch: ``(inputs, targets)``: the rows that :func:`local_rows` names, in that order.
        rows: of the whole batch.

    Raises:
        ValueError: if ``rows`` cannot be divided among the workers, or the batch has not as many rows as this process owns.
    """
    return place(batch, executor.batch_sharding, executor.num_workers, rows)


def read_metrics(metrics: Sequence[Metrics]) -> list[Metrics]:
    """The numbers of some calls of ``step``, as NumPy arrays, the same on every process.

    With several processes this is one exchange among them: all must call it, with the same calls' metrics. It waits until the last
    of those calls is done, and the exchange runs on the devices after whatever they were given before; read several calls together,
    and a few steps late. Every process must have the same number of devices.

    Args:
        metrics: of one call or more, the same ones in every process.
    """
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, list(metrics))
    if not metrics:
        return []
    own = jax.tree.map(lambda *leaves: np.stack(leaves), *map(_own, metrics))
    losses, steps, known = jax.tree.map(np.asarray, multihost_utils.process_allgather(own))  # [processes, calls, N]
    owner = known.argmax(axis=0)[None]
    losses, steps = (np.take_along_axis(values, owner, axis=0)[0] for values in (losses, steps))
    return [Metrics(loss.astype(one.loss.dtype), step) for one, loss, step in zip(metrics, losses, steps, strict=True)]


def _own(metrics: Metrics) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses, steps, and for which workers this process has them."""
    shape = metrics.loss.shape
    losses, steps, known = np.zeros(shape), np.zeros(shape, np.int32), np.zeros(shape, bool)
    for values, leaf in ((losses, metrics.loss), (steps, metrics.step)):
        for shard in leaf.addressable_shards:
            values[shard.index] = np.asarray(shard.data)
            known[shard.index] = True
    return losses, steps, known
