"""Intervals of figures: Student's t (documents, prompts, seeds, trends), Wilson (shares)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LARGEST_EXPONENT = 700.0
"""exp of more overflows float64."""
NORMAL = 1.959963984540054
"""97.5 % quantile of the normal distribution."""
FEW_DOCUMENTS = 10
"""With fewer, no interval is reliable: one unusual document may be missing from the sample."""


@dataclass(frozen=True)
class DocumentScore:
    """Summed negative log-likelihood, in nats, of the scored tokens of one document."""

    id: str
    nats: float
    tokens: int

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "DocumentScore":
        """That of a document of a result file, which has null where nats overflowed."""
        nats = math.inf if document["nats"] is None else document["nats"]
        return cls(document.get("id", ""), nats, document["tokens"])


def perplexity(scores: Iterable[DocumentScore]) -> float:
    """exp(nats / tokens) over all documents; every token has the same weight. inf on overflow."""
    mean = mean_nats(scores)
    return math.exp(mean) if mean < LARGEST_EXPONENT else math.inf


def mean_nats(scores: Iterable[DocumentScore]) -> float:
    """Nats per token over all documents; NaN without tokens."""
    scores = list(scores)
    tokens = sum(score.tokens for score in scores)
    return sum(score.nats for score in scores) / tokens if tokens else math.nan


def perplexity_interval(scores: Sequence[DocumentScore]) -> tuple[float, float] | None:
    """95 % interval of the perplexity of all documents like these; None for fewer than two."""
    return _exp_of(nats_interval(scores))


def paired_ratio_interval(
    first: Sequence[DocumentScore], second: Sequence[DocumentScore]
) -> tuple[float, float] | None:
    """95 % interval of the ratio of two perplexities on the same documents, else ValueError."""
    return _exp_of(nats_interval(differences(first, second)))


def differences(
    first: Sequence[DocumentScore], second: Sequence[DocumentScore]
) -> list[DocumentScore]:
    """What the first has more than the second on the same documents, else ValueError.

    What makes a document hard for every model cancels.
    """
    if [(s.id, s.tokens) for s in first] != [(s.id, s.tokens) for s in second]:
        raise ValueError("a paired interval needs the same scored tokens of the same documents")
    return [
        DocumentScore(a.id, a.nats - b.nats, a.tokens) for a, b in zip(first, second, strict=True)
    ]


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95 % interval of a mean, of prompts or seeds; None for fewer than two values."""
    from scipy.stats import sem

    if len(values) < 2:
        return None
    mean, half = sum(values) / len(values), float(sem(values)) * student(len(values) - 1)
    return mean - half, mean + half


def wilson_interval(hits: float, trials: int) -> tuple[float, float] | None:
    """Wilson's 95 % score interval of a share, near 0 and 1 too; None without trials.

    ``hits`` may be a sum of scores from 0 to 1, which vary at most as much as hits and misses do.
    """
    if trials == 0:
        return None
    return _wilson_end(hits / trials, trials), 1 - _wilson_end(1 - hits / trials, trials)


def _wilson_end(share: float, trials: int) -> float:
    """The lower end of Wilson's interval."""
    z = NORMAL**2 / trials
    half = NORMAL * math.sqrt((share * (1 - share) + z / 4) / trials)
    # (share + z / 2 - half) / (1 + z), without the difference, which for 0 misses 0 by round-off.
    return share**2 / (share + z / 2 + half)


@dataclass(frozen=True)
class PowerLaw:
    """y = a x^b, fitted to log y by least squares."""

    exponent: float  # b
    half: float  # half the width of its 95 % interval
    centre: tuple[float, float]  # means of log x and of log y
    half_at_centre: float  # half the width of the interval of log y there

    def at(self, x: float) -> tuple[float, float, float]:
        """The trend at x and the ends of its 95 % interval, which holds if the law does."""
        away = math.log(x) - self.centre[0]
        middle = self.centre[1] + self.exponent * away
        half = math.hypot(self.half_at_centre, self.half * away)
        low, high = (_exp(middle + sign * half) for sign in (-1, 1))
        return _exp(middle), low, high


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw | None:
    """The power law of positive values, or None for fewer than three runs or two different x."""
    from scipy.stats import linregress

    if len(x) < 3 or len(set(x)) < 2 or not all(map(math.isfinite, y)):
        return None
    across, up = np.log(x), np.log(y)
    centre = float(across.mean()), float(up.mean())
    fit: Any = linregress(across - centre[0], up)
    quantile = student(len(x) - 2)
    halves = float(fit.stderr) * quantile, float(fit.intercept_stderr) * quantile
    return PowerLaw(float(fit.slope), halves[0], centre, halves[1])


def student(freedom: float) -> float:
    """Student's 97.5 % quantile."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))


def nats_interval(scores: Sequence[DocumentScore]) -> tuple[float, float] | None:
    """95 % interval of nats per token; documents without tokens are left out.

    None for fewer than two documents, or where nats overflowed.
    """
    # Documents are the sample, as tokens of one document are alike. Student's interval with the
    # jackknife's error: the nats per token without each document in turn. Its degrees of freedom
    # are those of Kish's effective number of documents, which is smaller than their number if a few
    # have most of the tokens. results/README.md says how often it holds the truth.
    scored = [(score.nats, score.tokens) for score in scores if score.tokens]
    if len(scored) < 2 or not all(math.isfinite(n) for n, _ in scored):
        return None
    sums, counts = np.array(scored, dtype=np.float64).T
    mean = sums.sum() / counts.sum()
    without_one = (sums.sum() - sums) / (counts.sum() - counts)
    # The squares' sum, and not (n - 1) / n of it: wider, by one document's worth.
    error = math.sqrt(np.square(without_one - mean).sum())
    effective = counts.sum() ** 2 / np.square(counts).sum()
    half = student(max(effective - 1, 1.0)) * error
    return float(mean - half), float(mean + half)


def _exp_of(interval: tuple[float, float] | None) -> tuple[float, float] | None:
    """The interval of a perplexity from that of its nats."""
    return interval and (_exp(interval[0]), _exp(interval[1]))


def _exp(value: float) -> float:
    return math.exp(min(value, LARGEST_EXPONENT))
