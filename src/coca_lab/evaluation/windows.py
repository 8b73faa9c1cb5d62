"""Sliding windows, and the negative log-likelihood of documents under them, in nats."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coca_attention.errors import UserError
from coca_lab.generation import naming_the_limit
from coca_lab.intervals import DocumentScore


@dataclass(frozen=True)
class Window:
    """One forward pass over tokens[start:stop] that scores tokens[first_target:stop + 1]."""

    start: int
    stop: int
    first_target: int

    @property
    def inputs(self) -> int:
        """Number of tokens read."""
        return self.stop - self.start

    @property
    def targets(self) -> int:
        """Number of tokens scored."""
        return self.stop + 1 - self.first_target


def sliding_windows(
    length: int, window: int, stride: int, first_target: int = 1
) -> Iterator[Window]:
    """Windows that together score every token from ``first_target`` on exactly once."""
    # A run of `stride` targets is predicted from the `window` tokens that end just before its last
    # one: each has window - stride + 1 to window tokens of context, or all that come before it.
    check_sizes(window, stride)
    if first_target < 1:
        raise UserError(f"the first target must be token 1 or later, got {first_target}")
    for first in range(first_target, length, stride):
        stop = min(first + stride, length) - 1
        yield Window(max(stop - window, 0), stop, first)


def shared_first_target(windows: list[int], stride: int) -> int:
    """First token that has at least window - stride + 1 tokens before it at every window size."""
    return max(windows) - stride + 1


def check_sizes(window: int, stride: int) -> None:
    """Raise UserError unless 1 <= stride <= window."""
    if window < 1:
        raise UserError(f"the window must be at least 1 token, got {window}")
    if stride < 1:
        raise UserError(f"the stride must be at least 1 token, got {stride}")
    if stride > window:
        raise UserError(
            f"the stride ({stride} tokens) must not exceed the window ({window}): the tokens in "
            "between would never be scored"
        )


@dataclass(frozen=True)
class TokenDocument:
    """A document as token ids: (length,), int64."""

    id: str
    tokens: Tensor


class TokenScores:
    """The score of every token of one document, and the number of tokens read before it."""

    def __init__(self, length: int) -> None:
        self.nats = torch.full((length,), float("nan"))
        """(length,), float32; NaN where a token was not scored."""
        self.read = torch.zeros(length, dtype=torch.long)
        """(length,), int64; 0 where a token was not scored."""

    def summed(self, chosen: Tensor) -> tuple[float, int]:
        """Nats and number of the scored tokens among some chosen ones, (length,), bool."""
        chosen = chosen & (self.read > 0)
        return self.nats[chosen].double().sum().item(), int(chosen.sum())


def equal_ranges(window: int, ranges: int) -> list[int]:
    """Borders of ranges of equal width from 0 to the window, for `by_tokens_read`."""
    return [round(window * i / ranges) for i in range(ranges + 1)]


def by_tokens_read(scores: Sequence[TokenScores], edges: Sequence[int]) -> list[tuple[float, int]]:
    """Nats and tokens by the number of tokens read before; ranges end at ``edges``, inclusive."""
    sums = []
    for low, high in pairwise(edges):
        parts = [score.summed((score.read > low) & (score.read <= high)) for score in scores]
        sums.append((sum(nats for nats, _ in parts), sum(tokens for _, tokens in parts)))
    return sums


def score_documents(
    model: nn.Module,
    documents: Sequence[TokenDocument],
    *,
    window: int,
    stride: int,
    first_target: int = 1,
    batch_tokens: int = 8192,
    per_token: Sequence[TokenScores] | None = None,
    part: slice = slice(None),
) -> list[DocumentScore]:
    """Nats of every document in some of `windows_of` them, and in ``per_token`` of every token."""
    nats = torch.zeros(len(documents), dtype=torch.float64)
    counts = [0] * len(documents)
    device = next(model.parameters()).device
    trims = "logits_to_keep" in inspect.signature(model.forward).parameters
    windows = windows_of([len(d.tokens) for d in documents], window, stride, first_target)
    for batch in _batches(windows[part], batch_tokens):
        inputs = torch.stack([documents[d].tokens[w.start : w.stop] for d, w in batch])
        scored = max(w.targets for _, w in batch)
        # The last run of a document can be shorter: positions before its targets are ignored.
        targets = torch.full((len(batch), scored), -100)
        for row, (d, w) in enumerate(batch):
            targets[row, scored - w.targets :] = documents[d].tokens[w.first_target : w.stop + 1]
        keep = {"logits_to_keep": scored} if trims else {}
        with torch.inference_mode():
            with naming_the_limit(model, inputs.shape[1]):
                logits = model(input_ids=inputs.to(device), use_cache=False, **keep).logits
            losses = F.cross_entropy(
                logits[:, logits.shape[1] - scored :].float().transpose(1, 2),
                targets.to(device),
                reduction="none",
                ignore_index=-100,
            )
        rows = losses.double().sum(dim=1).cpu()
        for row, (d, w) in enumerate(batch):
            nats[d] += rows[row]
            counts[d] += w.targets
            if per_token is not None:
                here = slice(w.first_target, w.stop + 1)
                per_token[d].nats[here] = losses[row, scored - w.targets :].cpu()
                per_token[d].read[here] = torch.arange(w.first_target, w.stop + 1) - w.start
        if nats.isnan().any():
            worst = documents[int(nats.isnan().nonzero()[0])].id
            raise UserError(
                f"the model returns NaN for document {worst!r}: its weights are damaged, or its "
                "precision overflows (try float32)"
            )
    return [
        DocumentScore(document.id, float(nats[d]), counts[d])
        for d, document in enumerate(documents)
    ]


def windows_of(
    lengths: Sequence[int], window: int, stride: int, first_target: int
) -> list[tuple[int, Window]]:
    """Windows of all documents with the document's index, the shortest first."""
    every = [
        (index, each)
        for index, length in enumerate(lengths)
        for each in sliding_windows(length, window, stride, first_target)
    ]
    return sorted(every, key=lambda item: item[1].inputs)


def _batches(
    windows: Sequence[tuple[int, Window]], batch_tokens: int
) -> Iterator[list[tuple[int, Window]]]:
    """Batches of windows of equal length."""
    for inputs, group in groupby(windows, key=lambda item: item[1].inputs):
        members = list(group)
        size = max(1, batch_tokens // inputs)
        for start in range(0, len(members), size):
            yield members[start : start + size]
