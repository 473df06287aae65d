"""The language experiment, from its command line to its files."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

import cyclic_jax as cj
from experiments import language, report
from experiments.config import Options
from experiments.data.text import python_topics
from experiments.training import evaluate, initial_state

SMALL = language.Config(
    context=16,
    width=16,
    depth=1,
    heads=2,
    num_workers=2,
    num_stages=2,
    batch_per_worker=16,
    steps=120,
    lr=0.01,
    warmup_epochs=0.0,
    seeds=1,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return language.run_study(dataclasses.replace(SMALL, out=folder)), folder


def lines(folder: Path, kind: str) -> list[dict]:
    every = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [line for line in every if line["kind"] == kind]


def test_every_rule_learns(finished):
    """From ln V to below the loss of counting characters, in a few steps."""
    _, folder = finished
    unigram, bigram = (line["test_loss"] for line in lines(folder, "baseline"))
    results = {line["rule"]: line for line in lines(folder, "result")}
    assert list(results) == list(SMALL.rules)
    assert 2 < bigram < unigram < math.log(100)
    assert max(line["test_loss"] for line in results.values()) < unigram - 0.2
    first = [line["loss"] for line in lines(folder, "step") if line["step"] == 0]
    np.testing.assert_allclose(first, math.log(len(python_topics(16).alphabet)), atol=0.1)


def test_the_staggered_executor_sees_what_the_synchronous_one_sees(finished):
    _, folder = finished
    loss = {(line["rule"], line["step"]): line["loss"] for line in lines(folder, "step")}
    assert len(loss) == 4 * SMALL.steps
    for step in range(20):
        assert loss["cdp-v2@replicated", step] == pytest.approx(loss["cdp-v2", step], rel=1e-4)
    assert loss["dp", 0] == pytest.approx(loss["cdp-v1", 0], rel=1e-6)
    assert len({loss[rule, 1] for rule in ("dp", "cdp-v1", "cdp-v2")}) == 3


def test_the_table_is_what_the_lines_say(finished):
    table, folder = finished
    rows = [[cell.strip() for cell in row.split("|")[1:4]] for row in table.splitlines()[2:]]
    results = lines(folder, "result")
    executors = ["synchronous"] * 3 + ["replicated"]
    want = [[r["rule"], e, f"{r['test_loss']:.3f}"] for r, e in zip(results, executors, strict=True)]
    want += [[b["name"], "none", f"{b['test_loss']:.3f}"] for b in lines(folder, "baseline")]
    assert rows == want


def test_files_are_written(finished):
    _, folder = finished
    assert (folder / "loss.png").stat().st_size > 10_000
    assert len(list((folder / "tensorboard").glob("*/events*"))) == 4
    assert lines(folder, "config")[0]["context"] == SMALL.context


def test_evaluation_is_the_mean_over_the_test_split():
    study = language.prepare(dataclasses.replace(SMALL, rules=("dp",)))
    executor, data = study.executors["dp"], study.data
    snapshot = executor.snapshot(executor.init(initial_state(study, executor, 0)))
    accuracy, loss = evaluate(study, executor, snapshot)
    count = (len(data.test) - 1) // 16 * 16  # whole windows: the last one is checked by its size
    x, y = data.test[:count].reshape(-1, 16), data.test[1 : count + 1]
    apply = jax.jit(lambda params, state: study.model.apply(params, state, x, train=False)[0])
    logits = apply(snapshot.params, snapshot.model_state).reshape(count, -1)
    losses = -np.asarray(jax.nn.log_softmax(logits))[np.arange(count), y]
    assert loss == pytest.approx(losses.mean(), rel=1e-4)
    assert accuracy == pytest.approx((np.asarray(logits).argmax(-1) == y).mean(), abs=1e-3)


@pytest.mark.parametrize("executor", list(cj.executors.EXECUTORS))
def test_any_executor_by_its_name(executor):
    """Built and lowered on shapes: integers in, no gradient for them."""
    study = language.prepare(dataclasses.replace(SMALL, rules=(f"cdp-v2@{executor}",), dtype="bfloat16", dropout=0.1))
    (made,) = study.executors.values()
    state = jax.eval_shape(lambda: initial_state(study, made, 0))
    x, y = next(study.data.batches(SMALL.global_batch, 0))
    assert "bf16" in made.lower(made.carry_struct(state), (x, y)).as_text()


@pytest.mark.slow
def test_every_rule_is_clearly_below_the_bigram_baseline(tmp_path):
    """The default configuration, a few minutes."""
    language.run_study(language.Config(out=tmp_path))
    bigram = {line["name"]: line["test_loss"] for line in lines(tmp_path, "baseline")}["bigram, add-one"]
    assert max(line["test_loss"] for line in lines(tmp_path, "result")) < bigram - 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 0}, "context=0"),
        ({"context": 50_000}, "context=50000 does not fit the test split"),
        ({"heads": 3}, "heads=3 must divide width=16"),
        ({"dropout": 1.5}, "dropout=1.5"),
        ({"depth": 0}, "depth=0"),
        ({"num_stages": 5, "num_workers": 5}, "num_stages=5 does not fit a model of 3 layers"),
        ({"rules": ("cdp_v2",)}, "unknown rule 'cdp_v2': did you mean 'cdp-v2'"),
        ({"rules": ("cdp-v2@replicate",)}, "unknown executor 'replicate': did you mean 'replicated'"),
        ({"executor": "sync"}, "unknown executor 'sync': did you mean 'synchronous'"),
        ({"optimizer": "adam"}, "did you mean 'adamw'"),
        ({"steps": 0}, "steps=0: it must be positive"),
        ({"warmup_epochs": -1.0}, "warmup_epochs=-1.0"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        language.prepare(dataclasses.replace(SMALL, **change))


def test_the_command_line(tmp_path, capsys):
    sizes = [
        "--context",
        "8",
        "--width",
        "8",
        "--depth",
        "1",
        "--heads",
        "1",
        "--num-workers",
        "1",
        "--num-stages",
        "1",
    ]
    language.main([*sizes, "--steps", "2", "--rules", "cdp-v2", "--devices", "10", "--out", str(tmp_path)])
    printed = capsys.readouterr()
    assert printed.out.startswith("| rule | executor | test loss (nats/char) | final train loss | time (s) |\n")
    assert "PSF licence" in printed.err
    assert "1 workers x 8 rows, 2 steps, synchronous executor unless" in printed.err
    with pytest.raises(SystemExit, match="error: heads=3 must divide width=64"):
        language.main(["--heads", "3", "--devices", "10", "--out", str(tmp_path)])


def test_it_has_every_option_that_studies_share():
    assert {f.name for f in dataclasses.fields(Options)} < {f.name for f in dataclasses.fields(language.Config)}


def test_spread_over_seeds():
    runs = [report.Run("dp", seed, losses=[2.0], test_loss=loss, seconds=1.0) for seed, loss in enumerate((1.0, 3.0))]
    table = report.loss_table(runs, {"dp": "synchronous"}, {"bigram": 2.5})
    assert table.splitlines()[2:] == [
        "| dp | synchronous | 2.000 ± 1.414 | 2.0000 | 1.0 |",
        "| bigram | none | 2.500 | | |",
    ]
