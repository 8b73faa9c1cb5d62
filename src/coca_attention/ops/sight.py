"""Which keys a query sees: masks for blocks of queries, in memory linear in the keys.

Legend: B batch, T query length, S key length, H query heads.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Sight(NamedTuple):
    """Which keys every query sees, from the arguments of `attend`."""

    queries: int
    keys: int
    mask: Tensor | None
    segments: Tensor | None
    is_causal: bool
    window: int | None
    device: torch.device

    def among_seen(self) -> tuple[slice, "Sight"]:
        """The keys that any query sees through the window, and what is seen among them."""
        assert self.window is not None
        seen = slice(max(self.keys - self.queries - self.window + 1, 0), None)
        keys = self.keys - seen.start
        return seen, self._replace(
            keys=keys,
            mask=_cut_mask(self.mask, slice(None), seen),
            segments=None if self.segments is None else self.segments[:, seen],
            # One query sees all keys that are left.
            window=self.window if self.window < keys else None,
        )

    def of(self, start: int, stop: int) -> tuple[slice, Tensor | None]:
        """Keys among which are all that queries start … stop - 1 see, and the mask for them."""
        past = self.keys - self.queries
        last = past + stop if self.is_causal else self.keys
        first = 0 if self.window is None else max(0, past + start - self.window + 1)
        seen = slice(first, last)
        mask = _cut_mask(self.mask, slice(start, stop), seen)
        if self.segments is not None:
            rows = self.segments[:, past + start : past + stop]
            mask = same_segment(mask, rows, self.segments[:, seen])
        if self.is_causal:
            mask = causal_mask(mask, stop - start, last - first, self.device, self.window)
        return seen, mask


def with_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    """The additive mask of a boolean or additive mask, or none, and a bias."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, float("-inf"))
    return mask + bias


def hidden_by(mask: Tensor) -> Tensor:
    """Where a mask hides a key.

    Additive masks hide by -inf or by the lowest number of their dtype, and that of float16 is not
    low enough for scores in float32.
    """
    if mask.dtype == torch.bool:
        return ~mask
    return mask <= torch.finfo(mask.dtype).min / 2


def restricted(mask: Tensor | None, visible: Tensor) -> Tensor:
    """A mask, or none, that also hides all that is not visible."""
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -math.inf)


def same_segment(mask: Tensor | None, queries: Tensor, keys: Tensor) -> Tensor:
    """A mask of queries (B, t) that see only those keys (B, s) that are of their own segment."""
    return restricted(mask, (queries.unsqueeze(-1) == keys.unsqueeze(-2)).unsqueeze(1))


def _cut_mask(mask: Tensor | None, rows: slice, columns: slice) -> Tensor | None:
    """Part of a mask, whose last two dimensions may have length 1."""
    if mask is None:
        return None
    if mask.shape[-2] != 1:
        mask = mask[..., rows, :]
    return mask if mask.shape[-1] == 1 else mask[..., columns]


def causal_mask(
    mask: Tensor | None, queries: int, keys: int, device: torch.device, window: int | None = None
) -> Tensor:
    """Mask for the last queries of so many keys, combined with causality and a window."""
    row = torch.arange(keys - queries, keys, device=device).unsqueeze(-1)
    column = torch.arange(keys, device=device)
    visible = column <= row
    if window is not None:
        visible &= column > row - window
    return restricted(mask, visible)
