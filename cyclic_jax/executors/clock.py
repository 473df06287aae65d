"""What time it is in a run: the same on all devices."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Clock:
    """Calls of ``step`` since the start, the step that the run began from, and the run's key."""

    calls: jax.Array
    first_step: jax.Array
    key: jax.Array
