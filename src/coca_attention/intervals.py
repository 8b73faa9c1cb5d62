"""Intervals of figures: bootstrap (documents, prompts), Wilson (shares), Student (trends)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

LARGEST_EXPONENT = 700.0
"""exp of more overflows float64."""


@dataclass(frozen=True)
class DocumentScore:
    """Summed negative log-likelihood, in nats, of the scored tokens of one document."""

    id: str
    nats: float
    tokens: int


def perplexity(scores: Iterable[DocumentScore]) -> float:
    """exp(nats / tokens) over all documents; every token has the same weight. inf on overflow."""
    scores = list(scores)
    mean = sum(score.nats for score in scores) / sum(score.tokens for score in scores)
    return math.exp(mean) if mean < LARGEST_EXPONENT else math.inf


def bootstrap_interval(
    scores: Sequence[DocumentScore], *, seed: int, resamples: int = 2000, level: float = 0.95
) -> tuple[float, float] | None:
    """Percentile interval of the perplexity under resampling of whole documents.

    Args:
        scores: One score per document.
        seed: Random seed of the resampling.
        resamples: Number of bootstrap samples.
        level: Share of bootstrap samples inside the interval.

    Returns:
        Lower and upper end, or None for fewer than two documents or infinite nats.
    """
    if len(scores) < 2 or not all(math.isfinite(score.nats) for score in scores):
        return None
    return _interval(_resampled_means(scores, seed, resamples), level)


def paired_ratio_interval(
    first: Sequence[DocumentScore],
    second: Sequence[DocumentScore],
    *,
    seed: int,
    resamples: int = 2000,
    level: float = 0.95,
) -> tuple[float, float] | None:
    """Percentile interval of the ratio of two perplexities on the same documents.

    Each bootstrap sample uses the same documents for both. What makes a document hard for every
    model cancels, so the interval is far narrower than those of the two perplexities.

    Args:
        first: Scores of the numerator.
        second: Scores of the denominator, for the same documents in the same order.
        seed: Random seed of the resampling.
        resamples: Number of bootstrap samples.
        level: Share of bootstrap samples inside the interval.

    Returns:
        Lower and upper end, or None for fewer than two documents or infinite nats.

    Raises:
        ValueError: If the documents or their numbers of scored tokens differ.
    """
    if [(s.id, s.tokens) for s in first] != [(s.id, s.tokens) for s in second]:
        raise ValueError("a paired interval needs the same scored tokens of the same documents")
    if len(first) < 2 or not all(math.isfinite(score.nats) for score in (*first, *second)):
        return None
    means = [_resampled_means(scores, seed, resamples) for scores in (first, second)]
    return _interval(means[0] - means[1], level)


def mean_interval(
    values: Sequence[float], *, seed: int, resamples: int = 2000, level: float = 0.95
) -> tuple[float, float] | None:
    """Bootstrap percentile interval of a mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    scores = [DocumentScore("", value, 1) for value in values]
    means = _resampled_means(scores, seed, resamples)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def wilson_interval(hits: int, trials: int, z: float = 1.959964) -> tuple[float, float] | None:
    """Wilson's score interval of a share (95 % by default); None without trials.

    Unlike the normal approximation it is valid for shares near 0 and 1, and for few trials.
    """
    if trials == 0:
        return None
    share, square = hits / trials, z * z / trials
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / trials + square / (4 * trials))
    low = 0.0 if hits == 0 else max(0.0, middle - half)
    high = 1.0 if hits == trials else min(1.0, middle + half)
    return low, high


@dataclass(frozen=True)
class PowerLaw:
    """y = a x^b, fitted to log y by least squares.

    Attributes:
        exponent: b.
        half: Half the width of the exponent's 95 % interval.
        centre: Mean of log x and of log y.
        spread: Sum of squares of log x about their mean.
        error: Standard error of a run times Student's 97.5 % quantile.
        runs: Number of runs fitted.
    """

    exponent: float
    half: float
    centre: tuple[float, float]
    spread: float
    error: float
    runs: int

    def at(self, x: float) -> tuple[float, float, float]:
        """The trend at x and the ends of its 95 % interval, which holds if the law does."""
        away = math.log(x) - self.centre[0]
        middle = self.centre[1] + self.exponent * away
        half = self.error * math.sqrt(1 / self.runs + away**2 / self.spread)
        low, high = (min(middle + sign * half, LARGEST_EXPONENT) for sign in (-1, 1))
        return math.exp(min(middle, LARGEST_EXPONENT)), math.exp(low), math.exp(high)


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw | None:
    """The power law of positive values, or None for fewer than three runs or two different x."""
    if len(x) < 3 or len(set(x)) < 2 or not all(map(math.isfinite, y)):
        return None
    across, up = np.log(x), np.log(y)
    centre = float(across.mean()), float(up.mean())
    across, up = across - centre[0], up - centre[1]
    spread = float(across @ across)
    exponent = float(across @ up) / spread
    rest = up - exponent * across
    freedom = len(x) - 2
    error = math.sqrt(float(rest @ rest) / freedom) * _student(freedom)
    return PowerLaw(exponent, error / math.sqrt(spread), centre, spread, error, len(x))


def _student(freedom: int) -> float:
    """Student's 97.5 % quantile, to half a percent, from draws of a fixed seed."""
    draws = np.random.default_rng(0).standard_t(freedom, 2_000_000)
    return float(np.quantile(np.abs(draws), 0.95))


def _resampled_means(scores: Sequence[DocumentScore], seed: int, resamples: int) -> np.ndarray:
    """Nats per token of every bootstrap sample, (resamples,); the seed fixes the documents."""
    nats = np.array([score.nats for score in scores])
    tokens = np.array([score.tokens for score in scores], dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(len(scores), size=(resamples, len(scores)))
    return nats[drawn].sum(axis=1) / tokens[drawn].sum(axis=1)


def _interval(nats: np.ndarray, level: float) -> tuple[float, float]:
    """The central part of the samples, converted from nats to perplexity."""
    low, high = np.quantile(nats, [(1 - level) / 2, (1 + level) / 2])
    return float(np.exp(min(low, LARGEST_EXPONENT))), float(np.exp(min(high, LARGEST_EXPONENT)))
