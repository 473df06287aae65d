"""What each layer costs: parameters, flops from the compiler's own cost analysis, bytes of its output."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from cyclic_jax.executors.payload import PayloadFormat
from cyclic_jax.stages.layer import Layer
from cyclic_jax.stages.staged import StagedModel, Struct


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs for the example micro-batch."""

    params: int  # number of parameters
    flops: float  # of one forward pass, by the compiler's cost analysis
    activation_bytes: int  # of the layer's output


def layer_costs(layers: Sequence[Layer], structs: Sequence[Struct]) -> tuple[LayerCost, ...]:
    """Parameters, forward flops and output bytes of each layer; nothing is executed."""
    return tuple(_layer_cost(layer, x, y) for layer, x, y in zip(layers, structs[:-1], structs[1:], strict=True))


def _layer_cost(layer: Layer, x: Struct, y: Struct) -> LayerCost:
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, state = jax.eval_shape(layer.init, key, x)
    lowered = jax.jit(lambda p, s, x, k: layer.apply(p, s, x, key=k, train=True)).lower(params, state, x, key)
    analysis = lowered.cost_analysis() or {}
    return LayerCost(
        params=sum(leaf.size for leaf in jax.tree.leaves(params)),
        flops=max(0.0, float(analysis.get("flops", 0.0))),
        activation_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(y)),
    )


def describe(model: StagedModel) -> str:
    """Each stage's layers, parameters, forward flops and activation bytes for the example micro-batch, as a table, and what the
    partition costs a ring.

    Activation bytes are the outputs of the stage's layers; what a backward pass really keeps depends on the compiler. Where
    parameters or gradients travel (``replicated``, ``zero``), every message is as large as the largest stage.
    """
    costs = layer_costs(model.layers, model.structs)
    rows = [("stage", "layers", "parameters", "MFLOP", "activation KiB", "names")]
    for stage, (start, stop) in zip(model.stages, model.boundaries, strict=True):
        part = costs[start:stop]
        rows.append(
            (
                str(stage.index),
                f"{start}-{stop - 1}",
                f"{sum(c.params for c in part):,}",
                f"{sum(c.flops for c in part) / 1e6:,.2f}",
                f"{sum(c.activation_bytes for c in part) / 1024:,.1f}",
                ", ".join(layer.name for layer in stage.layers),
            )
        )
    widths = [max(len(row[c]) for row in rows) for c in range(5)]
    table = "\n".join("  ".join([*(row[c].rjust(widths[c]) for c in range(5)), row[5]]) for row in rows)
    return f"{table}\n{_ring_cost(model)}"


def _ring_cost(model: StagedModel) -> str:
    payload = PayloadFormat(jax.eval_shape(model.init, jax.random.key(0))[0])
    total = sum(payload.stage_bytes(j) for j in range(model.num_stages))
    factor = f" ({model.num_stages * payload.num_bytes / total:.2f} times the parameters in all)" if total else ""
    return f"messages of parameters or gradients are padded to {payload.num_bytes / 1024:,.1f} KiB each{factor}"
