"""Compiler flags for tests, where most of the time goes into compiling tiny programs that run a few steps."""

import importlib.util
import mmap
import os
from pathlib import Path

FLAGS = ("--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false")


def compile_quickly() -> None:
    """Add to ``XLA_FLAGS`` those of ``FLAGS`` that the installed jaxlib knows: with one that it does not it would not start."""
    known = [flag for flag in FLAGS if _is_known(flag)]
    os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *known])


def _is_known(flag: str) -> bool:
    spec = importlib.util.find_spec("jaxlib")
    folders = spec.submodule_search_locations if spec else None
    names = [path for folder in folders or () for path in Path(folder).glob("*.so")]
    return any(_holds(path, flag.removeprefix("--").split("=")[0].encode()) for path in names)


def _holds(path: Path, name: bytes) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(name) >= 0
