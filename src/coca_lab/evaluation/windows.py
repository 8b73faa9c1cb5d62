"""Sliding windows, and the negative log-likelihood of documents under them, in nats."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coca_attention.errors import UserError
from coca_lab.generation import naming_the_limit
from coca_lab.settings.evaluations import check_stride


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
    check_stride(window, stride)
    for first in range(first_target, length, stride):
        stop = min(first + stride, length) - 1
        yield Window(max(stop - window, 0), stop, first)


def shared_first_target(windows: list[int], stride: int) -> int:
    """First token that has at least window - stride + 1 tokens before it at every window size."""
    return max(windows) - stride + 1


@dataclass(frozen=True)
class TokenDocument:
    """A document as token ids: (length,), int64."""

    id: str
    tokens: Tensor


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


def score_windows(
    model: nn.Module,
    documents: Sequence[TokenDocument],
    windows: Sequence[tuple[int, Window]],
    batch_tokens: int = 8192,
) -> Iterator[tuple[int, Window, Tensor]]:
    """Every one of `windows_of` documents with the nats of its targets, (targets,), float32."""
    device = next(model.parameters()).device
    batches = []  # of windows of equal length
    for length, group in groupby(windows, key=lambda item: item[1].inputs):
        members = list(group)
        size = max(1, batch_tokens // length)
        batches += [members[i : i + size] for i in range(0, len(members), size)]
    for batch in batches:
        inputs = torch.stack([documents[d].tokens[w.start : w.stop] for d, w in batch])
        scored = max(w.targets for _, w in batch)
        # The last run of a document can be shorter: positions before its targets are ignored.
        targets = torch.full((len(batch), scored), -100)
        for row, (d, w) in enumerate(batch):
            targets[row, scored - w.targets :] = documents[d].tokens[w.first_target : w.stop + 1]
        logits = last_logits(model, inputs.to(device), scored).flatten(0, 1)
        of_target = F.cross_entropy(logits, targets.to(device).flatten(), reduction="none")
        nats = of_target.view_as(targets).cpu()  # 0 where targets are ignored
        for (d, w), of_window in zip(batch, nats, strict=True):
            if of_window.isnan().any():
                raise UserError(
                    f"the model returns NaN for document {documents[d].id!r}: its weights are "
                    "damaged, or its precision overflows (try float32)"
                )
            yield d, w, of_window[scored - w.targets :]


@torch.inference_mode()
def last_logits(model: nn.Module, inputs: Tensor, count: int) -> Tensor:
    """Logits of the tokens that follow the last ``count`` of the inputs (B, T): float32."""
    trims = "logits_to_keep" in inspect.signature(model.forward).parameters
    keep = {"logits_to_keep": count} if trims else {}
    with naming_the_limit(model, inputs.shape[1]):
        logits = model(input_ids=inputs, use_cache=False, **keep).logits
    return logits[:, logits.shape[1] - count :].float()
