"""Small float64 problems with everything that can go wrong: uneven stages, statistics, dropout, changing labels."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import cyclic_jax as cj

INPUT, CLASSES = 3, 4


def linear(index: int, width: int, activation: bool = True) -> cj.Layer:
    def init(key: jax.Array, x: Any) -> tuple[Any, Any]:
        w = jax.random.normal(key, (x.shape[-1], width)) / np.sqrt(x.shape[-1])
        return {"w": w, "b": jnp.zeros(width)}, {}

    def apply(params: Any, state: Any, x: Any, *, key: Any, train: bool) -> tuple[Any, Any]:
        y = x @ params["w"] + params["b"]
        return (jnp.tanh(y) if activation else y), state

    return cj.Layer(f"linear{index}", init, apply)


def batch_norm(index: int) -> cj.Layer:
    def init(key: jax.Array, x: Any) -> tuple[Any, Any]:
        width = x.shape[-1]
        return {"scale": jnp.ones(width)}, {"mean": jnp.zeros(width), "count": jnp.zeros((), jnp.int32)}

    def apply(params: Any, state: Any, x: Any, *, key: Any, train: bool) -> tuple[Any, Any]:
        mean = x.mean(0) if train else state["mean"]
        new = {"mean": 0.9 * state["mean"] + 0.1 * mean, "count": state["count"] + 1} if train else state
        # half the mean: subtracting all of it would leave the bias before it without a gradient, and adam would divide
        # rounding errors by each other
        return (x - 0.5 * mean) * params["scale"], new

    return cj.Layer(f"norm{index}", init, apply)


def dropout(index: int) -> cj.Layer:
    def apply(params: Any, state: Any, x: Any, *, key: Any, train: bool) -> tuple[Any, Any]:
        return (jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0.0) if train else x), state

    return cj.Layer(f"dropout{index}", lambda key, x: ({}, {}), apply)


def model(num_stages: int, rows: int = 2) -> cj.StagedModel:
    """Stage j is j % 2 + 1 linear layers of growing width, a norm and a dropout: no two stages are alike."""
    layers, boundaries = [], []
    for j in range(num_stages):
        last = j == num_stages - 1
        stage = [linear(j, 3 + j % 3) for _ in range(j % 2 + 1)] + [batch_norm(j), dropout(j)]
        stage += [linear(j, CLASSES, activation=False)] if last else []
        boundaries.append((len(layers), len(layers) + len(stage)))
        layers += stage
    example = jax.ShapeDtypeStruct((rows, INPUT), jnp.float64)
    return cj.partition(layers, num_stages, example=example, boundaries=boundaries)


def loss(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()


def batch(step: int, num_workers: int, rows: int = 2, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng((seed, step))
    return rng.normal(size=(num_workers * rows, INPUT)), rng.integers(0, CLASSES, num_workers * rows)


DROP = optax.piecewise_constant_schedule(0.2, {3: 0.1})
OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "sgd": optax.sgd(DROP, momentum=0.9),
    "adamw": optax.adamw(1e-2, weight_decay=1e-2),
    "clip": optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(DROP, momentum=0.9)),
}


def fresh_start(staged: cj.StagedModel, optimizer: str, num_workers: int, seed: int = 0) -> cj.TrainState:
    return cj.TrainState.create(staged, OPTIMIZERS[optimizer], jax.random.key(seed), num_workers=num_workers)


def restart(staged: cj.StagedModel, optimizer: str, num_workers: int, seed: int = 0) -> cj.TrainState:
    """A state at step 2 whose two versions differ on every leaf, as no fresh start has it."""
    state = fresh_start(staged, optimizer, num_workers, seed)
    step = reference(staged.num_stages, num_workers, optimizer)
    for t in range(2):
        state, _ = step(np.zeros((num_workers, staged.num_stages), bool), state, batch(t, num_workers, seed=seed + 1))
    noise = np.random.default_rng(seed)
    previous = jax.tree.map(lambda p: p + 0.05 * noise.normal(size=p.shape), state.params)
    return jax.tree.map(lambda x: x, cj.TrainState(**{**vars(state), "previous_params": previous}))


@functools.cache
def reference(num_stages: int, num_workers: int, optimizer: str) -> Callable[..., Any]:
    """The reference step with the mask as data, compiled once per shape and optimizer."""
    staged = model(num_stages)
    return jax.jit(functools.partial(cj.reference_step, staged, loss, OPTIMIZERS[optimizer]))


def distance(a: Any, b: Any) -> float:
    """Largest difference of any leaf, relative to the largest entry of the two leaves (or 1e-3, whichever is more)."""
    assert jax.tree.structure(a) == jax.tree.structure(b)

    def one(x: Any, y: Any) -> float:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        return float(np.max(np.abs(x - y) / max(1e-3, np.abs(x).max(initial=0), np.abs(y).max(initial=0)), initial=0))

    # NumPy's maximum, unlike Python's, never loses a NaN
    return float(np.max([one(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)], initial=0.0))
