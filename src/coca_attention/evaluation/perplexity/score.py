"""From windows to nats: the model's part of the perplexity task, and the statistics over it."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coca_attention.errors import UserError
from coca_attention.evaluation.generation import naming_the_limit
from coca_attention.evaluation.perplexity.windows import Window, sliding_windows


@dataclass(frozen=True)
class TokenDocument:
    """A document as token ids: (length,), int64."""

    id: str
    tokens: Tensor


@dataclass(frozen=True)
class DocumentScore:
    """Summed negative log-likelihood, in nats, of the judged tokens of one document."""

    id: str
    nats: float
    tokens: int


class TokenScores:
    """Every token of one document: what it cost, and how many tokens were read before it.

    Attributes:
        nats: (length,), float32; NaN where a token was not judged.
        read: (length,), int64; 0 where a token was not judged.
    """

    def __init__(self, length: int) -> None:
        self.nats = torch.full((length,), float("nan"))
        self.read = torch.zeros(length, dtype=torch.long)


def by_tokens_read(
    scores: Sequence[TokenScores], window: int, buckets: int
) -> list[dict[str, float | int]]:
    """Nats and judged tokens by how much was read before them, in buckets of equal width.

    Args:
        scores: Filled in by `score_documents`.
        window: Most tokens read in one pass.
        buckets: Number of buckets, at most ``window``.

    Returns:
        From the nearest to the farthest: ``first`` and ``last`` (tokens read, both included),
        ``nats`` and ``tokens``.
    """
    nats, read = (torch.cat([getattr(s, name) for s in scores]) for name in ("nats", "read"))
    judged = read > 0
    nats, read = nats[judged].double(), read[judged]
    edges = [round(window * i / buckets) for i in range(buckets + 1)]
    found: list[dict[str, float | int]] = []
    for low, high in pairwise(edges):
        inside = (read > low) & (read <= high)
        found.append(
            {
                "first": low + 1,
                "last": high,
                "nats": nats[inside].sum().item(),
                "tokens": int(inside.sum()),
            }
        )
    return found


def score_documents(
    model: nn.Module,
    documents: Sequence[TokenDocument],
    *,
    window: int,
    stride: int,
    first_target: int = 1,
    batch_tokens: int = 8192,
    per_token: Sequence[TokenScores] | None = None,
    progress: Callable[[int], Any] | None = None,
) -> list[DocumentScore]:
    """Nats of every document under a sliding window.

    Windows of equal length, from whichever document, are read together; only the logits of the
    judged positions are computed; nats are summed in float64.

    Args:
        model: A causal language model whose call returns ``logits``.
        documents: Token documents.
        window: Most tokens read in one pass.
        stride: Tokens judged in one pass.
        first_target: Index of the first judged token of each document.
        batch_tokens: Tokens read at once, at least one window.
        per_token: One for every document, to be filled in; default: only sums are kept.
        progress: Called with the number of judged tokens after every batch.

    Returns:
        One score per document, in their order.

    Raises:
        UserError: If the model answers NaN, or cannot read so many tokens.
    """
    nats = torch.zeros(len(documents), dtype=torch.float64)
    counts = [0] * len(documents)
    device = next(model.parameters()).device
    trims = "logits_to_keep" in inspect.signature(model.forward).parameters
    for batch in _batches(documents, window, stride, first_target, batch_tokens):
        inputs = torch.stack([documents[d].tokens[w.start : w.stop] for d, w in batch])
        judged = max(w.targets for _, w in batch)
        # Rows of a last, shorter run have fewer targets: what stands before them is left out.
        targets = torch.full((len(batch), judged), -100)
        for row, (d, w) in enumerate(batch):
            targets[row, judged - w.targets :] = documents[d].tokens[w.first_target : w.stop + 1]
        keep = {"logits_to_keep": judged} if trims else {}
        with torch.inference_mode():
            with naming_the_limit(model, inputs.shape[1]):
                logits = model(input_ids=inputs.to(device), use_cache=False, **keep).logits
            losses = F.cross_entropy(
                logits[:, -judged:].float().transpose(1, 2),
                targets.to(device),
                reduction="none",
                ignore_index=-100,
            )
        rows = losses.double().sum(dim=1).cpu()
        for row, (d, w) in enumerate(batch):
            nats[d] += rows[row]
            counts[d] += w.targets
            if per_token is not None:
                judged_here = slice(w.first_target, w.stop + 1)
                per_token[d].nats[judged_here] = losses[row, judged - w.targets :].cpu()
                per_token[d].read[judged_here] = torch.arange(w.first_target, w.stop + 1) - w.start
        if nats.isnan().any():
            worst = documents[int(nats.isnan().nonzero()[0])].id
            raise UserError(
                f"the model's answer to document {worst!r} is not a number (NaN); its weights are "
                "damaged, or its precision overflows (try float32)"
            )
        if progress is not None:
            progress(sum(w.targets for _, w in batch))
    return [
        DocumentScore(document.id, float(nats[d]), counts[d])
        for d, document in enumerate(documents)
    ]


def _batches(
    documents: Sequence[TokenDocument],
    window: int,
    stride: int,
    first_target: int,
    batch_tokens: int,
) -> Iterator[list[tuple[int, Window]]]:
    """Windows of all documents, grouped by length and cut into batches."""
    every = [
        (d, w)
        for d, document in enumerate(documents)
        for w in sliding_windows(len(document.tokens), window, stride, first_target)
    ]
    every.sort(key=lambda item: item[1].inputs)
    for inputs, group in groupby(every, key=lambda item: item[1].inputs):
        members = list(group)
        size = max(1, batch_tokens // inputs)
        for start in range(0, len(members), size):
            yield members[start : start + size]


def perplexity(scores: Iterable[DocumentScore]) -> float:
    """exp(nats / tokens) over all documents; every token weighs the same. inf on overflow."""
    scores = list(scores)
    mean = sum(score.nats for score in scores) / sum(score.tokens for score in scores)
    return math.exp(mean) if mean < 700 else math.inf


def bootstrap_interval(
    scores: Sequence[DocumentScore], *, seed: int, resamples: int = 2000, level: float = 0.95
) -> tuple[float, float] | None:
    """Percentile interval of the perplexity when the documents are drawn anew.

    Args:
        scores: One score per document.
        seed: Seed of the draws.
        resamples: Number of draws.
        level: Share of draws inside the interval.

    Returns:
        Lower and upper end, or None for fewer than two documents or infinite nats.
    """
    if len(scores) < 2 or not all(math.isfinite(score.nats) for score in scores):
        return None
    return _interval(_drawn_means(scores, seed, resamples), level)


def paired_ratio_interval(
    first: Sequence[DocumentScore],
    second: Sequence[DocumentScore],
    *,
    seed: int,
    resamples: int = 2000,
    level: float = 0.95,
) -> tuple[float, float] | None:
    """Percentile interval of the ratio of two perplexities on the same documents.

    Both are drawn with the same documents, so that what makes a document hard for any model falls
    out: far narrower than the two intervals apart.

    Args:
        first: Scores whose perplexity is divided.
        second: Scores whose perplexity divides, of the same documents in the same order.
        seed: Seed of the draws.
        resamples: Number of draws.
        level: Share of draws inside the interval.

    Returns:
        Lower and upper end, or None for fewer than two documents or infinite nats.

    Raises:
        ValueError: If the documents or their judged tokens differ.
    """
    if [(s.id, s.tokens) for s in first] != [(s.id, s.tokens) for s in second]:
        raise ValueError("a paired interval needs the same judged tokens of the same documents")
    if len(first) < 2 or not all(math.isfinite(score.nats) for score in (*first, *second)):
        return None
    means = [_drawn_means(scores, seed, resamples) for scores in (first, second)]
    return _interval(means[0] - means[1], level)


def _drawn_means(scores: Sequence[DocumentScore], seed: int, resamples: int) -> np.ndarray:
    """Nats per token of every draw of documents, (resamples,); a seed draws the same documents."""
    nats = np.array([score.nats for score in scores])
    tokens = np.array([score.tokens for score in scores], dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(len(scores), size=(resamples, len(scores)))
    return nats[drawn].sum(axis=1) / tokens[drawn].sum(axis=1)


def _interval(nats: np.ndarray, level: float) -> tuple[float, float]:
    """Middle part of the draws, from nats to perplexity."""
    low, high = np.quantile(nats, [(1 - level) / 2, (1 + level) / 2])
    return float(np.exp(min(low, 700.0))), float(np.exp(min(high, 700.0)))
