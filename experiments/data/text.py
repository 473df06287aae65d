"""A real text that is on every machine with CPython: the language reference that ``help()`` prints.

It is the module ``pydoc_data.topics`` of the standard library (© Python Software Foundation, PSF licence), about half a million
characters of English prose, grammar and code. It is part of the Python that runs the experiment and differs a little from one
Python version to the next: compare losses within one version only.
"""

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from experiments.data.dataset import Batch, EvalBatch, Rows, every_row, pad_rows


@dataclass(frozen=True, eq=False)
class Text:
    """Characters as integers, and windows of them. T = context, B rows of a batch.

    The rows that a training step sees are a function of (seed, step) alone: every rule sees the same, and a run can go on at
    any step.

    Attributes:
        name: what it is called.
        train: int32 ``[n]``, the beginning of the text.
        test: int32 ``[m]``, its end.
        alphabet: the characters; character i is token i.
        context: T.
        description: one line: origin, licence and size.

    Raises:
        ValueError: if the context is below 1 or a split is shorter than T + 1 characters.

    Examples:
        >>> text = make_text("to be or not to be" * 20, context=4)
        >>> x, y = next(text.batches(batch_size=2, seed=0))
        >>> x.shape, bool((x[:, 1:] == y[:, :-1]).all())
        ((2, 4), True)
    """

    name: str
    train: np.ndarray
    test: np.ndarray
    alphabet: str
    context: int
    description: str

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ValueError(f"context={self.context}: it must be at least 1")
        for kind, split in (("train", self.train), ("test", self.test)):
            if len(split) <= self.context:
                raise ValueError(
                    f"context={self.context} does not fit the {kind} split of {self.name}: it has {len(split)} characters, "
                    f"{self.context + 1} are needed"
                )

    def steps_per_epoch(self, batch_size: int) -> int:
        """Steps that read as many characters as the training split has, at least 1; ValueError for ``batch_size`` < 1."""
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: at least 1 is needed")
        return max(1, len(self.train) // (batch_size * self.context))

    def batches(
        self, batch_size: int, seed: int, start_step: int = 0, rows: np.ndarray | None = None
    ) -> Iterator[Batch]:
        """Training steps for ever, from ``start_step`` on: windows at random places of the training split.

        With ``rows``, only those of each batch, which are the same as in the whole batch.

        Yields:
            (characters int32 ``[B, T]``, the character after each int32 ``[B, T]``)

        Raises:
            ValueError: at the call, if ``batch_size`` is below 1 or another argument is negative.
        """
        for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0), ("start_step", start_step, 0)):
            if value < least:
                raise ValueError(f"{name}={value}: at least {least} is needed")
        return self._stream(batch_size, seed, start_step, every_row(rows))

    def _stream(self, batch_size: int, seed: int, step: int, rows: Rows) -> Iterator[Batch]:
        while True:
            starts = np.random.default_rng((seed, step)).integers(len(self.train) - self.context, size=batch_size)[rows]
            windows = self.train[starts[:, None] + np.arange(self.context + 1)]
            yield windows[:, :-1], windows[:, 1:]
            step += 1

    def eval_batches(self, batch_size: int, rows: np.ndarray | None = None) -> Iterator[EvalBatch]:
        """The test split once, in windows side by side: every character but the first is predicted exactly once.

        With ``rows``, only those of each batch.

        Yields:
            (characters int32 ``[B, T]``, the character after each int32 ``[B, T]``, valid bool ``[B, T]``); the end is padded with
            places that are not valid.

        Raises:
            ValueError: at the call, if ``batch_size`` is below 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: at least 1 is needed")
        starts = range(0, len(self._test_rows[0]), batch_size)
        return (self._cut(start, batch_size, every_row(rows)) for start in starts)

    def _cut(self, start: int, batch_size: int, rows: Rows) -> EvalBatch:
        x, y, valid = (pad_rows(array[start : start + batch_size], batch_size)[rows] for array in self._test_rows)
        return x, y, valid

    @cached_property
    def _test_rows(self) -> EvalBatch:
        count = len(self.test) - 1
        shape = (-(-count // self.context), self.context)
        x, y, valid = (
            pad_rows(array, shape[0] * shape[1]).reshape(shape)
            for array in (self.test[:-1], self.test[1:], np.ones(count, bool))
        )
        return x, y, valid


def make_text(text: str, *, context: int, name: str = "text", origin: str = "", test_share: float = 0.1) -> Text:
    """Any text as data: the last ``test_share`` of it, in one piece, is what is evaluated on.

    The alphabet is that of the whole text, so that no test character is unknown.

    Raises:
        ValueError: if a split is too short for the context, or ``test_share`` is not between 0 and 1.
    """
    if not 0 < test_share < 1:
        raise ValueError(f"test_share={test_share}: it must lie between 0 and 1")
    alphabet = "".join(sorted(set(text)))
    index = {character: token for token, character in enumerate(alphabet)}
    tokens = np.array([index[character] for character in text], np.int32)
    cut = len(tokens) - round(len(tokens) * test_share)
    size = (
        f"{cut:,} characters for training, the last {len(tokens) - cut:,} for the test, {len(alphabet)} different ones"
    )
    return Text(name, tokens[:cut], tokens[cut:], alphabet, context, f"{origin}: {size}" if origin else size)


def python_topics(context: int) -> Text:
    """The topics of ``help()``, in alphabetical order, with T = ``context``.

    Raises:
        FileNotFoundError: if this Python comes without them.
        ValueError: if the context does not fit.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise FileNotFoundError("this Python comes without pydoc_data.topics, a module of CPython's library") from None
    version = f"{platform.python_implementation()} {platform.python_version()}"
    return make_text(
        "\n".join(topics[name] for name in sorted(topics)),
        context=context,
        name="python_topics",
        origin=f"pydoc_data.topics, the language reference of {version} (PSF licence; differs between Python versions)",
    )
