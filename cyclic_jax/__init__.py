"""Cyclic Data Parallelism in JAX (Fournier & Oyallon, arXiv 2403.08837)."""

from cyclic_jax import models
from cyclic_jax.delay import DelayByStageState, delay_by_stage
from cyclic_jax.executors import Executor, make_executor
from cyclic_jax.partition import partition
from cyclic_jax.processes import global_batch, local_rows, read_metrics
from cyclic_jax.reference import reference_step
from cyclic_jax.rules import UpdateRule
from cyclic_jax.schedule import Op, Schedule
from cyclic_jax.simulation import simulate_devices
from cyclic_jax.stages import Layer, StagedModel, from_functions, from_linen, from_nnx
from cyclic_jax.state import Metrics, Snapshot, TrainState

__version__ = "0.1.0"

__all__ = [
    "DelayByStageState",
    "Executor",
    "Layer",
    "Metrics",
    "Op",
    "Schedule",
    "Snapshot",
    "StagedModel",
    "TrainState",
    "UpdateRule",
    "delay_by_stage",
    "from_functions",
    "from_linen",
    "from_nnx",
    "global_batch",
    "local_rows",
    "make_executor",
    "models",
    "partition",
    "read_metrics",
    "reference_step",
    "simulate_devices",
]
