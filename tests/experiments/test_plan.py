"""The planner's command line, on a small model."""

import json

import pytest

from experiments import plan

SMALL = ["--model", "tiny_resnet", "--image-size", "16", "--batch-per-worker", "4", "--num-classes", "10"]


def test_the_command_line(tmp_path, capsys):
    plan.main([*SMALL, "--devices", "6", "--out", str(tmp_path)])
    text = capsys.readouterr().out
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert rows[0][:3] == ["| way", "devices", "rings x stages"]
    assert len(rows) == 2 + 12
    times = [float(row[-2]) for row in rows[2:]]
    assert times == sorted(times)
    assert f"Best: {rows[2][0].strip('| ')}" in text
    found = json.loads((tmp_path / "plan.json").read_text())
    assert set(found) == {*(str(2**k) for k in range(11)), "6"}
    (parallel,) = [c for c in found["6"] if c["name"] == "model_parallel"]
    assert parallel["devices"] == 6
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_fits(tmp_path, capsys):
    plan.main([*SMALL, "--memory", "0.0001", "--out", str(tmp_path)])
    assert "Nothing fits." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "0"], "devices=0: it must be positive"),
        (["--bandwidth", "-1"], "bandwidth=.*: it must be positive"),
        (["--batch-per-worker", "0"], "batch_per_worker=0: at least 1"),
        (["--model", "resnet49"], "unknown model 'resnet49'"),
    ],
)
def test_bad_input(options, message, tmp_path):
    with pytest.raises(SystemExit, match=f"error: {message}"):
        plan.main([*SMALL, *options, "--out", str(tmp_path)])
