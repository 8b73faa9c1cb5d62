"""Intervals of figures: Student's t (documents, prompts, seeds), Wilson (shares)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

LARGEST_EXPONENT = 700.0
"""exp of more overflows float64."""
NORMAL = 1.959963984540054
"""97.5 % quantile of the normal distribution."""
FEW_DOCUMENTS = 10
"""With fewer, no interval is reliable: one unusual document may be missing from the sample."""

FEWEST_DOCUMENTS = 3
"""With fewer, no interval is shown: that of two, by one degree of freedom, may span decades."""


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


def scored_documents(scores: Iterable[DocumentScore]) -> int:
    """How many documents have scored tokens."""
    return sum(score.tokens > 0 for score in scores)


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
    interval = nats_interval(scores)
    return interval and (_exp(interval[0]), _exp(interval[1]))


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
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    half = float(np.std(values, ddof=1)) / math.sqrt(len(values)) * student(len(values) - 1)
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


def student(freedom: float) -> float:
    """Student's 97.5 % quantile."""
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


def _exp(value: float) -> float:
    return math.exp(min(value, LARGEST_EXPONENT))
