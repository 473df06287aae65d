"""What is seen of a study while it trains: evaluations, the profiler's trace."""

import dataclasses

import pytest

from experiments.running import run_all
from experiments.training import train
from tests.experiments.studies import lines, losses, study


def test_evaluation_while_training_goes_on(alone, tmp_path, capsys):
    """It changes no loss, and what it sees is the newest complete step: one less than has begun."""
    run_all(study(tmp_path, checkpoint_dir=None, eval_every=5))
    assert losses(tmp_path) == losses(alone)
    first, second = lines(tmp_path, "evaluation")
    assert [first["step"], first["begun"], second["step"], second["begun"]] == [4, 5, 9, 10]
    short = train(dataclasses.replace(study(tmp_path), total_steps=4), "cdp-v2", 0, lambda step, loss: None)
    assert first["loss"] == pytest.approx(short.test_loss, rel=1e-5)
    assert first["accuracy"] == pytest.approx(short.test_accuracy)
    assert abs(second["loss"] / short.test_loss - 1) > 1e-3
    assert "2 evaluations during training, best" in capsys.readouterr().err


def test_a_trace_names_what_runs(alone, tmp_path):
    run_all(study(tmp_path, checkpoint_dir=None, profile=tmp_path / "trace"))
    assert losses(tmp_path) == losses(alone)
    (trace,) = (tmp_path / "trace/cdp-v2-seed0").rglob("*.xplane.pb")
    content = trace.read_bytes()
    assert all(name in content for name in (b"/F2/", b"/B1/", b"/update0/", b"/send/gradient/"))
