"""The layers of the package hold: who may import whom."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "cyclic_jax").rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layers"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(names: set[str], package: str) -> set[str]:
    return {name for name in names if name == package or name.startswith(package + ".")}


def test_schedule_and_rules_import_no_jax():
    pure = [
        ROOT / "cyclic_jax/rules.py",
        ROOT / "cyclic_jax/balance.py",
        *sorted((ROOT / "cyclic_jax/schedule").glob("*.py")),
    ]
    assert len(pure) > 4
    for path in pure:
        names = imports(path)
        assert not {n for n in names if n.split(".")[0] in {"jax", "flax", "optax"}}, path
        known = [within(names, f"cyclic_jax.{name}") for name in ("schedule", "rules", "balance")]
        assert within(names, "cyclic_jax") == set().union(*known), path


def test_reference_and_executors_do_not_know_each_other():
    reference = imports(ROOT / "cyclic_jax/reference.py")
    assert not within(reference, "cyclic_jax.executors")
    assert not within(reference, "cyclic_jax.delay")
    assert not within(reference, "cyclic_jax.schedule")
    executors = sorted((ROOT / "cyclic_jax/executors").glob("*.py"))
    assert executors
    for path in executors:
        known = imports(path)
        assert not within(known, "cyclic_jax.reference"), path
        assert not within(known, "cyclic_jax.memory") | within(known, "cyclic_jax.plot"), path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_library_never_imports_experiments_or_tests(path):
    assert not within(imports(path), "experiments") | within(imports(path), "tests")


def test_the_check_sees_a_forbidden_import(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from cyclic_jax.executors import base\n")
    assert within(imports(bad), "cyclic_jax.executors")
