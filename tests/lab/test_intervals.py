"""Intervals of perplexities and shares."""

import math

import numpy as np
import pytest

from coca_lab.intervals import (
    DocumentScore,
    differences,
    mean_interval,
    perplexity,
    perplexity_interval,
    student,
    wilson_interval,
)
from covering import mostly_slow

SCORES = [DocumentScore(str(i), 100.0 + 10 * i, 50) for i in range(20)]


def test_tokens_weigh_the_same_and_not_windows_or_documents():
    scores = [DocumentScore("long", 90.0, 90), DocumentScore("short", 30.0, 10)]
    assert perplexity(scores) == pytest.approx(math.exp(1.2))


def test_the_interval_is_students_over_documents():
    # Nats per token: mean 3.9, error 1.183 / sqrt(19), 19 degrees of freedom.
    half = 2.09302 * 0.2 * math.sqrt((20**2 - 1) / 12 * 20 / 19) / math.sqrt(19)
    interval = perplexity_interval(SCORES)
    assert interval == pytest.approx((math.exp(3.9 - half), math.exp(3.9 + half)), rel=1e-5)
    same = [DocumentScore(str(i), 100.0, 50) for i in range(20)]
    assert perplexity_interval(same) == pytest.approx((math.exp(2), math.exp(2)))
    assert perplexity_interval(SCORES[:1]) is None
    assert perplexity_interval([*SCORES, DocumentScore("bad", math.inf, 50)]) is None


def test_a_document_with_most_tokens_leaves_fewer_degrees_of_freedom():
    """The error is that of the other documents' mean, the quantile that of three documents."""
    means, tokens = [3.0, 2.0, 4.0, 2.5, 3.5, 3.0], [500, 100, 100, 100, 100, 100]
    scores = [DocumentScore("", m * t, t) for m, t in zip(means, tokens, strict=True)]
    errors = [tokens[i] * (m - 3.0) / (1000 - tokens[i]) for i, m in enumerate(means)]
    effective = 1000**2 / sum(t**2 for t in tokens)
    half = student(effective - 1) * math.hypot(*errors)
    assert effective == pytest.approx(3.333, abs=1e-3)
    interval = perplexity_interval(scores)
    assert interval == pytest.approx((math.exp(3 - half), math.exp(3 + half)))


def test_documents_without_tokens_do_not_count():
    assert perplexity_interval([*SCORES, DocumentScore("", 0.0, 0)]) == perplexity_interval(SCORES)
    assert perplexity_interval([SCORES[0], DocumentScore("", 0.0, 0)]) is None


@pytest.mark.parametrize("documents", mostly_slow([2, 4, 8, 12, 20, 30], [2, 8]))
def test_intervals_contain_the_truth_as_often_as_they_say(documents):
    """Documents of unequal length, skewed nats: results/README.md has other populations."""
    generator, samples = np.random.default_rng(documents), 1000
    hits = {"perplexity": 0, "ratio": 0}
    for _ in range(samples):
        tokens = np.exp(generator.normal(7, 0.5, documents))
        hard = np.exp(generator.normal(1.0, 0.15, documents))
        gain = generator.normal(0.05, 0.02, documents)
        first, second = (
            [DocumentScore("", n * t, t) for n, t in zip(nats, tokens, strict=True)]
            for nats in (hard, hard - gain)
        )
        intervals = perplexity_interval(first), perplexity_interval(differences(first, second))
        truths = math.exp(math.exp(1 + 0.15**2 / 2)), math.exp(0.05)
        for name, interval, truth in zip(hits, intervals, truths, strict=True):
            hits[name] += interval[0] <= truth <= interval[1]
    # Two standard errors of 1,000 samples about 0.93 and 0.97.
    assert all(0.914 <= count / samples <= 0.981 for count in hits.values()), hits


def test_the_paired_interval_leaves_out_what_documents_share():
    others = [DocumentScore(str(i), 95.0 + 10 * i + i % 3, 50) for i in range(20)]
    low, high = perplexity_interval(differences(SCORES, others))
    assert low < perplexity(SCORES) / perplexity(others) < high
    alone = perplexity_interval(SCORES)
    assert high / low < 1.02 < alone[1] / alone[0]
    assert perplexity_interval(differences(SCORES[:1], others[:1])) is None
    with pytest.raises(ValueError, match="same scored tokens of the same documents"):
        differences(SCORES, others[1:])


def test_wilson_intervals():
    assert wilson_interval(0, 0) is None
    low, high = wilson_interval(50, 100)
    assert (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson_interval(0, 10) == (0.0, pytest.approx(0.2775, abs=1e-4))
    assert wilson_interval(10, 10) == (pytest.approx(0.7225, abs=1e-4), 1.0)
    for trials in range(1, 300):  # no 4.9e-17 in place of 0
        assert wilson_interval(0, trials)[0] == 0 and wilson_interval(trials, trials)[1] == 1


def test_the_interval_of_a_mean():
    low, high = mean_interval([1.0, 2.0, 3.0])
    half = 4.302653 / math.sqrt(3)  # a standard error of 1 / sqrt(3), two degrees of freedom
    assert (low, high) == pytest.approx((2 - half, 2 + half))
    assert mean_interval([0.3, 0.3]) == pytest.approx((0.3, 0.3))
    assert mean_interval([1.0]) is None
