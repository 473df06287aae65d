"""The benchmark of state memory: its formula is what the machines hold."""

import pytest

from benchmarks import state_memory
from benchmarks.state_memory import Config, build, formula, held


@pytest.mark.parametrize("kind", state_memory.KINDS)
def test_states_are_as_the_formula_says(kind):
    """But for counts of steps, and padding of shards to a multiple of N."""
    config = Config(image_size=8, num_classes=10, batch_per_worker=2)
    machine, carry, _ = build(config, "tiny_resnet", 4, kind)
    assert held(carry) == pytest.approx(formula(machine.model, 4, kind), rel=1e-3)
    others = {other: formula(machine.model, 4, other) for other in ("dp", "zero1", "fsdp", "v2 zero")}
    assert sum(size == pytest.approx(held(carry), rel=0.05) for size in others.values()) == 1


def test_an_unknown_program():
    with pytest.raises(SystemExit, match="kinds are dp, zero1, fsdp, v1 zero, v2 zero, got v3 zero"):
        state_memory.main(Config(kinds=("dp", "v3 zero")))


def test_a_row():
    """Of a process of its own."""
    config = Config(image_size=8, num_classes=10, batch_per_worker=2)
    cells = [cell.strip() for cell in state_memory.row(config, "tiny_resnet", 2, "fsdp").strip("| ").split("|")]
    assert cells[:3] == ["tiny_resnet", "2", "fsdp"]
    assert float(cells[3]) == pytest.approx(float(cells[4]), abs=0.1)
    assert float(cells[7]) == pytest.approx(float(cells[5]) + float(cells[6]), abs=0.11)
