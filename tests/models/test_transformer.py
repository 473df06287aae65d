"""The causal transformer: what may depend on what, parameter counts, shapes, precision, refusals."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import cyclic_jax as cj
from cyclic_jax.models.attention import TransformerBlock
from cyclic_jax.models.resnet import _make
from cyclic_jax.stages import check_layers

V, T, W, HEADS = 11, 6, 8, 2
SIZES: dict[str, Any] = {"context": T, "width": W, "depth": 2, "heads": HEADS}


def dependence(layers: tuple[cj.Layer, ...]) -> np.ndarray:
    """Bool ``[T, T]``: (s, t) whether another token at s changes the output at t, to the last bit."""
    model = cj.partition(layers, 1, by="layers", example=jax.ShapeDtypeStruct((1, T), jnp.int32))
    params, state = model.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (1, T), 0, V)
    changed = (tokens + jnp.eye(T, dtype=jnp.int32)) % V  # row s has another token at s
    outputs = jax.jit(lambda x: model.apply(params, state, x, train=False)[0])(jnp.concatenate([tokens, changed]))
    return np.asarray((outputs[1:] != outputs[:1]).any(-1))


def test_outputs_depend_on_the_tokens_up_to_theirs_and_on_all_of_those():
    assert (dependence(cj.models.causal_transformer(V, **SIZES)) == np.triu(np.ones((T, T), bool))).all()


def with_mask(monkeypatch: pytest.MonkeyPatch, mask: np.ndarray) -> np.ndarray:
    monkeypatch.setattr("cyclic_jax.models.attention.causal_mask", lambda tokens: jnp.asarray(mask)[None, None])
    return dependence(cj.models.causal_transformer(V, **SIZES))


@pytest.mark.parametrize("later", [1, T])
def test_a_mask_that_lets_later_tokens_through_would_be_seen(monkeypatch, later):
    assert np.tril(with_mask(monkeypatch, np.tril(np.ones((T, T), bool), later)), -1).any()


def test_a_mask_that_hides_too_much_would_be_seen(monkeypatch):
    assert not np.triu(with_mask(monkeypatch, np.eye(T, dtype=bool)), 1).any()


def test_a_block_without_mask_would_be_seen():
    layers = cj.models.causal_transformer(V, **SIZES)
    dtypes = {"dtype": None, "param_dtype": jnp.float32}
    block = cj.from_nnx([partial(_make, TransformerBlock, W, HEADS, 4 * W, 0.0, **dtypes)])
    assert dependence((layers[0], *block, layers[-1])).all()


def test_positions_are_seen():
    """Without them one block would not know the order of the earlier tokens (two would, from the mask)."""
    layers = cj.models.causal_transformer(V, **{**SIZES, "depth": 1})
    model = cj.partition(layers, 1, by="layers", example=jax.ShapeDtypeStruct((1, T), jnp.int32))
    params, state = model.init(jax.random.key(0))
    x = jnp.array([[1, 2, 3, 4, 5, 6], [2, 1, 3, 4, 5, 6]])

    def last(params: Any) -> jax.Array:
        return model.apply(params, state, x, train=False)[0][:, -1]

    first, swapped = last(params)
    assert not np.allclose(first, swapped, rtol=1e-4, atol=0)
    first, swapped = last(jax.tree.map_with_path(zero_position, params))
    np.testing.assert_allclose(first, swapped, rtol=1e-4)


def zero_position(path: Any, leaf: jax.Array) -> jax.Array:
    return jnp.zeros_like(leaf) if "position" in jax.tree_util.keystr(path) else leaf


def test_the_head_normalises():
    head = cj.models.causal_transformer(V, **SIZES)[-1]
    x = jax.random.normal(jax.random.key(0), (2, T, W))
    params, state = head.init(jax.random.key(1), x)
    once, scaled = (head.apply(params, state, factor * x, key=None, train=False)[0] for factor in (1.0, 3.0))
    np.testing.assert_allclose(once, scaled, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("hidden", "H"), [(None, 4 * W), (12, 12)])
def test_parameter_count(hidden, H):
    layers = cj.models.causal_transformer(V, hidden=hidden, **SIZES)
    structs = check_layers(layers, jax.ShapeDtypeStruct((3, T), jnp.int32))
    sizes = [
        sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(layer.init, jax.random.key(0), x)[0]))
        for layer, x in zip(layers, structs[:-1], strict=True)
    ]
    block = 4 * W * W + 4 * W + (W * H + H) + (H * W + W) + 4 * W  # attention, MLP, two norms
    assert block == 4 * W**2 + 2 * W * H + H + 9 * W
    assert sizes == [V * W + T * W, block, block, W * V + V + 2 * W]


@pytest.mark.parametrize("length", [1, T])
def test_shapes_and_blocks_alike(length):
    layers = cj.models.causal_transformer(V, **SIZES)
    structs = check_layers(layers, jax.ShapeDtypeStruct((3, length), jnp.int32))
    assert [s.shape for s in structs] == [(3, length), *[(3, length, W)] * 3, (3, length, V)]
    blocks = [jax.eval_shape(layer.init, jax.random.key(0), structs[1]) for layer in layers[1:-1]]
    assert blocks[0] == blocks[1]


def test_it_starts_near_the_uniform_prediction():
    layers = cj.models.causal_transformer(V, **SIZES)
    model = cj.partition(layers, 1, by="layers", example=jax.ShapeDtypeStruct((1, T), jnp.int32))
    params, state = model.init(jax.random.key(0))
    logits, _ = model.apply(params, state, jnp.arange(T)[None], train=False)
    np.testing.assert_allclose(jax.nn.softmax(logits), 1 / V, rtol=0.3)


def test_low_precision_compute_keeps_float32_parameters():
    layers = cj.models.causal_transformer(V, dtype=jnp.bfloat16, **SIZES)
    structs = check_layers(layers, jax.ShapeDtypeStruct((3, T), jnp.int32))
    assert {s.dtype for s in structs[1:]} == {jnp.dtype(jnp.bfloat16)}
    for layer, x in zip(layers, structs[:-1], strict=True):
        params, _ = jax.eval_shape(layer.init, jax.random.key(0), x)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_double_precision_stays():
    with jax.enable_x64(True):
        layers = cj.models.causal_transformer(V, param_dtype=jnp.float64, **SIZES)
        structs = check_layers(layers, jax.ShapeDtypeStruct((3, T), jnp.int32))
        assert {s.dtype for s in structs[1:]} == {jnp.dtype("float64")}


def test_dropout_acts_in_training_only():
    layers = cj.models.causal_transformer(V, dropout=0.5, **SIZES)
    model = cj.partition(layers, 1, by="layers", example=jax.ShapeDtypeStruct((1, T), jnp.int32))
    params, state = model.init(jax.random.key(0))
    x = jnp.arange(T)[None]
    train = [model.apply(params, state, x, key=jax.random.key(k), train=True)[0] for k in (0, 0, 1)]
    assert (train[0] == train[1]).all()
    assert not np.allclose(train[0], train[2])
    still = [model.apply(params, state, x, train=False)[0] for _ in range(2)]
    assert (still[0] == still[1]).all()
    assert not np.allclose(still[0], train[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocabulary": 0}, "vocabulary=0: it must be at least 1"),
        ({"context": 0}, "context=0"),
        ({"width": 0}, "width=0"),
        ({"depth": 0}, "depth=0"),
        ({"heads": 0}, "heads=0: it must be at least 1"),
        ({"hidden": 0}, "hidden=0"),
        ({"heads": 3}, "heads=3 must divide width=8"),
        ({"dropout": 1.0}, r"dropout=1.0: it must lie in \[0, 1\)"),
        ({"dropout": -0.1}, "dropout=-0.1"),
        ({"dropout": float("nan")}, "dropout=nan"),
    ],
)
def test_refused_sizes(change, message):
    with pytest.raises(ValueError, match=message):
        cj.models.causal_transformer(**{"vocabulary": V, **SIZES, **change})


@pytest.mark.parametrize(
    ("struct", "message"),
    [
        (jax.ShapeDtypeStruct((2, T + 1), jnp.int32), "7 tokens, but there are only context=6 positions"),
        (jax.ShapeDtypeStruct((2, T), jnp.float32), r"tokens are integers \[B, T\], not float32 \[2, 6\]"),
        (jax.ShapeDtypeStruct((T,), jnp.int32), r"not int32 \[6\]"),
    ],
)
def test_refused_inputs(struct, message):
    layers = cj.models.causal_transformer(V, **SIZES)
    with pytest.raises(ValueError, match=message):
        cj.partition(layers, 1, by="layers", example=struct)


def test_a_tied_head_would_be_refused():
    """Why the head has a matrix of its own."""
    tokens = nnx.Embed(V, W, rngs=nnx.Rngs(0))
    head = nnx.Linear(W, V, use_bias=False, rngs=nnx.Rngs(0))
    head.kernel = tokens.embedding
    with pytest.raises(ValueError, match="shared by two layers"):
        cj.from_nnx([("embedding", tokens), ("head", head)])
