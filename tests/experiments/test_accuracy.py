"""The accuracy experiment, on real data, from its command line to its files."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import cyclic_jax as cj
from experiments import accuracy, report
from experiments.config import PRESETS, Config, make_rule, published_mask
from experiments.optimizers import learning_rate
from experiments.training import evaluate, initial_state, prepare, train

SMALL = Config(
    rules=("dp", "cdp-v1", "cdp-v2"),
    model="residual_mlp",
    num_workers=2,
    num_stages=2,
    batch_per_worker=16,
    steps=100,
    seeds=2,
    lr=0.005,
)


@pytest.fixture(scope="module")
def study():
    return prepare(SMALL)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return accuracy.run_study(dataclasses.replace(SMALL, out=folder)), folder


def lines(folder: Path, kind: str) -> list[dict]:
    every = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [line for line in every if line["kind"] == kind]


def test_every_rule_learns_digits(finished):
    _, folder = finished
    results = lines(folder, "result")
    assert [(r["seed"], r["rule"]) for r in results] == [(s, r) for s in (0, 1) for r in SMALL.rules]
    assert min(r["test_accuracy"] for r in results) > 0.85


def test_the_table_is_what_the_lines_say(finished):
    table, folder = finished
    for row in table.splitlines()[2:]:
        rule, accuracy_text = (cell.strip() for cell in row.split("|")[1:3])
        values = [100 * r["test_accuracy"] for r in lines(folder, "result") if r["rule"] == rule]
        assert accuracy_text == f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"


def test_rules_share_their_start_and_part_where_they_should(finished):
    _, folder = finished
    loss = {(r["rule"], r["seed"], r["step"]): r["loss"] for r in lines(folder, "step")}
    assert len(loss) == 3 * 2 * SMALL.steps
    for seed in (0, 1):
        assert loss["dp", seed, 0] == loss["cdp-v1", seed, 0] == loss["cdp-v2", seed, 0]
        # cdp-v1 sees its first update one step late: its second loss is that of the same parameters
        assert len({loss[rule, seed, 1] for rule in SMALL.rules}) == 3
    assert loss["dp", 0, 0] != loss["dp", 1, 0]


def test_a_rule_may_name_its_executor():
    """The replicated executor sees what the synchronous one sees, in another order of operations."""
    config = dataclasses.replace(SMALL, rules=("cdp-v2", "cdp-v2@replicated"), steps=20, num_workers=4, num_stages=4)
    study, steps = prepare(config), []
    synchronous = train(study, "cdp-v2", 0, lambda step, loss: None)
    replicated = train(study, "cdp-v2@replicated", 0, lambda step, loss: steps.append(step))
    assert steps == list(range(20))  # late workers' losses are added to the step they belong to
    np.testing.assert_allclose(replicated.losses, synchronous.losses, rtol=1e-3)
    assert replicated.test_accuracy == pytest.approx(synchronous.test_accuracy, abs=0.02)


def test_streams_may_be_rounded():
    """In the zero executor alone: the others go on as they were."""
    config = dataclasses.replace(SMALL, rules=("cdp-v2", "cdp-v2@zero"), steps=20)
    exact, low = (prepare(dataclasses.replace(config, stream_dtype=dtype)) for dtype in ("float32", "bfloat16"))
    losses = {
        (name, k): train(s, name, 0, lambda *_: None).losses
        for name in config.rules
        for k, s in enumerate((exact, low))
    }
    assert losses["cdp-v2", 0] == losses["cdp-v2", 1]
    np.testing.assert_allclose(losses["cdp-v2@zero", 0], losses["cdp-v2", 0], rtol=1e-3)
    assert losses["cdp-v2@zero", 0] != losses["cdp-v2@zero", 1]
    np.testing.assert_allclose(losses["cdp-v2@zero", 1], losses["cdp-v2", 0], rtol=0.2)


def test_rounded_streams_need_an_executor_that_has_them():
    with pytest.raises(ValueError, match="stream_dtype='bfloat16': only the zero executor has streams"):
        prepare(dataclasses.replace(SMALL, stream_dtype="bfloat16"))


def test_pictures_and_scalars_are_written(finished):
    import matplotlib.pyplot as plt

    _, folder = finished
    picture = plt.imread(folder / "loss.png")
    assert picture.shape[:2] == (600, 1050)
    assert picture[..., :3].std() > 0.05
    assert len(list((folder / "tensorboard").glob("*/events*"))) == 6
    assert lines(folder, "config")[0]["lr"] == SMALL.lr


def test_the_same_seed_gives_the_same_numbers(study):
    first, again = (train(study, "cdp-v2", 3, lambda step, loss: None) for _ in range(2))
    assert first.losses == again.losses
    assert first.test_accuracy == again.test_accuracy


def test_evaluation_counts_every_test_image_once(study):
    executor = study.executors["dp"]
    snapshot = executor.snapshot(executor.init(initial_state(study, executor, 0)))
    images, labels = study.data.test.images, study.data.test.labels
    logits, _ = study.model.apply(snapshot.params, snapshot.model_state, images, train=False)
    got = evaluate(study, executor, snapshot)
    assert got[0] == pytest.approx((np.asarray(logits).argmax(-1) == labels).mean())
    log_probabilities = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(labels)), labels]
    assert got[1] == pytest.approx(-log_probabilities.mean(), rel=1e-5)


def test_a_loss_that_is_not_finite_ends_the_run():
    study = prepare(dataclasses.replace(SMALL, lr=1e30, schedule="constant"))
    with pytest.raises(
        FloatingPointError, match=r"the loss of worker \d at step [123] is (nan|inf) \(rule dp, seed 0\)"
    ):
        train(study, "dp", 0, lambda step, loss: None)


def test_presets_are_the_published_ones():
    assert len(PRESETS) == 5
    for name, (_, config) in PRESETS.items():
        if name == "digits":
            continue
        assert (config.num_workers, config.num_stages, config.partition) == (8, 4, "flops")
        assert (config.momentum, config.drop_every, config.schedule) == (0.9, 30, "step")
        cifar = name.startswith("cifar10")
        assert (config.batch_per_worker, config.lr) == ((64, 0.05) if cifar else (32, 0.1))
        assert (config.drop_factor, config.epochs) == ((0.2, 101) if cifar else (0.1, 91))
    decays = {name: config.weight_decay for name, (_, config) in PRESETS.items()}
    assert decays["cifar10-resnet18"] == 5e-4
    assert decays["cifar10-resnet50"] == 1e-3
    assert decays["imagenet-resnet50"] == 1e-4


def test_the_published_mask_is_not_one_a_schedule_can_run():
    mask = published_mask(8, 4)
    assert mask.sum() == 26
    assert mask[4:].all()
    feasible = cj.Schedule.cyclic(8, 4).feasible
    assert (mask & ~feasible).sum() == 10
    cj.UpdateRule.cdp_v2(8, 4).check(cj.Schedule.cyclic(8, 4))
    config = PRESETS["cifar10-resnet18"][1]
    assert (make_rule(config, "cdp-v2-published").fresh == mask).all()
    with pytest.raises(ValueError, match="only --executor synchronous can"):
        make_rule(dataclasses.replace(config, executor="replicated"), "cdp-v2-published")


def test_learning_rates():
    step = learning_rate(dataclasses.replace(SMALL, lr=1.0, schedule="step", drop_every=2.0, drop_factor=0.1), 10, 60)
    assert [float(step(t)) for t in (0, 19, 21, 41)] == pytest.approx([1, 1, 0.1, 0.01])
    cosine = learning_rate(dataclasses.replace(SMALL, lr=1.0, schedule="cosine", warmup_epochs=1.0), 10, 60)
    assert [float(cosine(t)) for t in (0, 5, 10, 35, 60)] == pytest.approx([0, 0.5, 1, 0.5, 0], abs=1e-6)
    constant = learning_rate(dataclasses.replace(SMALL, lr=0.3, schedule="constant"), 10, 60)
    assert float(constant(59)) == pytest.approx(0.3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_other_optimizers_train(optimizer):
    study = prepare(dataclasses.replace(SMALL, optimizer=optimizer, lr=3e-3, rules=("cdp-v2",)))
    run = train(study, "cdp-v2", 0, lambda step, loss: None)
    assert run.test_accuracy > 0.8


def test_bfloat16_compute_trains_float32_parameters():
    study = prepare(dataclasses.replace(SMALL, dtype="bfloat16", rules=("cdp-v2",)))
    state = initial_state(study, study.executors["cdp-v2"], 0)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype("float32")}
    assert train(study, "cdp-v2", 0, lambda step, loss: None).test_accuracy > 0.8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "digit"}, "unknown dataset 'digit'.*'digits'"),
        ({"model": "resnet19"}, "unknown model 'resnet19': did you mean 'resnet18'"),
        ({"rules": ("cdp_v2",)}, "unknown rule 'cdp_v2': did you mean 'cdp-v2'"),
        ({"rules": ()}, "rules is empty"),
        ({"optimizer": "adam"}, "unknown optimizer 'adam': did you mean 'adamw'"),
        ({"executor": "sync"}, "unknown executor 'sync': did you mean 'synchronous'"),
        ({"num_workers": 3}, r"num_workers=3 does not divide 2\*num_stages=4"),
        ({"num_stages": 20, "num_workers": 4}, "num_stages=20 does not fit a model of 8 layers"),
        ({"seeds": 0}, "seeds=0: it must be positive"),
        ({"steps": 0}, "steps=0"),
        ({"batch_per_worker": 2000}, "1437|1,437"),
        ({"rules": ("dp", "dp")}, "rule 'dp' is named 2 times"),
        ({"rules": ("cdp-v2-publishd",)}, "did you mean 'cdp-v2-published'"),
        ({"optimizer": "ADAMW"}, "did you mean 'adamw'"),
        ({"drop_every": 0.0}, "drop_every=0.0"),
        ({"warmup_epochs": -1.0}, "warmup_epochs=-1.0"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"devices": 0}, "devices=0"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        next(iter(prepare(dataclasses.replace(SMALL, **change)).data.batches(4000, 0)))


def test_the_command_line(tmp_path, capsys):
    options = [
        "--devices",
        "10",
        "--model",
        "residual_mlp",
        "--num-workers",
        "2",
        "--num-stages",
        "2",
        "--steps",
        "2",
        "--seeds",
        "1",
        "--rules",
        "cdp-v2",
    ]
    accuracy.main([*options, "--out", str(tmp_path)])
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == "| rule | test accuracy (%) | final loss | time (s) |"
    assert "2 workers x 16 rows, 2 steps, synchronous executor unless" in printed.err
    with pytest.raises(SystemExit, match="error: unknown rule 'cdp-v3'"):
        accuracy.main([*options, "--rules", "cdp-v3", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="error: num_workers=0"):
        accuracy.main(["--num-workers", "0"])
    with pytest.raises(SystemExit):
        accuracy.main(["no-such-preset"])


def test_one_seed_has_no_spread():
    run = report.Run("dp", 0, losses=[1.0], test_accuracy=0.5, seconds=1.0)
    assert report.table([run]).splitlines()[-1] == "| dp | 50.00 | 1.0000 | 1.0 |"
