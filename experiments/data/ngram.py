"""What a text costs without a network: the losses of counting characters and pairs of characters, with add-one smoothing."""

import numpy as np


def unigram_loss(train: np.ndarray, test: np.ndarray, vocabulary: int) -> float:
    """Mean of −ln p(b) over the test characters b but the first, in nats per character.

    p(b) = (count(b) + 1) / (n + V), counted on ``train``.

    Args:
        train: integers ``[n]`` in ``[0, V)``.
        test: integers ``[m]``, m ≥ 2.
        vocabulary: V.

    >>> round(float(np.exp(unigram_loss(np.array([0, 0]), np.array([0, 1]), 2))), 6)  # p(1) = (0 + 1) / (2 + 2)
    4.0
    """
    counts = np.bincount(train, minlength=vocabulary) + 1
    return float(-np.log(counts / counts.sum())[test[1:]].mean())


def bigram_loss(train: np.ndarray, test: np.ndarray, vocabulary: int) -> float:
    """Mean of −ln p(b | a) over the neighbours a, b of the test, in nats per character.

    p(b | a) = (count(a, b) + 1) / (count(a, ·) + V), counted on ``train``. Arguments as :func:`unigram_loss`.
    """
    pairs = np.bincount(train[:-1].astype(np.int64) * vocabulary + train[1:], minlength=vocabulary**2)
    counts = pairs.reshape(vocabulary, vocabulary) + 1
    log_probabilities = np.log(counts / counts.sum(axis=1, keepdims=True))
    return float(-log_probabilities[test[:-1], test[1:]].mean())
