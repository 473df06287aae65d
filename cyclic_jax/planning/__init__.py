"""What each executor and baseline would need and take on a machine: predictions from shapes and schedules, nothing is run.

- :mod:`.work`: a machine, and a model's work cut in stages;
- :mod:`.footprint`: bytes on each device;
- :mod:`.timing`: the time of a step by latency and bandwidth;
- :mod:`.ways`: all executors and baselines, and the best of them.
"""

from cyclic_jax.planning.footprint import Footprint
from cyclic_jax.planning.timing import Timing
from cyclic_jax.planning.ways import WAYS, Choice, best, choices, seconds
from cyclic_jax.planning.work import Machine, Work

__all__ = ["WAYS", "Choice", "Footprint", "Machine", "Timing", "Work", "best", "choices", "seconds"]
