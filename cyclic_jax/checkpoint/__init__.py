"""Checkpoints of a run, in two forms: in flight (the exact carry of one executor) and canonical (a TrainState, for any executor).

Needs ``orbax-checkpoint``, which is imported when a :class:`Checkpoints` is made.
"""

from cyclic_jax.checkpoint.checkpoints import CANONICAL, IN_FLIGHT, Checkpoints, Restored

__all__ = ["CANONICAL", "IN_FLIGHT", "Checkpoints", "Restored"]
