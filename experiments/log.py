"""The record of a study: JSON lines and TensorBoard scalars, written as it goes, and read again when it is resumed."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import IO, Any

from cyclic_jax.checkpoint.identity import difference
from experiments.config import Options, as_json, fixed
from experiments.run import Evaluation, Run

Line = dict[str, Any]


class Log:
    """results.jsonl and the folder tensorboard in ``folder``; a context manager.

    Lines have a ``kind``: config, baseline, step, evaluation, result. A new study replaces what an earlier one left; a resumed one
    goes on, after what was logged later than the checkpoint was dropped, so that no line is missing and none is there twice. With
    several processes one of them writes, and all read what was there before.

    Raises:
        ValueError: if a resumed study has other options than the one in the folder.
    """

    def __init__(self, folder: Path, config: Options, *, resume: bool = False, write: bool = True):
        from tensorboardX import SummaryWriter

        self._path, self._writers, self._hidden = folder / "results.jsonl", dict[str, Any](), dict[str, int]()
        self._before = resume and self._path.exists() and bool(self._lines())
        self._file: IO[str] | None = None
        self._make_writer = (
            lambda name: SummaryWriter(
                str(folder / "tensorboard" / name),
                purge_step=self._hidden.get(name),
                filename_suffix=f".{time.time_ns()}",  # files are read in the order of their names, which count in seconds
            )
        )
        if self._before:
            self._check(config)
        if not write:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if self._before:
            self._replace(self._lines())
            return
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)  # of an earlier study, like its results.jsonl
        self._file = self._path.open("w")
        self._line(kind="config", **as_json(config))

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        for writer in self._writers.values():
            writer.close()

    # ---- writing --------------------------------------------------------------------------------------------

    def step(self, run: Run, step: int, loss: float, lr: float) -> None:
        """One training step."""
        self._line(kind="step", rule=run.rule, seed=run.seed, step=step, loss=loss, lr=lr)
        self._scalars(run, step, {"loss": loss, "lr": lr})

    def evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """One evaluation during training."""
        self._line(kind="evaluation", rule=run.rule, seed=run.seed, **evaluation._asdict())
        self._evaluation_scalars(run, evaluation.step, evaluation.accuracy, evaluation.loss)

    def result(self, run: Run) -> None:
        """The end of one run."""
        values = {name: getattr(run, name) for name in ("test_accuracy", "test_loss", "final_loss", "seconds")}
        self._line(kind="result", rule=run.rule, seed=run.seed, steps=len(run.losses), **values)
        self._evaluation_scalars(run, len(run.losses), run.test_accuracy, run.test_loss)

    def baseline(self, name: str, test_loss: float) -> None:
        """What the test costs without a model."""
        known = [line["name"] for line in self._lines() if line["kind"] == "baseline"] if self._before else []
        if name not in known:
            self._line(kind="baseline", name=name, test_loss=test_loss)

    def sync(self) -> None:
        """Everything so far is on disk when this returns."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def _line(self, **values: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()

    def _evaluation_scalars(self, run: Run, step: int, accuracy: float, loss: float) -> None:
        self._scalars(run, step, {"test_accuracy": accuracy, "test_loss": loss})

    def _scalars(self, run: Run, step: int, values: dict[str, float]) -> None:
        if self._file is None:
            return
        if run.name not in self._writers:
            self._writers[run.name] = self._make_writer(run.name)
        for tag, value in values.items():
            self._writers[run.name].add_scalar(tag, value, step)

    # ---- going on -------------------------------------------------------------------------------------------

    def finished(self, rule: str, seed: int) -> Run | None:
        """The run as it was logged, if it has come to its end."""
        run = self._run(rule, seed, self._lines() if self._before else [])
        return run if run.seconds else None

    def rewind(self, rule: str, seed: int, losses: int, begun: int) -> Run:
        """Drop what was logged of a run after its checkpoint; returns what remains.

        Args:
            rule: of the run.
            seed: of the run.
            losses: how many were complete at the checkpoint.
            begun: training steps begun by then.

        Raises:
            ValueError: if fewer losses are there.
        """

        def later(line: Line) -> bool:
            if (line.get("rule"), line.get("seed")) != (rule, seed):
                return False
            return line["step"] >= losses if line["kind"] == "step" else line.get("begun", 0) > begun

        lines = self._lines() if self._before else []
        kept = [line for line in lines if not later(line)]
        run = self._run(rule, seed, kept)
        if len(run.losses) != losses:
            raise ValueError(
                f"{self._path} has {len(run.losses)} of the {losses} losses before the checkpoint of {run.name}: go on with the "
                "--out that the study began with"
            )
        if self._file is not None and len(kept) < len(lines):
            self._file.close()
            self._replace(kept)
        if self._before:
            self._hidden[run.name] = losses  # TensorBoard hides what earlier files hold from this step on
        for evaluation in run.evaluations:
            if evaluation.step >= losses:
                self._evaluation_scalars(run, evaluation.step, evaluation.accuracy, evaluation.loss)
        return run

    def _run(self, rule: str, seed: int, lines: list[Line]) -> Run:
        """A run without ``seconds`` has not come to its end."""
        run = Run(rule, seed)
        for line in lines:
            if (line.get("rule"), line.get("seed")) != (rule, seed):
                continue
            if line["kind"] == "step":
                run.losses.append(line["loss"])
            elif line["kind"] == "evaluation":
                run.evaluations.append(Evaluation(**{name: line[name] for name in Evaluation._fields}))
            else:
                run.test_accuracy, run.test_loss, run.seconds = (
                    line[name] for name in ("test_accuracy", "test_loss", "seconds")
                )
        return run

    def _check(self, config: Options) -> None:
        there = {name: value for name, value in self._lines()[0].items() if name != "kind"}
        found = difference(fixed(there), fixed(as_json(config)))
        if found is not None:
            raise ValueError(f"{self._path} is of another study: {found}")

    def _lines(self) -> list[Line]:
        """The whole lines of a study that is resumed; a process that was killed may leave half a one at the end."""
        whole = self._path.read_text().split("\n")[:-1]
        return [json.loads(line) for line in whole]

    def _replace(self, lines: list[Line]) -> None:
        """Exactly these lines, in one step, and open for more."""
        new = self._path.with_suffix(".tmp")
        with new.open("w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)
        self._file = self._path.open("a")
