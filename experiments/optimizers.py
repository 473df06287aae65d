"""optax optimizers and learning-rate schedules by name."""

from collections.abc import Callable

import optax

from experiments.config import Options, nearest


def learning_rate(config: Options, steps_per_epoch: int, total_steps: int) -> optax.Schedule:
    """The learning rate as a function of the training step."""
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if config.schedule == "cosine":
        main = optax.cosine_decay_schedule(config.lr, max(1, total_steps - warmup))
    elif config.schedule == "step":
        every = max(1, round(config.drop_every * steps_per_epoch))
        drops = {step - warmup: config.drop_factor for step in range(every, total_steps, every) if step > warmup}
        main = optax.piecewise_constant_schedule(config.lr, drops)
    else:
        main = optax.constant_schedule(config.lr)
    if not warmup:
        return main
    return optax.join_schedules([optax.linear_schedule(0.0, config.lr, warmup), main], [warmup])


def _sgd(config: Options, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(config.weight_decay), optax.sgd(schedule, momentum=config.momentum))


def _adamw(config: Options, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(schedule, weight_decay=config.weight_decay)


def _muon(config: Options, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.contrib.muon(schedule, weight_decay=config.weight_decay)


OPTIMIZERS: dict[str, Callable[[Options, optax.Schedule], optax.GradientTransformation]] = {
    "sgd": _sgd,
    "adamw": _adamw,
    "muon": _muon,
}


def make_optimizer(config: Options, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The configured optimizer.

    Raises:
        ValueError: for an unknown name, with the nearest known one.
    """
    if config.optimizer not in OPTIMIZERS:
        raise nearest("optimizer", config.optimizer, OPTIMIZERS)
    return OPTIMIZERS[config.optimizer](config, schedule)
