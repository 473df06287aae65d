"""The guard and the payload, the two small parts that every staggered executor stands on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from cyclic_jax.executors.guard import when
from cyclic_jax.executors.payload import PayloadFormat


@pytest.mark.parametrize("yes", [False, True])
def test_a_body_runs_or_does_not(yes):
    memory = {"a": jnp.arange(3.0), "b": jnp.ones(())}
    after = jax.jit(lambda m, p: when(p, lambda m: {**m, "a": m["a"] + m["b"]}, m, ["a"]))(memory, jnp.bool_(yes))
    np.testing.assert_array_equal(after["a"], np.arange(3.0) + yes)
    assert after.keys() == memory.keys()


def test_only_named_buffers_change():
    memory = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    after = when(jnp.bool_(True), lambda m: {"a": m["a"] + 1, "b": m["b"] + 1}, memory, ["a"])
    assert (float(after["a"]), float(after["b"])) == (1.0, 0.0)


def test_a_guarded_reduction_over_data_leaves_other_columns_out():
    """As worker N−1 does it: the predicate is the same for all that reduce; NaN elsewhere reaches nobody."""
    mesh = Mesh(np.asarray(jax.devices()[:6]).reshape(2, 3), ("data", "cyclic"))
    spec = PartitionSpec(("data", "cyclic"))

    def body(x):
        last = jax.lax.axis_index("cyclic") == 2
        return when(last, lambda m: {"x": jax.lax.pmean(m["x"], "data")}, {"x": x}, ["x"])["x"]

    x = jnp.array([jnp.nan, 1.0, 2.0, 3.0, jnp.nan, 6.0])
    got = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(x)
    np.testing.assert_array_equal(got, [np.nan, 1, 4, 3, np.nan, 4])


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(["float32", "bfloat16"]), st.integers(1, 4)), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    )
)
def test_payloads_hold_any_stage_without_mixing_dtypes(stages):
    structs = tuple([jax.ShapeDtypeStruct((size, 2), dtype) for dtype, size in stage] for stage in stages)
    form, rng = PayloadFormat(structs), np.random.default_rng(0)
    for j, stage in enumerate(structs):
        tree = [jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype) for leaf in stage]
        payload = form.write(form.flatten(j, tree), form.full(np.nan))
        assert {name: vector.size for name, vector in payload.items()} == form.sizes
        for a, b in zip(tree, form.unpack(j, payload), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    assert form.num_bytes >= max(form.stage_bytes(j) for j in range(len(structs)))


def test_a_payload_is_as_large_as_the_largest_stage():
    structs = ([jax.ShapeDtypeStruct((3,), "float32")], [jax.ShapeDtypeStruct((5,), "float32")])
    assert PayloadFormat(structs).num_bytes == 20
    assert PayloadFormat(structs).stage_bytes(0) == 12
