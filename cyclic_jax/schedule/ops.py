"""An op, the forward or the backward of one stage, and its place in a worker's program."""

import re
from dataclasses import dataclass

FORWARD, BACKWARD = "F", "B"


@dataclass(frozen=True, order=True)
class Op:
    """``Op("F", 2)`` is the forward of stage 2; it prints as ``F2``.

    Examples:
        >>> str(Op("B", 0)), Op.parse("F12")
        ('B0', Op(kind='F', stage=12))
    """

    kind: str
    stage: int

    def __post_init__(self) -> None:
        if self.kind not in (FORWARD, BACKWARD) or self.stage < 0:
            raise ValueError(
                f"no such op: kind {self.kind!r}, stage {self.stage}; kinds are 'F' and 'B', stages start at 0"
            )

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}"

    @classmethod
    def parse(cls, text: str) -> "Op":
        """The op that prints as ``text``.

        Raises:
            ValueError: if there is none.
        """
        if not re.fullmatch(r"[FB](0|[1-9]\d*)", text):
            raise ValueError(f"{text!r} is no op: expected F or B and a stage, such as F2")
        return cls(text[0], int(text[1:]))


@dataclass(frozen=True)
class Slot:
    """An op with its start and length in ticks, for worker 0 and training step 0."""

    op: Op
    start: int
    length: int = 1
