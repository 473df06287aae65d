"""The table of activation memory, on small models."""

import json

import pytest

from experiments import memory

SMALL = ["--models", "tiny_resnet", "--image-size", "16", "--batch-per-worker", "4", "--num-classes", "10"]


def test_the_command_line(tmp_path, capsys):
    memory.main([*SMALL, "--num-workers", "2", "4", "--dtypes", "float32", "bfloat16", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| model | dtype | N | S | peak dp (MiB)")
    rows = json.loads((tmp_path / "memory.json").read_text())
    assert [(r["num_workers"], r["dtype"]) for r in rows] == [
        (2, "float32"),
        (4, "float32"),
        (2, "bfloat16"),
        (4, "bfloat16"),
    ]
    for r in rows:
        assert r["ratio"] == max(r["cdp_curve"]) / r["dp_bytes"] < 1
        assert r["accumulation_bytes"] == r["dp_bytes"] / r["num_workers"] == max(r["dp_curve"]) / r["num_workers"]
    assert rows[0]["dp_bytes"] > rows[2]["dp_bytes"]
    for name in ("memory.png", "schedule.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_stages_where_there_are_fewer_layers_than_workers():
    assert [memory.stages_for(n, 18) for n in (4, 18, 32, 64)] == [4, 18, 16, None]
    row = memory.row(memory.Config(image_size=16, batch_per_worker=4, num_classes=10), "tiny_resnet", "float32", 32)
    assert (row.granularity, row.num_stages) == ("layer", 8)
    assert row.unevenness < 1.1


def test_measured_beside_predicted(tmp_path, capsys):
    options = [
        "--num-workers",
        "2",
        "--dtypes",
        "float32",
        "--measure",
        "--out",
        str(tmp_path),
        "--partition",
        "activations",
    ]
    memory.main([*SMALL, *options])
    (row,) = json.loads((tmp_path / "memory.json").read_text())
    assert row["compiled_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.5)
    assert "as compiled" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-workers", "0"], "num_workers=0"),
        (["--batch-per-worker", "0"], "batch_per_worker=0"),
        (["--models", "resnet49"], "unknown model 'resnet49'"),
    ],
)
def test_bad_input(options, message, tmp_path):
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        memory.main([*SMALL, *options, "--out", str(tmp_path)])
