"""Device meshes: an axis ``cyclic`` for the devices of one ring (or ``stage``, as pipelines call it), ``data`` for its copies."""

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

DATA, CYCLIC, STAGE = "data", "cyclic", "stage"


def default_mesh(num_workers: int) -> Mesh:
    """As many devices as divide the workers evenly, neighbours in the ring being neighbours in hardware.

    Raises:
        ValueError: if that leaves a process without a device.
    """
    devices = jax.devices()
    size = max(d for d in range(1, num_workers + 1) if num_workers % d == 0 and d <= len(devices))
    if size == len(devices):
        return Mesh(mesh_utils.create_device_mesh((1, size)), (DATA, CYCLIC))
    return check_processes(Mesh(np.asarray(devices[:size]).reshape(1, size), (DATA, CYCLIC)))


def check_processes(mesh: Mesh) -> Mesh:
    """The mesh.

    Raises:
        ValueError: if some process has none of its devices: it would have nothing to do but wait.
    """
    working = {device.process_index for device in mesh.devices.flat}
    idle = sorted(set(range(jax.process_count())) - working)
    if idle:
        raise ValueError(
            f"the mesh has {mesh.size} of {len(jax.devices())} devices and leaves processes {idle} of {jax.process_count()} "
            "without work: start fewer processes or devices a process, or give a mesh with devices of every process"
        )
    return mesh


def check_mesh(mesh: Mesh, num_workers: int) -> Mesh:
    """The mesh with both axes in order; ``num_workers`` is the ring's N.

    Raises:
        ValueError: for other axes, a ``cyclic`` axis whose size does not divide N, or a process without a device.
    """
    mesh = check_processes(_both_axes(mesh))
    size = mesh.shape[CYCLIC]
    if num_workers % size:
        raise ValueError(
            f"the mesh has {size} devices along 'cyclic', which does not divide {num_workers} workers: "
            f"take one of {[d for d in range(1, num_workers + 1) if num_workers % d == 0]}"
        )
    return mesh


def ring_mesh(mesh: Mesh | None, num_devices: int) -> Mesh:
    """The mesh of an executor that needs this many devices along ``cyclic``.

    Raises:
        ValueError: if there are fewer devices, or the mesh has other axes or another number along ``cyclic``.
    """
    if mesh is None and len(jax.devices()) < num_devices:
        raise ValueError(f"{num_devices} devices are needed, and there are {len(jax.devices())}")
    mesh = default_mesh(num_devices) if mesh is None else check_processes(_both_axes(mesh))
    if mesh.shape[CYCLIC] != num_devices:
        raise ValueError(f"{num_devices} devices are needed, and the mesh has {mesh.shape[CYCLIC]} along 'cyclic'")
    return mesh


def _both_axes(mesh: Mesh) -> Mesh:
    """With axes (data, cyclic)."""
    if STAGE in mesh.axis_names and CYCLIC not in mesh.axis_names:
        mesh = Mesh(mesh.devices, tuple(CYCLIC if name == STAGE else name for name in mesh.axis_names))
    if CYCLIC not in mesh.axis_names or not set(mesh.axis_names) <= {DATA, CYCLIC}:
        raise ValueError(f"mesh axes are {mesh.axis_names}: expected ('cyclic',) or ('data', 'cyclic')")
    if mesh.axis_names == (CYCLIC,):
        return Mesh(mesh.devices[None], (DATA, CYCLIC))
    return Mesh(mesh.devices.T if mesh.axis_names == (CYCLIC, DATA) else mesh.devices, (DATA, CYCLIC))
