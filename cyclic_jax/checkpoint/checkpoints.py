"""A folder of checkpoints of one run, written in the background by Orbax, each complete or not there at all."""

import json
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cyclic_jax.checkpoint.flat import Flat, described, fingerprint, flatten, numbers, unflatten
from cyclic_jax.checkpoint.identity import difference, identity, placement
from cyclic_jax.executors import Executor
from cyclic_jax.executors.base import Batch
from cyclic_jax.state import TrainState

PyTree = Any
IN_FLIGHT, CANONICAL = "in-flight", "canonical"


class Restored(NamedTuple):
    """What a run goes on from.

    Attributes:
        step: training steps begun, which is where the data goes on.
        carry: of the executor.
        note: what was given to ``save``.
    """

    step: int
    carry: Any
    note: dict[str, Any]


class Checkpoints:
    """Checkpoints of one run, in two forms.

    *In flight*: the exact carry. It goes on with the same executor, schedule and devices only, and then as if nothing had happened,
    bit for bit. *Canonical*: a :class:`TrainState`, after ``executor.drain``. It goes on with any executor and any number of
    devices that the executor allows, and equals the run that went on to rounding.

    A context manager; without it call ``close``. Saving copies to the host and returns, the rest happens in the background; a
    checkpoint appears under its final name only when it is complete. With several processes each calls the same methods.

    Args:
        folder: made if it is not there.
        executor: what the run is trained by.
        identity: JSON values by name that a run must share with the checkpoint to go on from it, beside model, rule, N and S:
            the seed, say, or the learning rate.
        about: JSON values that are only recorded.
        keep: how many checkpoints are kept; the oldest is removed once a newer one is complete.

    Raises:
        ImportError: if orbax-checkpoint is missing.
        ValueError: if ``keep`` is below 1.
    """

    def __init__(
        self,
        folder: str | Path,
        executor: Executor,
        *,
        identity: Mapping[str, Any] | None = None,
        about: Mapping[str, Any] | None = None,
        keep: int = 2,
    ):
        if keep < 1:
            raise ValueError(f"keep={keep}: at least 1 checkpoint must be kept")
        self.folder, self._executor = Path(folder).absolute(), executor
        self._more, self._about = dict(identity or {}), dict(about or {})
        self._orbax = _orbax()
        options = self._orbax.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = self._orbax.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def latest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return self._manager.latest_step()

    # ---- saving ---------------------------------------------------------------------------------------------

    def save(self, step: int, carry: Any, note: Mapping[str, Any] | None = None) -> None:
        """A carry, in flight, after ``step`` training steps have begun; ``carry`` may be donated as soon as this returns.

        Args:
            step: above that of every checkpoint there is.
            carry: of the executor.
            note: JSON values, handed back by ``restore``.

        Raises:
            OSError: if this checkpoint or the one before could not be written.
        """
        started = getattr(carry, "flight", True) is not None
        self._save(step, carry, {"form": IN_FLIGHT, "started": started}, note)

    def save_canonical(self, step: int, state: TrainState, note: Mapping[str, Any] | None = None) -> None:
        """A canonical state; otherwise as :meth:`save`."""
        self._save(step, state, {"form": CANONICAL}, note)

    def _save(self, step: int, tree: PyTree, form: Mapping[str, Any], note: Mapping[str, Any] | None) -> None:
        if self.latest is not None and step <= self.latest:
            raise ValueError(f"step {step}: {self.folder} already has a checkpoint of step {self.latest}")
        flat = flatten(tree)
        meta = {
            **form,
            "step": step,
            "identity": identity(self._executor, self._more),
            "placement": placement(self._executor),
            "about": {**_versions(), "rule": self._executor.rule.name, **self._about},
            "leaves": described(flat),
            "fingerprints": numbers(_fingerprints(self._executor.mesh)(flat)),
            "note": dict(note or {}),
        }
        args = self._orbax.args
        items = args.Composite(state=args.StandardSave(flat), meta=args.JsonSave(_sealed(meta)))
        self._writing(lambda: self._manager.save(step, args=items, force=True))

    def wait(self) -> None:
        """Until the last checkpoint is complete.

        Raises:
            OSError: if it could not be written.
        """
        self._writing(self._manager.wait_until_finished)

    def close(self) -> None:
        """Wait, and end the background threads. Raises as :meth:`wait`."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _writing(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # whatever the storage library raises
            there = [int(path.name) for path in self.folder.iterdir() if path.name.isdecimal()]
            left = f"the last complete one is of step {max(there)}" if there else "there is no complete one"
            raise OSError(f"a checkpoint could not be written to {self.folder}: {_brief(error)}; {left}") from error

    # ---- restoring ------------------------------------------------------------------------------------------

    def note(self, step: int | None = None) -> dict[str, Any]:
        """What was given to ``save`` with the newest checkpoint, or that of ``step``.

        Raises:
            FileNotFoundError: if there is no such checkpoint.
            ValueError: if it belongs to another run (names the difference), or is damaged.
        """
        return self._meta(self._step(step))["note"]

    def restore(self, state: TrainState, batch: Batch, step: int | None = None) -> Restored:
        """A carry of this executor, from the newest checkpoint, or that of ``step``, in either form.

        Args:
            state: a fresh state or its structs: what has to be restored is read off it.
            batch: a batch or its structs; likewise.
            step: of an older checkpoint.

        Raises:
            FileNotFoundError: if there is no such checkpoint.
            ValueError: if it belongs to another run (names the difference), or is damaged. Nothing has been changed then.
        """
        step = self._step(step)
        meta = self._meta(step)
        if meta["form"] == CANONICAL:
            return Restored(step, self._executor.init(self.restore_canonical(state, step)), meta["note"])
        struct = self._executor.carry_struct(_structs(state), _structs(batch) if meta["started"] else None)
        return Restored(step, self._read(step, meta, struct), meta["note"])

    def restore_canonical(self, state: TrainState, step: int | None = None) -> TrainState:
        """The state of a canonical checkpoint; arguments and errors as for :meth:`restore`.

        Raises:
            ValueError: also if the checkpoint is one in flight.
        """
        step = self._step(step)
        meta = self._meta(step)
        if meta["form"] != CANONICAL:
            raise ValueError(f"checkpoint {self.folder / str(step)} is in flight: restore() makes a carry of it")
        everywhere = NamedSharding(self._executor.mesh, PartitionSpec())
        struct = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), _structs(state)
        )
        return self._read(step, meta, struct)

    def _step(self, step: int | None) -> int:
        found = self.latest if step is None else step
        if found is None or found not in self._manager.all_steps():
            raise FileNotFoundError(
                f"{self.folder} has no checkpoint{'' if step is None else f' of step {step}'}, only "
                f"{list(self._manager.all_steps())}"
            )
        return found

    def _meta(self, step: int) -> dict[str, Any]:
        """The description, after the check that it is of this run."""
        args = self._orbax.args
        sealed = self._reading(step, lambda: self._manager.restore(step, args=args.Composite(meta=args.JsonRestore())))
        meta = self._reading(step, lambda: _unsealed(sealed["meta"]))
        self._check(step, "identity", meta, identity(self._executor, self._more))
        if meta["form"] == IN_FLIGHT:
            self._check(step, "placement", meta, placement(self._executor))
        return meta

    def _check(self, step: int, part: str, meta: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        found = difference(meta[part], json.loads(json.dumps(here)))
        if found is not None:
            hint = " (a canonical checkpoint would go on with any executor and devices)" if part == "placement" else ""
            raise ValueError(f"checkpoint {self.folder / str(step)} is not of this run: {found}{hint}")

    def _read(self, step: int, meta: Mapping[str, Any], struct: PyTree) -> PyTree:
        flat, args = flatten(struct), self._orbax.args
        self._check(step, "leaves", meta, described(flat))
        items = args.Composite(state=args.StandardRestore(flat))
        read: Flat = self._reading(step, lambda: self._manager.restore(step, args=items)["state"])
        found = difference(meta["fingerprints"], numbers(_fingerprints(self._executor.mesh)(read)))
        if found is not None:
            raise self._damaged(step, f"the fingerprint of {found}")
        return unflatten(read, struct)

    def _reading(self, step: int, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # a damaged file shows as any of them
            raise self._damaged(step, _brief(error)) from error

    def _damaged(self, step: int, why: str) -> ValueError:
        older = sorted(other for other in self._manager.all_steps() if other < step)
        advice = f"delete it to go on from step {older[-1]}" if older else "there is no older one"
        return ValueError(f"checkpoint {self.folder / str(step)} is damaged: {why}; {advice}")


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError("checkpoints need orbax-checkpoint: pip install 'cyclic_jax[experiments]'") from error
    return orbax.checkpoint


def _structs(tree: PyTree) -> PyTree:
    return jax.eval_shape(lambda tree: tree, tree)


@lru_cache
def _fingerprints(mesh: Mesh) -> Callable[[Flat], Flat]:
    """Compiled once for each mesh and tree; every process gets all of them."""
    return jax.jit(fingerprint, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _versions() -> dict[str, str]:
    from cyclic_jax import __version__

    return {"cyclic_jax": __version__, "jax": jax.__version__}


def _sealed(meta: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps(meta, sort_keys=True)
    return {"meta": json.loads(text), "checksum": _checksum(text)}


def _unsealed(sealed: Mapping[str, Any]) -> dict[str, Any]:
    if _checksum(json.dumps(sealed["meta"], sort_keys=True)) != sealed["checksum"]:
        raise ValueError("its description does not fit its checksum")
    return sealed["meta"]


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())


def _brief(error: BaseException) -> str:
    """The first line of an error that may print pages."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error).strip() else ''}"
