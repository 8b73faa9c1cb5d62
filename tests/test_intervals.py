"""Intervals of perplexities and shares."""

import math

import numpy as np
import pytest

from coca_attention.intervals import (
    DocumentScore,
    bootstrap_interval,
    fit_power_law,
    mean_interval,
    paired_ratio_interval,
    perplexity,
    wilson_interval,
)


def test_tokens_weigh_the_same_and_not_windows_or_documents():
    scores = [DocumentScore("long", 90.0, 90), DocumentScore("short", 30.0, 10)]
    assert perplexity(scores) == pytest.approx(math.exp(1.2))


def test_the_interval_is_seeded_and_covers_the_spread_of_documents():
    scores = [DocumentScore(str(i), 100.0 + 10 * i, 50) for i in range(20)]
    interval = bootstrap_interval(scores, seed=3)
    assert interval == bootstrap_interval(scores, seed=3)
    assert interval != bootstrap_interval(scores, seed=4)
    assert interval is not None
    assert interval[0] < perplexity(scores) < interval[1]
    same = [DocumentScore(str(i), 100.0, 50) for i in range(20)]
    assert bootstrap_interval(same, seed=0) == pytest.approx((math.exp(2), math.exp(2)))
    assert bootstrap_interval(scores[:1], seed=0) is None


def test_the_paired_interval_leaves_out_what_documents_share():
    first = [DocumentScore(str(i), 100.0 + 10 * i, 50) for i in range(20)]
    second = [DocumentScore(str(i), 95.0 + 10 * i + i % 3, 50) for i in range(20)]
    interval = paired_ratio_interval(first, second, seed=0)
    assert interval is not None
    assert interval[0] < perplexity(first) / perplexity(second) < interval[1]
    alone = bootstrap_interval(first, seed=0)
    assert alone is not None
    assert interval[1] / interval[0] < 1.02 < alone[1] / alone[0]
    assert paired_ratio_interval(first[:1], second[:1], seed=0) is None
    with pytest.raises(ValueError, match="same scored tokens of the same documents"):
        paired_ratio_interval(first, second[1:], seed=0)


def test_wilson_intervals():
    assert wilson_interval(0, 0) is None
    low, high = wilson_interval(50, 100)
    assert (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson_interval(0, 10) == (0.0, pytest.approx(0.2775, abs=1e-4))
    assert wilson_interval(10, 10) == (pytest.approx(0.7225, abs=1e-4), 1.0)


def test_the_interval_of_a_mean():
    values = [0.0, 1.0] * 50
    low, high = mean_interval(values, seed=0)
    # Standard error 0.05.
    assert low == pytest.approx(0.402, abs=0.02) and high == pytest.approx(0.598, abs=0.02)
    assert mean_interval(values, seed=0) == (low, high)
    assert mean_interval([0.3, 0.3], seed=1) == pytest.approx((0.3, 0.3))
    assert mean_interval([1.0], seed=0) is None


def test_a_power_law_is_found_and_its_interval_covers_it():
    sizes = [1e5, 2e5, 4e5, 8e5]
    fit = fit_power_law(sizes, [3.0 * n**-0.1 for n in sizes])
    assert fit is not None and fit.exponent == pytest.approx(-0.1)
    assert fit.at(7e9) == pytest.approx((3.0 * 7e9**-0.1,) * 3)
    generator = np.random.default_rng(0)
    covered = dict.fromkeys((4e5, 3.5e8), 0)
    for _ in range(200):
        noisy = [3.0 * n**-0.1 * math.exp(generator.normal(0, 0.05)) for n in sizes]
        fit = fit_power_law(sizes, noisy)
        assert fit is not None
        for size in covered:
            _, low, high = fit.at(size)
            covered[size] += low <= 3.0 * size**-0.1 <= high
    assert all(183 <= hits <= 198 for hits in covered.values()), covered


def test_a_power_law_needs_three_runs_of_two_sizes_and_finite_figures():
    assert fit_power_law([1e5, 2e5], [1.0, 2.0]) is None
    assert fit_power_law([1e5] * 3, [1.0, 2.0, 3.0]) is None
    assert fit_power_law([1e5, 2e5, 3e5], [1.0, math.inf, 3.0]) is None
