"""Text as data: alphabet, splits, windows that depend on (seed, step) alone, and the losses of counting."""

import itertools
import sys
import types

import numpy as np
import pytest

from experiments.data.ngram import bigram_loss, unigram_loss
from experiments.data.text import make_text, python_topics

SENTENCE = "the quick brown fox jumps over the lazy dog. "
CONTEXT = 5


@pytest.fixture(scope="module")
def text():
    """Characters in an order that no window repeats by chance."""
    rng = np.random.default_rng(0)
    return make_text("".join(rng.choice(list(SENTENCE), 500)), context=CONTEXT)


def read(text, tokens) -> str:
    return "".join(text.alphabet[token] for token in tokens)


def test_splits_are_the_text_in_order():
    text = make_text(SENTENCE * 10, context=CONTEXT)
    whole = read(text, text.train) + read(text, text.test)
    assert whole == SENTENCE * 10
    assert len(text.test) == len(SENTENCE)
    assert text.alphabet == "".join(sorted(set(SENTENCE)))
    assert text.train.dtype == text.test.dtype == np.int32


def test_a_character_of_the_test_alone_has_a_token():
    text = make_text("a" * 90 + "b" * 10, context=CONTEXT)
    assert text.alphabet == "ab"
    assert (text.test == 1).all()


def test_windows_are_pieces_of_the_training_split(text):
    train = read(text, text.train)
    for x, y in itertools.islice(text.batches(4, seed=0), 10):
        assert x.shape == y.shape == (4, CONTEXT)
        for row, targets in zip(x, y, strict=True):
            assert read(text, row) + read(text, targets[-1:]) in train
            assert (row[1:] == targets[:-1]).all()


def test_every_window_comes_up_the_last_too():
    text = make_text("abcdefgh" + "!" * 8, context=CONTEXT, test_share=0.5)
    x, y = next(text.batches(200, seed=0))
    windows = {read(text, [*row, targets[-1]]) for row, targets in zip(x, y, strict=True)}
    assert windows == {"abcdef", "bcdefg", "cdefgh"}


def test_a_step_depends_on_seed_and_step_alone(text):
    steps = list(itertools.islice(text.batches(4, seed=3), 6))
    for start in (1, 5):
        resumed = next(text.batches(4, seed=3, start_step=start))
        np.testing.assert_array_equal(resumed, steps[start])
    assert not np.array_equal(steps[0], steps[1])
    assert not np.array_equal(steps[0], next(text.batches(4, seed=4)))


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_every_test_character_but_the_first_is_predicted_once(text, batch_size):
    batches = list(text.eval_batches(batch_size))
    assert {x.shape for x, _, _ in batches} == {(batch_size, CONTEXT)}
    valid = np.concatenate([v for _, _, v in batches])
    x, y = (np.concatenate([batch[i] for batch in batches])[valid] for i in (0, 1))
    np.testing.assert_array_equal(x, text.test[:-1])
    np.testing.assert_array_equal(y, text.test[1:])


def test_an_epoch_reads_as_many_characters_as_there_are(text):
    assert text.steps_per_epoch(4) == len(text.train) // (4 * CONTEXT) == 22
    assert text.steps_per_epoch(10_000) == 1


def test_the_topics_are_real_text():
    text = python_topics(64)
    assert len(text.train) + len(text.test) > 300_000
    assert len(text.train) / len(text.test) == pytest.approx(9, rel=1e-3)
    assert 'The "if" statement is used for conditional execution' in " ".join(read(text, text.train).split())
    assert f"CPython {sys.version.split()[0]}" in text.description
    assert "PSF licence" in text.description


def test_topics_are_in_alphabetical_order(monkeypatch):
    topics = {"b": "second" * 9, "a": "first" * 9}
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", types.SimpleNamespace(topics=topics))
    text = python_topics(2)
    assert read(text, text.train).startswith("first" * 9 + "\n" + "second")


def test_a_python_without_topics_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(FileNotFoundError, match="this Python comes without pydoc_data"):
        python_topics(64)


def test_counting_by_hand():
    """Training split aabab: a 3 times, b 2; pairs aa 1, ab 2, ba 1, bb 0; an alphabet of 3."""
    train, test = np.array([0, 0, 1, 0, 1]), np.array([0, 1, 1, 2])
    assert unigram_loss(train, test, 3) == pytest.approx(-np.log([3 / 8, 3 / 8, 1 / 8]).mean())
    assert bigram_loss(train, test, 3) == pytest.approx(-np.log([3 / 6, 1 / 4, 1 / 4]).mean())


def test_counting_knows_pairs_where_there_are_some():
    cycle = np.arange(3000) % 3
    assert unigram_loss(cycle, cycle, 3) == pytest.approx(np.log(3), abs=1e-3)
    assert bigram_loss(cycle, cycle, 3) < 0.01


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_text(SENTENCE, context=0), "context=0: it must be at least 1"),
        (lambda: make_text("abcde" * 4, context=20), "context=20 does not fit the train split of text: it has 18"),
        (lambda: make_text("abcde" * 4, context=2), "context=2 does not fit the test split of text: it has 2 .* 3 are"),
        (lambda: make_text("", context=2), "it has 0 characters"),
        (lambda: make_text(SENTENCE, context=2, test_share=0.0), "test_share=0.0"),
        (lambda: make_text(SENTENCE, context=2, test_share=1.0), "test_share=1.0"),
        (lambda: python_topics(10**6), "context=1000000 does not fit the train split of python_topics"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda text: text.batches(0, 0), "batch_size=0"),
        (lambda text: text.batches(1, -1), "seed=-1"),
        (lambda text: text.batches(1, 0, -1), "start_step=-1"),
        (lambda text: text.eval_batches(0), "batch_size=0"),
        (lambda text: text.steps_per_epoch(0), "batch_size=0"),
    ],
)
def test_streams_refuse_at_the_call(text, call, message):
    with pytest.raises(ValueError, match=message):
        call(text)
