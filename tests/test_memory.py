"""Residual bytes against hand counts, curves against closed forms, and predictions against the compiler."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cyclic_jax as cj
from cyclic_jax import memory
from cyclic_jax.executors.interleaved import InterleavedExecutor
from cyclic_jax.executors.interleaved_memory import held_by_turn, predicted_bytes
from cyclic_jax.executors.same_values import same_values
from cyclic_jax.executors.stage_op import Inputs, StageOp
from cyclic_jax.executors.turns import turns

WIDTH = 32


def init(key, x):
    return jax.random.normal(key, (x.shape[-1], x.shape[-1])) / x.shape[-1]


def block(params, x):
    """Keeps x and a cosine: two arrays of its input's size."""
    return x + jnp.sin(x @ params)


def stack(apply, layers: int, stages: int, rows: int = 4, width: int = WIDTH) -> cj.StagedModel:
    example = jax.ShapeDtypeStruct((rows, width), np.float32)
    return cj.partition(cj.from_functions([(init, apply)] * layers), stages, example=example, by="layers")


# ---- residuals ----------------------------------------------------------------------------------------------


def test_a_hand_count():
    unit = 4 * WIDTH * 4
    assert memory.stage_bytes(stack(block, 4, 2)) == (4 * unit, 4 * unit)
    # a linear layer keeps its input alone, and the first one's is the batch
    assert memory.stage_bytes(stack(lambda p, x: x @ p, 3, 3)) == (unit, unit, unit)
    assert memory.stage_bytes(stack(lambda p, x: x + 1, 2, 2)) == (0, 0)


def test_what_is_kept_twice_is_counted_once_and_the_backward_still_right():
    def pair(p, x):
        a, b = jax.jit(lambda h: (jnp.exp(h),) * 2)(x @ p)
        return a * b * jnp.sin(b)

    model = stack(pair, 2, 2)
    op, x = StageOp(model.stages[1], None), jnp.arange(4.0 * WIDTH).reshape(4, WIDTH) / 100
    params, (_, state) = model.init(jax.random.key(0))
    inputs = Inputs(x, state, jax.random.key(0), None)
    op.trace(params[1], inputs)
    y, _, residuals = op.forward(params[1], inputs)
    kept = {np.asarray(leaf).tobytes() for leaf in residuals}
    assert len(kept) == len(residuals) == 5  # x, exp, its square, sine and cosine: exp is there for a and for b
    want_y, vjp = jax.vjp(lambda p, x: model.stages[1].apply(p, state, x)[0], params[1], x)
    for got, want in zip(
        jax.tree.leaves((y, op.backward(params[1], residuals, y))), jax.tree.leaves((want_y, vjp(want_y))), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_same_values_are_seen_through_nested_calls():
    @jax.jit
    def f(x, y):
        z = jnp.sin(x)
        return z, z, y, jnp.sin(y)

    inputs, outputs = same_values(jax.make_jaxpr(lambda x, y: (*f(x, y), *f(y, x)))(1.0, 2.0))
    assert outputs[0] == outputs[1]
    assert outputs[2] == inputs[1]
    assert outputs[6] == inputs[0]
    assert len({outputs[0], outputs[3], outputs[4], outputs[7]}) == 4


def test_a_stage_knows_its_input_and_output_among_its_residuals():
    keeps_both = stack(lambda p, x: jnp.exp(x @ p), 2, 2)
    ops = memory.traced_ops(keeps_both)
    assert list(ops[1].input_residuals) == list(ops[1].output_residuals) == [0]
    assert memory.traced_ops(stack(block, 2, 2))[1].output_residuals == {}


def test_weights_are_not_counted_in_low_precision():
    layers = cj.models.residual_mlp(4, in_features=6, width=16, depth=2, dtype=jnp.bfloat16)
    wide, narrow = (jax.ShapeDtypeStruct((rows, 6), np.float32) for rows in (200, 100))
    sizes = [sum(memory.stage_bytes(cj.partition(layers, 2, example=x, by="layers"))) for x in (wide, narrow)]
    assert sizes[0] == 2 * sizes[1]  # nothing but what has rows


def test_layers_are_counted_alone():
    model = stack(block, 4, 2)
    unit = 4 * WIDTH * 4
    assert memory.layer_bytes(model.layers, model.structs) == (2 * unit,) * 4
    with pytest.raises(ValueError, match="a loss needs the structs"):
        memory.stage_bytes(model, lambda y, t: y.mean())


# ---- curves -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_uniform_stages_give_the_exact_ratio(n):
    sizes = memory.stage_bytes(stack(block, n, n))
    found = memory.peaks(cj.Schedule.cyclic(n), sizes)
    assert found.ratio == (n + 1) / (2 * n)
    assert found.unevenness == 1


def test_uneven_stages_have_a_closed_form_too():
    sizes = [8, 4, 2, 1]
    found = memory.peaks(cj.Schedule.cyclic(4), sizes)
    assert found.cdp == sum((4 - j) * size for j, size in enumerate(sizes))
    assert found.unevenness == 1
    assert found.ratio > 5 / 8 > memory.peaks(cj.Schedule.cyclic(4), sizes[::-1]).ratio


def test_other_schedules():
    sizes, total = [3, 2, 2, 1], 8
    assert memory.curve(cj.Schedule.simultaneous(4, 4), sizes).max() == 4 * total
    assert memory.curve(cj.Schedule.gpipe(4, 4), sizes).max() == 4 * total
    assert memory.curve(cj.Schedule.accumulation(4, 4), sizes).tolist() == [3, 5, 7, 8, 8, 7, 5, 3] * 4
    one_f_one_b = memory.curve(cj.Schedule.one_f_one_b(4, 4), sizes)
    assert one_f_one_b.max() == memory.curve(cj.Schedule.cyclic(4), sizes).max()
    assert one_f_one_b.min() < one_f_one_b.max()  # the flush
    balanced = cj.Schedule.balanced(4, [1] * 8, [2] * 8)
    assert memory.peaks(balanced, [1] * 8).ratio == 0.59375
    assert memory.peaks(cj.Schedule.pipeline(4), [1] * 4).ratio < 1
    with pytest.raises(ValueError, match="no stage keeps anything"):
        memory.peaks(balanced, [0] * 8)


def test_layer_granularity_by_hand():
    """Two workers, one and a half periods of three layers: F and B of one tick each, worker 1 three ticks late."""
    schedule = cj.Schedule.spread(2, 3)
    assert memory.curve(schedule, [100, 10, 1]).tolist() == [
        100 + 111,  # F0; worker 1 does B2
        110 + 110,
        111 + 100,
        111 + 100,
        110 + 110,
        100 + 111,
    ]
    # neighbours 3/2 ops apart: four workers, ops of two ticks
    finer = cj.Schedule.spread(4, 3)
    assert (finer.period, finer.offset, finer.program[1].start) == (12, 3, 2)
    one = np.repeat([100, 110, 111, 111, 110, 100], 2)
    assert memory.curve(finer, [100, 10, 1]).tolist() == sum(np.roll(one, 3 * i) for i in range(4)).tolist()
    assert memory.curve(finer, [100, 10, 1])[0] == 100 + 110 + 111 + 110


def test_partition_by_activations_balances_them():
    """Layers whose bytes fall as in a ResNet: by flops the first stage holds more than by activations."""

    def shrink(k):
        return lambda key, x: jax.random.normal(key, (x.shape[-1], 64 >> k)), lambda p, x: jnp.sin(x @ p)

    layers = cj.from_functions([shrink(k) for k in range(6)])
    example = jax.ShapeDtypeStruct((8, 64), np.float32)
    models = {by: cj.partition(layers, 3, example=example, by=by) for by in ("activations", "layers", "params")}
    each = memory.layer_bytes(layers, models["layers"].structs)
    largest = {by: max(sum(each[a:b]) for a, b in m.boundaries) for by, m in models.items()}
    cuts = itertools.combinations(range(1, 6), 2)
    best = min(max(sum(each[:a]), sum(each[a:b]), sum(each[b:])) for a, b in cuts)
    assert largest["activations"] == best < largest["layers"]


# ---- what the compiler says ---------------------------------------------------------------------------------

ROWS, LAYERS = 2048, 16


def loss(y, targets):
    return ((y.mean(axis=-1) - targets) ** 2).mean()


def executor_peak(n: int, schedule: cj.Schedule, ordered: bool = True) -> tuple[float, float]:
    """Compiled and predicted bytes of a step, in arrays of one micro-batch's boundary."""
    model, optimizer = stack(block, LAYERS, n, ROWS), optax.sgd(0.1)
    rule = cj.UpdateRule.freshest(schedule)
    executor = InterleavedExecutor(model, loss, optimizer, rule=rule, schedule=schedule, ordered=ordered)
    state = jax.eval_shape(lambda: cj.TrainState.create(model, optimizer, jax.random.key(0), num_workers=n))
    batch = (jax.ShapeDtypeStruct((n * ROWS, WIDTH), np.float32), jax.ShapeDtypeStruct((n * ROWS,), np.float32))
    carry, unit = executor.carry_struct(state), ROWS * WIDTH * 4
    compiled = memory.compiled_bytes(executor.lower(carry, batch).compile())
    return compiled / unit, predicted_bytes(schedule, executor.ops, carry, batch, state.params) / unit


@pytest.mark.parametrize("n", [2, 4, 8])
def test_compiled_peak_is_the_predicted_one(n):
    """Within 5 %; at N = 8 XLA loses a sixth more by how it packs buffers around those of the carry."""
    for table in (cj.Schedule.simultaneous, cj.Schedule.accumulation):
        compiled, predicted = executor_peak(n, table(n, n))
        assert compiled == pytest.approx(predicted, rel=0.01)
    compiled, predicted = executor_peak(n, cj.Schedule.cyclic(n))
    assert predicted <= compiled <= predicted * (1.05 if n < 8 else 1.17)


def test_compiled_peak_against_plain_programs():
    """N = 4. Against the sum of losses the ratio is below (N+1)/2N, and a scan over micro-batches needs less than either."""
    n, model = 4, stack(block, LAYERS, 4, ROWS)
    params, states = jax.eval_shape(model.init, jax.random.key(0))
    batch = (jax.ShapeDtypeStruct((n, ROWS, WIDTH), np.float32), jax.ShapeDtypeStruct((n, ROWS), np.float32))

    def one(params, states, x, targets):
        return loss(model.apply(params, states, x)[0], targets)

    def at_once(params, states, batch):
        return jax.grad(lambda p: jax.vmap(one, in_axes=(None, None, 0, 0))(p, states, *batch).mean())(params)

    def accumulated(params, states, batch):
        def body(total, micro_batch):
            return jax.tree.map(jnp.add, total, jax.grad(one)(params, states, *micro_batch)), None

        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), batch)[0]

    everything, scanned = (
        memory.compiled_bytes(jax.jit(f).lower(params, states, batch).compile()) / (ROWS * WIDTH * 4)
        for f in (at_once, accumulated)
    )
    cyclic, _ = executor_peak(n, cj.Schedule.cyclic(n))
    assert scanned < cyclic < 0.625 * everything
    unordered, _ = executor_peak(n, cj.Schedule.cyclic(n), ordered=False)
    assert unordered > 1.2 * cyclic  # the saving is lost where the compiler orders the program


def test_the_turns_hold_half():
    """One op at a time, N²/2 stages' residuals and N boundaries are held, where a tick of N devices holds N(N+1)/2."""
    n = 8
    model = stack(block, n, n, ROWS)
    ops, params = (
        memory.traced_ops(model, loss, jax.ShapeDtypeStruct((ROWS,), np.float32)),
        model.init(jax.random.key(0)),
    )
    unit = ROWS * WIDTH * 4
    peak = max(held_by_turn(cj.Schedule.cyclic(n), ops, params[0])) / unit
    assert n * n <= peak <= n * n + n + 3  # two arrays a stage
    at_once = max(held_by_turn(cj.Schedule.simultaneous(n, n), ops, params[0])) / unit
    assert at_once >= 2 * n * n


@pytest.mark.parametrize(
    "schedule",
    [
        cj.Schedule.cyclic(3),
        cj.Schedule.cyclic(4, 2),
        cj.Schedule.pipeline(3),
        cj.Schedule.balanced(2, [1] * 4, [2] * 4),
    ],
    ids=str,
)
def test_turns_hold_every_op_once_in_a_workers_order(schedule):
    found = turns(schedule)
    assert len(found) == len(set(found)) == 2 * schedule.num_workers * schedule.num_stages
    for worker in range(schedule.num_workers):
        mine = [t for t in found if t.worker == worker]
        late, now = ([t.op for t in mine if t.late is flag] for flag in (True, False))
        assert [*now, *late] == [slot.op for slot in schedule.program]
        assert [t.late for t in mine] == sorted((t.late for t in mine), reverse=True)
