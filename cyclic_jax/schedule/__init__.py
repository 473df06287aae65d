"""Schedules as tables: who does what when, and everything that follows from it. No jax."""

from cyclic_jax.schedule.messages import Message
from cyclic_jax.schedule.ops import BACKWARD, FORWARD, Op, Slot
from cyclic_jax.schedule.table import Schedule

__all__ = ["BACKWARD", "FORWARD", "Message", "Op", "Schedule", "Slot"]
