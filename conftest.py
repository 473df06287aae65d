"""Test sessions run on ten simulated devices (model parallelism with N = 4 needs them), set before jax starts."""

import os
from collections.abc import Iterator

import hypothesis
import jax
import pytest

from cyclic_jax.simulation import simulate_devices

# most of the time goes into compiling tiny programs: let the last, machine-level stage of it be quick
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
simulate_devices(10)
hypothesis.settings.register_profile("default", deadline=None, max_examples=30, derandomize=True)
hypothesis.settings.load_profile("default")


@pytest.fixture(scope="module")
def float64() -> Iterator[None]:
    """Double precision for a module that proves equality."""
    with jax.enable_x64(True):
        yield
