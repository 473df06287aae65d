"""Training one rule with one seed, and evaluating it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import cyclic_jax as cj
from cyclic_jax.executors.base import copied
from cyclic_jax.state import snapshot_of
from experiments.config import Config, Options, check, make_rule, rule_and_executor
from experiments.data import load
from experiments.data.augment import make_augment
from experiments.interruption import Interrupted
from experiments.optimizers import learning_rate, make_optimizer
from experiments.processes import total
from experiments.profiling import Profile
from experiments.run import Clock, Evaluation, Losses, Run, check_finite

if TYPE_CHECKING:
    from experiments.checkpointing import Keeper

PyTree = Any


@dataclass(frozen=True)
class Study:
    """Everything the rules share: data, stages, optimizer, and one executor for each rule."""

    config: Options
    data: Any
    model: cj.StagedModel
    optimizer: optax.GradientTransformation
    learning_rates: np.ndarray
    executors: dict[str, cj.Executor]
    total_steps: int
    evaluate_batch: Callable[..., Any]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over the labels of the micro-batch, computed in float32: logits ``[B, …, classes]``, labels ``[B, …]``."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def prepare(config: Config) -> Study:
    """Check the whole configuration and build what the rules of an accuracy study share; nothing is compiled yet."""
    check(config)
    for entry in config.rules:
        make_rule(config, entry)  # an unknown one is refused before the data is read
    data = load(config.dataset, data_dir=config.data_dir)
    dtype = jnp.dtype(config.dtype)
    layers = cj.models.build(config.model, num_classes=data.num_classes, image_shape=data.image_shape, dtype=dtype)
    layers = (with_augmentation(layers[0], data, dtype), *layers[1:])
    return make_study(config, data, layers, jax.ShapeDtypeStruct(data.image_shape, data.image_dtype))


def make_study(config: Options, data: Any, layers: tuple[cj.Layer, ...], row: jax.ShapeDtypeStruct) -> Study:
    """Stages, optimizer and executors for a model on its data; nothing is compiled yet.

    Args:
        config: a checked one.
        data: with ``batches``, ``eval_batches`` and ``steps_per_epoch``, as :class:`experiments.data.DatasetLike`.
        layers: the model.
        row: one row of the inputs, without the batch axis.
    """
    rules = {name: make_rule(config, name) for name in config.rules}
    example = jax.ShapeDtypeStruct((config.batch_per_worker, *row.shape), row.dtype)
    model = cj.partition(layers, config.num_stages, by=config.partition, example=example)
    per_epoch = data.steps_per_epoch(config.global_batch)
    total = config.steps or max(1, round(config.epochs * per_epoch))
    schedule = learning_rate(config, per_epoch, total)
    optimizer = make_optimizer(config, schedule)
    executors = make_executors(config, model, optimizer, rules)
    evaluate_batch = jax.jit(lambda *args: _count(model, *args))
    rates = np.asarray(jax.vmap(schedule)(jnp.arange(total))) * np.ones(total)
    return Study(config, data, model, optimizer, rates, executors, total, evaluate_batch)


def make_executors(
    config: Options, model: cj.StagedModel, optimizer: optax.GradientTransformation, rules: dict[str, cj.UpdateRule]
) -> dict[str, cj.Executor]:
    """One executor per rule; they share what is compiled where the executor takes the mask as data."""
    executors: dict[str, Any] = {}
    shared: Any = None
    for entry, rule in rules.items():
        _, name = rule_and_executor(config, entry)
        if name == "synchronous" and shared is not None:
            executors[entry] = shared.with_rule(rule)
            continue
        low = name == "zero" and config.stream_dtype != "float32"
        options: dict[str, Any] = {"stream_dtype": jnp.dtype(config.stream_dtype)} if low else {}
        executors[entry] = cj.make_executor(name, model, cross_entropy, optimizer, rule=rule, **options)
        shared = executors[entry] if name == "synchronous" else shared
    return executors


def with_augmentation(layer: cj.Layer, data: Any, dtype: Any) -> cj.Layer:
    """The model's first layer, fed with augmented images in training and normalised ones in evaluation."""
    augment, normalise = make_augment(data)

    def init(key: jax.Array, x: PyTree) -> tuple[PyTree, PyTree]:
        return layer.init(key, normalise(x).astype(dtype))

    def apply(params: PyTree, state: PyTree, x: PyTree, *, key: jax.Array | None, train: bool) -> tuple[PyTree, PyTree]:
        # the layer keeps the key it would have had alone, the augmentation gets another
        x = normalise(x) if key is None or not train else augment(jax.random.fold_in(key, 0xA06), x)
        return layer.apply(params, state, x.astype(dtype), key=key, train=train)

    return cj.Layer(layer.name, init, apply)


def train(
    study: Study,
    rule: str,
    seed: int,
    on_step: Callable[[int, float], None],
    *,
    run: Run | None = None,
    keeper: Keeper | None = None,
    on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None,
    stop: Callable[[], bool] = lambda: False,
) -> Run:
    """Train one rule with one seed and evaluate it on the test split.

    Args:
        study: from :func:`prepare`.
        rule: a key of ``study.executors``.
        seed: of parameters, data order and dropout.
        on_step: called with the step and its mean loss, a few steps late.
        run: what is known of the run before the checkpoint that it goes on from.
        keeper: of checkpoints; goes on from the newest one, if there is one.
        on_evaluation: called with each evaluation during training.
        stop: asked after each step whether to save and end here; without effect where there is no keeper.

    Raises:
        FloatingPointError: as soon as a loss that is not finite is seen; names step and worker.
        Interrupted: when ``stop`` said so; the checkpoint is complete.
    """
    config, executor, run = study.config, study.executors[rule], run or Run(rule, seed)
    losses, start = Losses(run, executor.num_workers, on_step), keeper.latest if keeper else 0
    rows = config.global_batch
    with closing(study.data.batches(rows, seed, start, rows=cj.local_rows(executor, rows))) as own:
        batches = (cj.global_batch(executor, tuple(batch), rows=rows) for batch in own)
        first = next(batches)
        warm_up(study, executor, seed, first)
        fresh = initial_state(study, executor, seed)
        carry = keeper.restore(fresh, first, losses) if keeper and start else executor.init(fresh)
        del fresh
        clock = Clock(run)
        with Profile(config.profile and config.profile / run.name, study.total_steps - start) as profile:
            stream = islice(chain([first], batches), study.total_steps - start)
            for begun, batch in enumerate(stream, start + 1):
                carry, metrics = profile.step(begun, executor.step, carry, batch)
                losses.add(metrics)
                if config.eval_every and begun % config.eval_every == 0:
                    with clock.stopped():
                        on_evaluation(evaluate_in_flight(study, executor, carry, begun))
                if keeper and begun < study.total_steps:
                    stopping = stop()
                    if stopping or begun % config.save_every == 0:
                        clock.read()
                        carry = keeper.save(begun, carry, losses)
                    if stopping:
                        keeper.wait()
                        raise Interrupted(run.name, begun)
        state, last = executor.drain(carry)
        losses.catch_up(last)
        check_finite(state, run)
    clock.read()
    if keeper:
        keeper.save_last(study.total_steps, state, losses)
    run.test_accuracy, run.test_loss = evaluate(study, executor, snapshot_of(state))
    return run


def initial_state(study: Study, executor: cj.Executor, seed: int) -> cj.TrainState:
    """The same parameters and keys for every rule."""
    return cj.TrainState.create(study.model, study.optimizer, jax.random.key(seed), num_workers=executor.num_workers)


def warm_up(study: Study, executor: cj.Executor, seed: int, batch: Any) -> None:
    """Compile before the clock starts, on a carry that is thrown away."""
    carry, _ = executor.step(executor.init(initial_state(study, executor, seed)), batch)
    jax.block_until_ready(executor.drain(carry))


def evaluate_in_flight(study: Study, executor: cj.Executor, carry: Any, begun: int) -> Evaluation:
    """The newest complete step, while ``begun`` have begun; the schedule is not drained."""
    snapshot = executor.snapshot(carry)
    return Evaluation(int(snapshot.step), begun, *evaluate(study, executor, snapshot))


def evaluate(study: Study, executor: cj.Executor, snapshot: cj.Snapshot) -> tuple[float, float]:
    """Accuracy and mean loss over the test split, over images or over characters: whatever has a label.

    Every process evaluates its share of each batch on its own devices.
    """
    rows = np.array_split(np.arange(study.config.global_batch), jax.process_count())[jax.process_index()]
    everywhere, split = own_devices(executor, len(rows))
    params, state = jax.tree.map(lambda leaf: copied(leaf, everywhere), (snapshot.params, snapshot.model_state))
    totals = np.zeros(3)
    for batch in study.data.eval_batches(study.config.global_batch, rows):
        totals += np.asarray(study.evaluate_batch(params, state, *jax.device_put(batch, split)))
    totals = total(totals)
    return float(totals[0] / totals[2]), float(totals[1] / totals[2])


def own_devices(executor: cj.Executor, rows: int) -> tuple[NamedSharding, NamedSharding]:
    """As many of this process's devices as divide ``rows`` rows: all holding the same, and each its share of the rows."""
    devices = [d for d in executor.mesh.devices.flat if d.process_index == jax.process_index()]
    mesh = Mesh(np.asarray(devices[: math.gcd(rows, len(devices))]), ("rows",))
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("rows"))


def _count(model: cj.StagedModel, params: PyTree, state: PyTree, x: Any, labels: Any, valid: Any) -> jax.Array:
    logits, _ = model.apply(params, state, x, train=False)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    right = logits.argmax(-1) == labels
    return jnp.stack([(right & valid).sum(), jnp.where(valid, losses, 0.0).sum(), valid.sum()])
