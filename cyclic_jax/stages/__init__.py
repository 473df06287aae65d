"""Layers, stages and the adapters that make layers of Flax NNX modules, Flax Linen modules and plain functions."""

from cyclic_jax.stages.layer import Layer, from_functions
from cyclic_jax.stages.linen_layers import from_linen
from cyclic_jax.stages.nnx_layers import from_nnx
from cyclic_jax.stages.staged import Stage, StagedModel, check_layers, worker_key

__all__ = [
    "Layer",
    "Stage",
    "StagedModel",
    "check_layers",
    "from_functions",
    "from_linen",
    "from_nnx",
    "worker_key",
]
