"""Where the rows of a batch go: every process brings those of its own devices, and no others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from cyclic_jax.executors.base import Batch, check_batch

PyTree = Any


def own_rows(sharding: NamedSharding, rows: int) -> dict[jax.Device, slice]:
    """Which of a batch's ``rows`` rows lie on each device of this process, in ascending order."""
    indices = sharding.addressable_devices_indices_map((rows,))
    spans = {device: slice(*index[0].indices(rows)[:2]) for device, index in indices.items() if index is not None}
    return dict(sorted(spans.items(), key=lambda item: item[1].start))


def place(batch: Batch, sharding: NamedSharding, num_workers: int, rows: int | None = None) -> Batch:
    """The batch on the devices of ``sharding``: global arrays ``[rows, …]``.

    Args:
        batch: with one process, any arrays ``[rows, …]``. With several, global arrays that lie so already, or this process's own
            rows (:func:`own_rows`) in ascending order.
        sharding: over the leading axis.
        num_workers: of all processes.
        rows: of the whole batch; needed where some process has none of them.

    Raises:
        ValueError: for leaves of unequal or wrong length, or where ``rows`` is needed and missing.
    """
    if jax.process_count() == 1 or all(_lies(leaf, sharding) for leaf in jax.tree.leaves(batch)):
        check_batch(batch, num_workers)
        return jax.device_put(batch, sharding)
    rows = _check_own(batch, sharding, num_workers, rows)
    return jax.tree.map(lambda leaf: _assembled(leaf, sharding, rows), batch)


def widen(batch: Batch, layout: NamedSharding) -> Batch:
    """The same rows on the same devices, and as many zeros on each device of ``layout`` that holds none."""

    def one(leaf: jax.Array) -> jax.Array:
        if leaf.sharding.is_equivalent_to(layout, leaf.ndim):
            return leaf
        there = {shard.device: shard.data for shard in leaf.addressable_shards}
        shape = widened(leaf.shape, leaf.sharding, layout)
        part = (shape[0] // layout.num_devices, *shape[1:])
        parts = [there[d] if d in there else jnp.zeros(part, leaf.dtype, device=d) for d in layout.addressable_devices]
        return jax.make_array_from_single_device_arrays(shape, layout, parts, dtype=leaf.dtype)

    return jax.tree.map(one, batch)


def widened(shape: tuple[int, ...], sharding: Any, layout: NamedSharding) -> tuple[int, ...]:
    """The shape that :func:`widen` makes of ``shape``."""
    return (shape[0] // sharding.num_devices * layout.num_devices, *shape[1:])


def _lies(leaf: Any, sharding: NamedSharding) -> bool:
    return isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def _check_own(batch: Batch, sharding: NamedSharding, num_workers: int, rows: int | None) -> int:
    """The rows of the whole batch, of which ``batch`` are this process's."""
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(f"a batch leaf lies as {leaf.sharding}, the executor takes {sharding}")
    own, everyone = len(sharding.addressable_devices), {device.process_index for device in sharding.mesh.devices.flat}
    if rows is None:
        if len(everyone) < jax.process_count():  # known to all processes alike, so that all of them stop
            raise ValueError(
                f"only processes {sorted(everyone)} of {jax.process_count()} hold rows of a batch, so the others cannot tell its "
                "size: give step what cj.global_batch(executor, batch, rows=...) makes"
            )
        check_batch(batch, num_workers * own // sharding.num_devices)
        return jax.tree.leaves(batch)[0].shape[0] // own * sharding.num_devices
    if rows < 1 or rows % num_workers:
        raise ValueError(f"a batch of {rows} rows cannot be divided among {num_workers} workers")
    wanted = rows // sharding.num_devices * own
    for leaf in jax.tree.leaves(batch):
        if np.shape(leaf)[:1] != (wanted,):
            raise ValueError(
                f"process {jax.process_index()} holds {wanted} of {rows} rows (cj.local_rows(executor, {rows})), got shape "
                f"{np.shape(leaf)}"
            )
    return rows


def _assembled(leaf: Any, sharding: NamedSharding, rows: int) -> jax.Array:
    """This process's rows, cut among its devices, as its part of the global array."""
    spans, parts, start = own_rows(sharding, rows), [], 0
    for device, span in spans.items():
        parts.append(jax.device_put(leaf[start : start + span.stop - span.start], device))
        start += span.stop - span.start
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    return jax.make_array_from_single_device_arrays((rows, *leaf.shape[1:]), sharding, parts, dtype=dtype)
