"""Which ring each way takes, what fits, and which is best."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

import cyclic_jax as cj
from cyclic_jax.planning import WAYS, Machine, Work, best, choices, seconds
from cyclic_jax.planning.ways import rings
from tests import problems

MACHINE = Machine(devices=4, memory=1e9, flops=1e9, bandwidth=1e9, latency=1e-6)
LAYERS = cj.models.residual_mlp(3, in_features=8, width=8, depth=4)
BY_NAME = {way.name: way for way in WAYS}


@functools.cache
def work_for(num_stages: int) -> Work:
    batch = jax.ShapeDtypeStruct((4, 8), np.float32), jax.ShapeDtypeStruct((4,), np.int32)
    return Work.of(LAYERS, num_stages, problems.loss, optax.sgd(0.1), batch)


def found(machine: Machine) -> dict:
    return {c.name: c for c in choices(work_for, len(LAYERS), machine)}


def test_rings_are_no_longer_than_the_model():
    pipeline, parallel = BY_NAME["pipeline"], BY_NAME["model_parallel"]
    assert rings(pipeline, 6, 1024) == [2, 4]
    assert rings(pipeline, 6, 12) == [2, 3, 4, 6]
    assert rings(pipeline, 6, 7) == [2, 3, 4]  # no ring takes seven: some are left without work
    assert rings(parallel, 6, 12) == [2, 3]
    assert rings(parallel, 6, 16) == [2, 3, 4]
    assert rings(parallel, 6, 2) == []
    assert rings(BY_NAME["data parallel"], 6, 1024) == [1]


def test_many_devices():
    """1024 devices and six layers: rings side by side, and every way gives a time but for the same work."""
    machine = dataclasses.replace(MACHINE, devices=1024)
    for name, c in found(machine).items():
        assert c.fits
        assert c.devices == (
            1 if name == "interleaved" else 1023 if name == "model_parallel" and c.ring == 2 else c.devices
        )
        assert c.ring <= len(LAYERS)
        assert c.groups * BY_NAME[name].devices(c.ring) in (0, c.devices) or name == "interleaved"
        assert seconds(c, machine) >= c.timing.compute / c.timing.micro_batches * 1024


def test_the_best_is_the_fastest_that_fits():
    every = found(MACHINE)
    first = best(list(every.values()), MACHINE)
    assert seconds(first, MACHINE) == min(seconds(c, MACHINE) for c in every.values() if c.fits)
    needs = first.footprint.total
    tight = found(dataclasses.replace(MACHINE, memory=needs - 1))
    second = best(list(tight.values()), MACHINE)
    assert second is None or second.footprint.total < needs
    assert tight[first.name].ring != first.ring or tight[first.name].reason.startswith("needs")


def test_nothing_fits():
    every = found(dataclasses.replace(MACHINE, memory=10.0))
    assert best(list(every.values()), MACHINE) is None
    assert all(c.reason for c in every.values())


def test_too_few_devices():
    every = found(dataclasses.replace(MACHINE, devices=2))
    assert every["model_parallel"].reason == "a ring of two stages takes 3 devices and two layers, not 2 and 6"
    assert every["pipeline"].ring == 2


def test_the_best_depends_on_the_machine():
    """A ring of the whole model and slow links: large gradients are the worse, the larger they are against activations."""
    slow = dataclasses.replace(MACHINE, bandwidth=1e5, latency=0.0)
    every = found(slow)
    assert seconds(every["FSDP (ZeRO-3)"], slow) > seconds(every["data parallel"], slow)
    assert best(list(every.values()), slow).name != "FSDP (ZeRO-3)"
    quick = dataclasses.replace(MACHINE, bandwidth=1e15, latency=0.0)
    ideal = seconds(found(quick)["data parallel"], quick)
    assert seconds(found(quick)["GPipe, M = n"], quick) > 1.2 * ideal
    assert pytest.approx(ideal) == seconds(found(quick)["synchronous"], quick)
