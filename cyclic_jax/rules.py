"""Update rules: which version of each stage each worker sees. No jax.

Worker i sees the newest parameters of stage j if ``fresh[i, j]``, else those of one training step before (Fournier & Oyallon,
arXiv 2403.08837).
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cyclic_jax.schedule import Schedule


@dataclass(frozen=True, eq=False)
class UpdateRule:
    """A mask and its name. Rules with the same mask are equal, whatever they are called.

    Attributes:
        name: for tables and errors; not compared, as in a schedule.
        fresh: bool ``[N, S]``, read-only.

    Raises:
        ValueError: if ``fresh`` is no boolean matrix with at least one row and one column.

    Examples:
        >>> print(UpdateRule.cdp_v2(3))
        cdp-v2    stage 0 1 2
        worker 0        . . x
        worker 1        . x x
        worker 2        x x x
    """

    name: str
    fresh: np.ndarray

    def __post_init__(self) -> None:
        try:
            mask = np.array(self.fresh)
        except ValueError as error:
            raise ValueError(f"a rule's mask is bool [N, S], but its rows differ in length: {self.fresh}") from error
        if mask.ndim != 2 or 0 in mask.shape or not (mask.dtype == bool or np.isin(mask, (0, 1)).all()):
            raise ValueError(
                f"a rule's mask is bool [N, S], one row a worker and one column a stage; got {mask.dtype}{list(mask.shape)}"
            )
        mask = mask.astype(bool)
        mask.setflags(write=False)
        object.__setattr__(self, "fresh", mask)

    # ---- rules ----------------------------------------------------------------------------------------------

    @classmethod
    def dp(cls, num_workers: int, num_stages: int | None = None) -> "UpdateRule":
        """Plain data parallelism: always fresh. No cyclic schedule of two or more workers can run it."""
        return cls("dp", np.ones(_shape(num_workers, num_stages), bool))

    @classmethod
    def cdp_v1(cls, num_workers: int, num_stages: int | None = None) -> "UpdateRule":
        """Never fresh: every gradient is one step late, as in PipeDream-2BW."""
        return cls("cdp-v1", np.zeros(_shape(num_workers, num_stages), bool))

    @classmethod
    def cdp_v2(cls, num_workers: int, num_stages: int | None = None) -> "UpdateRule":
        """Fresh iff j·N ≥ (N − 1 − i)·S, which is i + j ≥ N − 1 for S = N: the most that the cyclic schedule allows (derived).

        Raises:
            ValueError: unless ``num_workers`` divides 2·``num_stages``: there is no such schedule then.
        """
        N, S = _shape(num_workers, num_stages)
        if 2 * S % N:
            raise ValueError(
                f"cdp-v2 is the freshest rule of the cyclic schedule, and num_workers={N} does not divide 2*num_stages={2 * S}: "
                "there is no such schedule; give a mask of your own with UpdateRule.custom"
            )
        workers, stages = np.ogrid[:N, :S]
        return cls("cdp-v2", stages * N >= (N - 1 - workers) * S)

    @classmethod
    def custom(cls, mask: Any, name: str = "custom") -> "UpdateRule":
        """Any mask ``[N, S]``. A schedule can run it iff it asks for nothing that the schedule's own mask does not have."""
        return cls(name, mask)

    @classmethod
    def freshest(cls, schedule: Schedule) -> "UpdateRule":
        """The freshest rule that a schedule can run."""
        return cls(f"freshest {schedule.name}".strip(), schedule.feasible)

    @classmethod
    def named(cls, name: str, num_workers: int, num_stages: int | None = None) -> "UpdateRule":
        """``dp``, ``cdp-v1`` or ``cdp-v2``.

        Raises:
            ValueError: for another name, with the nearest of these.
        """
        known: dict[str, Callable[..., UpdateRule]] = {"dp": cls.dp, "cdp-v1": cls.cdp_v1, "cdp-v2": cls.cdp_v2}
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown rule {name!r}: did you mean {near!r}? Known: {', '.join(known)}")
        return known[name](num_workers, num_stages)

    def tiled(self, groups: int) -> "UpdateRule":
        """The rule of ``groups`` copies of the ring: worker d·N + i uses row i."""
        return UpdateRule(self.name, np.tile(self.fresh, (groups, 1)))

    # ---- face -----------------------------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """N."""
        return int(self.fresh.shape[0])

    @property
    def num_stages(self) -> int:
        """S."""
        return int(self.fresh.shape[1])

    def check(self, schedule: Schedule) -> None:
        """Refuse a schedule that cannot run this rule.

        Raises:
            ValueError: naming the first cell that would need parameters that do not exist yet, or the two shapes if they differ;
                the schedule and the rule are drawn.
        """
        if self.fresh.shape != schedule.feasible.shape:
            raise ValueError(
                f"rule {self.name!r} is for {self.num_workers} workers and {self.num_stages} stages, the schedule for "
                f"{schedule.num_workers} and {schedule.num_stages}:\n{schedule}\n{self}"
            )
        for i, j in np.argwhere(self.fresh & ~schedule.feasible):
            raise ValueError(
                f"rule {self.name!r} wants worker {i} to be fresh on stage {j}, but in this schedule its forward F{j} "
                f"starts before the last worker's B{j} of the step before has ended:\n{schedule}\n{self}"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UpdateRule):
            return NotImplemented
        return np.array_equal(self.fresh, other.fresh)

    def __hash__(self) -> int:
        return hash((self.fresh.shape, self.fresh.tobytes()))

    def __str__(self) -> str:
        head = max(len(self.name), len(f"worker {self.num_workers - 1}"))
        widths = [max(2, len(str(j)) + 1) for j in range(self.num_stages)]
        lines = [f"{self.name:{head}}  stage" + "".join(f"{j:>{w}}" for j, w in enumerate(widths))]
        for i, row in enumerate(self.fresh):
            cells = "".join(f"{'x' if fresh else '.':>{w}}" for fresh, w in zip(row, widths, strict=True))
            lines.append(f"{f'worker {i}':{head}}       {cells}")
        return "\n".join(lines)


def _shape(num_workers: int, num_stages: int | None) -> tuple[int, int]:
    shape = (num_workers, num_workers if num_stages is None else num_stages)
    if min(shape) < 1:
        raise ValueError(f"num_workers={shape[0]}, num_stages={shape[1]}: both must be at least 1")
    return shape
