"""Which run a checkpoint belongs to: what must be equal to go on from it, and the error that names what is not."""

from collections.abc import Mapping
from typing import Any

from cyclic_jax.executors import EXECUTORS, Executor


def identity(executor: Executor, more: Mapping[str, Any]) -> dict[str, Any]:
    """What any executor that goes on must share: model, rule, N and S, and what the caller adds. Plain JSON values."""
    rows = ("".join("01"[int(fresh)] for fresh in row) for row in executor.rule.fresh)
    return {
        **more,
        "num_workers": executor.num_workers,
        "num_stages": executor.model.num_stages,
        "stages": [[layer.name for layer in stage.layers] for stage in executor.model.stages],
        "mask": " ".join(rows),
    }


def placement(executor: Executor) -> dict[str, Any]:
    """What must be equal as well for what is in flight: executor, devices and schedule."""
    name = next((name for name, kind in EXECUTORS.items() if type(executor) is kind), type(executor).__name__)
    schedule = getattr(executor, "schedule", None)
    return {
        "executor": name,
        "mesh": dict(executor.mesh.shape),
        "schedule": None if schedule is None else str(schedule),
    }


def difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """The first entry that differs, in words; ``None`` if none does.

    >>> difference({"N": 4, "stages": [["a"], ["b", "c"]]}, {"N": 4, "stages": [["a"], ["b", "d"]]})
    "stages[1][1] is 'c' there and 'd' here"
    """
    for name in [*here, *(name for name in there if name not in here)]:
        if name not in there or name not in here:
            return f"{name} is {'only there' if name in there else 'only here'}"
        if there[name] != here[name]:
            return _narrowed(name, there[name], here[name])
    return None


def _narrowed(name: str, there: Any, here: Any) -> str:
    """Down to the entry of a list that differs, if the lists are equally long."""
    if isinstance(there, list) and isinstance(here, list):
        if len(there) != len(here):
            return f"{name} has {len(there)} entries there and {len(here)} here"
        place = next(k for k, (a, b) in enumerate(zip(there, here, strict=True)) if a != b)
        return _narrowed(f"{name}[{place}]", there[place], here[place])
    if isinstance(there, str) and "\n" in there:
        return f"{name} is there\n{there}\nand here\n{here}"
    return f"{name} is {there!r} there and {here!r} here"
