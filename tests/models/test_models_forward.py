"""Models run forward: precision, statistics, residual paths, and shapes the sizes do not divide."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import cyclic_jax as cj
from cyclic_jax.models.attention import TransformerBlock
from cyclic_jax.models.mlp import Block as MLPBlock
from cyclic_jax.models.resnet import Block, Stem, basic_convs, bottleneck_convs
from cyclic_jax.stages import check_layers

models = cj.models
DTYPES: dict[str, Any] = {"dtype": None, "param_dtype": jnp.float32}


def forward(layers: tuple[cj.Layer, ...], x: jax.Array, train: bool) -> tuple[jax.Array, list[Any], list[Any]]:
    """Output, and the model state before and after, layer by layer."""
    before, after = [], []
    for layer in layers:
        params, state = layer.init(jax.random.key(0), x)
        x, new = layer.apply(params, state, x, key=jax.random.key(1), train=train)
        before.append(state)
        after.append(new)
    return x, before, after


def dtypes(tree: Any) -> set[Any]:
    return {leaf.dtype for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("name", "options"),
    [("tiny_resnet", {"width": 4}), ("residual_mlp", {"depth": 1, "batch_norm": True, "dropout": 0.5})],
)
def test_double_precision_holds_in_a_run(name, options, train):
    with jax.enable_x64(True):
        layers = models.build(name, num_classes=3, image_shape=(8, 8, 1), param_dtype=jnp.float64, **options)
        x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8, 1)))
        y, before, after = forward(layers, x, train)
        assert dtypes((y, before, after)) == {jnp.dtype("float64")}
        assert y.shape == (2, 3)
        moved = [not np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (before, after)), strict=True)]
        assert all(moved) if train else not any(moved)


def test_low_precision_run_keeps_statistics():
    layers = models.tiny_resnet(3, in_channels=1, width=4, dtype=jnp.bfloat16)[:2]
    y, _, after = forward(layers, jnp.ones((2, 8, 8, 1), jnp.bfloat16), train=True)
    assert y.dtype == jnp.bfloat16
    assert dtypes(after) == {jnp.dtype("float32")}


@pytest.mark.parametrize("batch_norm", [False, True])
def test_mlp_block_adds_its_input(batch_norm):
    block = MLPBlock(4, batch_norm, 0.0, rngs=nnx.Rngs(0), **DTYPES)
    x = jax.random.normal(jax.random.key(0), (3, 4))
    assert not np.allclose(block(x), x)
    block.down.kernel[...] = jnp.zeros((4, 4))
    np.testing.assert_array_equal(block(x), x)


def test_encoder_block_adds_its_input_twice():
    """With either branch silent the other still acts; with both, the input is the output."""
    block = TransformerBlock(8, 2, 16, 0.0, rngs=nnx.Rngs(0), **DTYPES)
    x = jax.random.normal(jax.random.key(0), (2, 3, 8))
    whole = block(x)
    attention, mlp = block.attention.out.kernel, block.down.kernel
    kept = attention[...]
    attention[...] = jnp.zeros_like(kept)
    without_attention = block(x)
    mlp[...] = jnp.zeros_like(mlp[...])
    np.testing.assert_array_equal(block(x), x)
    attention[...] = kept
    without_mlp = block(x)
    outputs = [whole, without_attention, without_mlp, x]
    assert not any(np.allclose(a, b) for i, a in enumerate(outputs) for b in outputs[:i])


def test_bottleneck_strides_in_its_wide_convolution():
    block = Block(bottleneck_convs(8, 4, 2), rngs=nnx.Rngs(0), **DTYPES)
    assert [(conv.conv.kernel_size[0], conv.conv.strides) for conv in block.convs] == [(1, 1), (3, 2), (1, 1)]


def test_strided_block_against_lax():
    """The whole block in evaluation, where BatchNorm divides by sqrt(1 + epsilon), with padding of one on every side."""
    block = Block(basic_convs(2, 4, 2), rngs=nnx.Rngs(0), **DTYPES)
    block.eval()
    x = jax.random.normal(jax.random.key(0), (2, 6, 6, 2))

    def conv_norm(x: jax.Array, module: Any, stride: int, pad: int) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        kernel = module.conv.kernel[...]
        y = jax.lax.conv_general_dilated(x, kernel, (stride, stride), [(pad, pad)] * 2, dimension_numbers=numbers)
        return y / jnp.sqrt(1 + 1e-5)

    branch = conv_norm(jnp.maximum(conv_norm(x, block.convs[0], 2, 1), 0), block.convs[1], 1, 1)
    want = jnp.maximum(branch + conv_norm(x, block.shortcut, 2, 0), 0)
    np.testing.assert_allclose(block(x), want, rtol=1e-5, atol=1e-5)


def test_max_pool_against_windows_written_out():
    """Output (y, x) is the largest of the 3×3 window centred on (2y, 2x)."""
    stem = Stem(1, 2, False, rngs=nnx.Rngs(0), **DTYPES)
    stem.eval()
    image = jax.random.normal(jax.random.key(0), (1, 12, 12, 1))
    inner = np.asarray(nnx.relu(stem.conv(image)))
    assert inner.shape == (1, 6, 6, 2)
    padded = np.pad(inner, [(0, 0), (1, 1), (1, 1), (0, 0)], constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    np.testing.assert_allclose(stem(image), windows[:, ::2, ::2].max(axis=(-1, -2)), rtol=1e-6)


@pytest.mark.parametrize(("size", "inner"), [(33, 5), (65, 3), (225, 8)])
def test_odd_images_round_up(size, inner):
    """Each step gives floor((n + 2 pad - kernel) / stride) + 1 pixels."""
    layers = models.build("resnet18", num_classes=3, image_shape=(size, size, 3))
    structs = check_layers(layers, jax.ShapeDtypeStruct((2, size, size, 3), jnp.float32))
    assert structs[-2].shape == (2, inner, inner, 512)


@pytest.mark.parametrize("shape", [(4, 4), (3, 3), (8, 4), (16, 16)])
def test_transformer_refuses_other_image_sizes(shape):
    """Below one patch (3×3) only the class token is left, which would broadcast to every position."""
    embedding = models.vit(3, image_size=8, patch=4, width=8, depth=1, heads=2, hidden=16)[0]
    with pytest.raises(ValueError, match=rf"images are {shape[0]}x{shape[1]}, but the positions are those of 8x8"):
        forward((embedding,), jnp.zeros((2, *shape, 3)), train=False)


def test_build_refuses_oblong_images_for_transformers():
    with pytest.raises(ValueError, match="needs square images"):
        models.build("vit_b16", num_classes=3, image_shape=(224, 112, 3))
