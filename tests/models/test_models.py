"""Models: known parameter counts, shapes, precision, and the arithmetic of their blocks."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import cyclic_jax as cj
from cyclic_jax.models.attention import TransformerBlock
from cyclic_jax.models.resnet import Block, ConvNorm, basic_convs, bottleneck_convs
from cyclic_jax.stages import check_layers

models = cj.models
DTYPES: dict[str, Any] = {"dtype": None, "param_dtype": jnp.float32}


def count(layers: tuple[cj.Layer, ...], image_shape: tuple[int, ...]) -> int:
    """Parameters, by shapes alone."""
    key, structs = jax.random.key(0), check_layers(layers, jax.ShapeDtypeStruct((2, *image_shape), jnp.float32))
    params = [jax.eval_shape(layer.init, key, x)[0] for layer, x in zip(layers, structs[:-1], strict=True)]
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("layers", "image_shape", "parameters"),
    [
        (models.resnet18(1000), (64, 64, 3), 11_689_512),
        (models.resnet50(1000), (64, 64, 3), 25_557_032),
        (models.vit_b16(1000), (224, 224, 3), 86_567_656),
        (models.resnet18(10, small_images=True), (32, 32, 3), 11_173_962),
        (models.resnet50(10, small_images=True), (32, 32, 3), 23_520_842),
    ],
    ids=["resnet18", "resnet50", "vit_b16", "resnet18-cifar", "resnet50-cifar"],
)
def test_known_parameter_counts(layers, image_shape, parameters):
    assert count(layers, image_shape) == parameters


@pytest.mark.parametrize(
    ("name", "image_shape", "inner"),
    [
        ("resnet18", (224, 224, 3), (2, 7, 7, 512)),
        ("resnet18", (32, 32, 3), (2, 4, 4, 512)),
        ("resnet50", (32, 32, 3), (2, 4, 4, 2048)),
        ("tiny_resnet", (8, 8, 1), (2, 2, 2, 64)),
        ("tiny_resnet", (28, 28, 1), (2, 7, 7, 64)),
        ("residual_mlp", (8, 8, 1), (2, 64)),
        ("vit_b16", (224, 224, 3), (2, 197, 768)),
    ],
)
def test_shapes(name, image_shape, inner):
    layers = models.build(name, num_classes=7, image_shape=image_shape)
    structs = check_layers(layers, jax.ShapeDtypeStruct((2, *image_shape), jnp.float32))
    assert structs[-2].shape == inner
    assert structs[-1].shape == (2, 7)


@pytest.mark.parametrize(("name", "options"), [("tiny_resnet", {}), ("residual_mlp", {"batch_norm": True})])
def test_double_precision_stays(name, options):
    with jax.enable_x64(True):
        layers = models.build(name, num_classes=3, image_shape=(8, 8, 1), param_dtype=jnp.float64, **options)
        structs = check_layers(layers, jax.ShapeDtypeStruct((2, 8, 8, 1), jnp.float64))
        assert {leaf.dtype for leaf in structs} == {jnp.dtype("float64")}


def test_low_precision_compute_keeps_parameters_and_statistics():
    layers = models.tiny_resnet(3, in_channels=1, dtype=jnp.bfloat16)
    structs = check_layers(layers, jax.ShapeDtypeStruct((2, 8, 8, 1), jnp.bfloat16))
    assert {leaf.dtype for leaf in structs} == {jnp.dtype(jnp.bfloat16)}
    params, state = jax.eval_shape(layers[0].init, jax.random.key(0), structs[0])
    assert {leaf.dtype for leaf in jax.tree.leaves((params, state))} == {jnp.dtype("float32")}


@pytest.mark.parametrize(("size", "stride"), [(1, 1), (1, 2), (3, 1), (3, 2), (7, 2)])
def test_convolutions_pad_both_sides_alike(size, stride):
    """Against sums written out: output (y, x) sees the window centred on (stride·y, stride·x)."""
    module, image = (
        ConvNorm(2, 3, size, stride, rngs=nnx.Rngs(0), **DTYPES),
        np.random.default_rng(0).normal(size=(1, 8, 8, 2)),
    )
    kernel, half = np.asarray(module.conv.kernel[...]), size // 2
    padded = np.pad(image, [(0, 0), (half, half), (half, half), (0, 0)])
    want = np.zeros((1, 8 // stride, 8 // stride, 3))
    for y, x in itertools.product(range(8 // stride), repeat=2):
        window = padded[0, stride * y : stride * y + size, stride * x : stride * x + size]
        want[0, y, x] = np.einsum("ijc,ijco->o", window, kernel)
    np.testing.assert_allclose(module.conv(jnp.asarray(image, jnp.float32)), want, atol=1e-4)


@pytest.mark.parametrize("convs", [basic_convs(4, 4, 1), basic_convs(4, 8, 2), bottleneck_convs(16, 4, 1)])
def test_blocks_add_their_input(convs):
    block = Block(convs, rngs=nnx.Rngs(0), **DTYPES)
    x = jax.random.normal(jax.random.key(0), (2, 4, 4, convs[0][0]))
    block.eval()
    whole = block(x)
    block.convs[-1].norm.scale[...] = jnp.zeros_like(block.convs[-1].norm.scale[...])
    shortcut = x if block.shortcut is None else block.shortcut(x)
    assert (block.shortcut is None) == (convs[0][0] == convs[-1][1] and max(c[3] for c in convs) == 1)
    np.testing.assert_allclose(block(x), nnx.relu(shortcut), atol=1e-6)
    assert not np.allclose(whole, block(x))


def test_attention_does_not_know_the_order_of_tokens():
    block = TransformerBlock(8, 2, 16, 0.0, rngs=nnx.Rngs(0), **DTYPES)
    block.eval()
    x = jax.random.normal(jax.random.key(0), (2, 5, 8))
    order = jnp.array([3, 0, 4, 1, 2])
    np.testing.assert_allclose(block(x[:, order]), block(x)[:, order], atol=1e-5)
    other = x.at[:, 0, 0].add(3.0)  # not all of the token: the norm would take that out
    assert not np.allclose(block(other)[:, 1], block(x)[:, 1])


def test_positions_make_a_transformer_see_the_order():
    layers = models.vit(3, image_size=8, patch=4, width=8, depth=1, heads=2, hidden=16, in_channels=1)
    model = cj.partition(layers, 1, example=jnp.zeros((1, 8, 8, 1)), by="layers")
    params, state = model.init(jax.random.key(0))
    image = jax.random.normal(jax.random.key(1), (1, 8, 8, 1))
    swapped = jnp.concatenate([image[:, 4:], image[:, :4]], axis=1)
    outputs = [model.apply(params, state, x, train=False)[0] for x in (image, swapped)]
    assert not np.allclose(*outputs)


def test_refused():
    with pytest.raises(ValueError, match="unknown model 'resnet19': did you mean 'resnet18'"):
        models.build("resnet19", num_classes=10, image_shape=(8, 8, 1))
    with pytest.raises(ValueError, match="patch=16 must divide image_size=100"):
        models.vit_b16(10, image_size=100)
