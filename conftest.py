"""Test sessions run on ten simulated devices (model parallelism with N = 4 needs them), set before jax starts."""

import gc
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

from cyclic_jax.simulation import simulate_devices
from tests.quick_compile import compile_quickly

compile_quickly()
simulate_devices(10)
hypothesis.settings.register_profile("default", deadline=None, max_examples=30, derandomize=True)
hypothesis.settings.load_profile("default")


@pytest.fixture(scope="module")
def float64() -> Iterator[None]:
    """Double precision for a module that proves equality."""
    with jax.enable_x64(True):
        yield


MAPPINGS = Path("/proc/self/maps")
MANY = 30_000  # of the 65,530 that Linux allows a process by default; a compiler that gets no more ends the process


@pytest.fixture(autouse=True)
def _few_memory_mappings() -> Iterator[None]:
    """Every compiled program holds memory mappings: forget the programs of earlier tests before there are too many."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MANY:
        jax.clear_caches()
        gc.collect()
