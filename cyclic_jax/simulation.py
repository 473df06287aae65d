"""Simulated devices: the one place that sets their number, for the tests and for the experiments.

XLA's CPU client sizes its thread pool by the number of cores. With more simulated devices than cores, un-blocked steps
can wait for each other for ever and abort; a larger ``NPROC`` in the environment gives every device a thread.
"""

import os

import jax


def simulate_devices(count: int) -> None:
    """Let the CPU platform show ``count`` devices. Does nothing to GPUs and TPUs.

    Call it before jax starts its backend (before the first array or ``jax.devices()``).

    Args:
        count: number of CPU devices, at least 1.

    Raises:
        ValueError: if ``count`` is below 1.
        RuntimeError: if the backend has already started with another number of CPU devices.
    """
    if count < 1:
        raise ValueError(f"cannot simulate {count} devices: at least 1 is needed")
    os.environ.setdefault("NPROC", str(max(32, 4 * count)))
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        have = len(jax.devices("cpu"))
        if have != count:
            raise RuntimeError(
                f"{count} simulated devices were asked for, but jax has already started with {have}: "
                "call simulate_devices before anything touches a jax array"
            ) from error
