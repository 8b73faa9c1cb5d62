"""Attention under clipped distances: a key farther back than W tokens is scored as if W back.

Within W tokens nothing changes, and no angle is ever larger than W theta_j: ReRoPE (Su, 2023,
kexue.fm/archives/9708).

Legend: B batch, T query length, S key length, N the keys that may be near, H query heads, G
key/value heads, D head width, P = D/2 rotary pairs, F free pairs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from coca_attention.ops.attention import (
    can_be_opaque,
    causal_mask,
    cut_mask,
    decay_of,
    hidden_by,
    in_autocast,
    same_segment,
    with_bias,
)
from coca_attention.ops.forms import ScoreForm
from coca_attention.ops.opaque import opaque
from coca_attention.ops.parts import (
    attend_parts,
    can_attend_parts,
    clipped_parts,
    document_parts,
)
from coca_attention.ops.positions import Decay

# Scores in a block of queries. On a CPU they should stay in its cache: eight times as many took two
# to four times as long. On other devices memory alone limits them (256 MB in float32).
CPU_SCORES, SCORES = 2**21, 2**26
MIN_ROWS = 32


class Clipping(NamedTuple):
    """How `attend_clipped` scores and hides keys.

    Attributes:
        max_distance: W.
        consecutive: Whether positions are consecutive wherever a query sees a key, so that keys
            that are W before it by index need no near score.
        is_causal: Whether query i sees only keys 0 … S - T + i.
        window: Keys that a query sees if `is_causal`, its own included; default: all before it.
        scale: Multiplies the scores.
        decay: Addend of the scaled scores, or None.
    """

    max_distance: int
    consecutive: bool = True
    is_causal: bool = True
    window: int | None = None
    scale: float = 1.0
    decay: Decay | None = None


def attend_clipped(
    query: Tensor,
    key: Tensor,
    far_query: Tensor,
    far_key: Tensor,
    value: Tensor,
    clipping: Clipping,
    *,
    positions: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    segments: Tensor | None = None,
    dropout: float = 0.0,
    with_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """softmax(scale * scores + mask + decay) V, with scores Q' K'^T up to a distance of W.

    Beyond, they are those at the distance W: far_query · far_key. Scores are formed in blocks of
    queries, in float32 or wider.

    Args:
        query: Q' at the queries' positions, (B, H, T, D).
        key: K' of the last N keys at their positions, (B, G, N, D). All other keys must be at least
            W before every query.
        far_query: `far_query_map`, (B, H, T, P + F).
        far_key: The coefficients of all keys, (B, G, S, P + F), which are K' at position 0.
        value: (B, G, S, Dv).
        clipping: W, and what else decides about scores.
        positions: Of the queries, (T,) or (B, T), and of all keys, (S,) or (B, S).
        attention_mask: Boolean (True = may attend) or additive, broadcastable to (B, H, T, S).
        segments: See `attend`, (B, S).
        dropout: Probability of dropping an attention weight.
        with_weights: Whether to return the attention weights.

    Returns:
        (B, H, T, Dv), and the weights (B, H, T, S) or None.
    """
    tensors = (query, key, far_query, far_key, value)
    if not with_weights and can_be_opaque(query.shape[2], attention_mask, dropout):
        numbers = None if clipping.decay is None else [*clipping.decay]
        options = clipping[:-1]
        return _attend_clipped(
            *tensors, attention_mask, segments, *positions, *options, numbers
        ), None
    batch, heads, queries = query.shape[:3]
    keys = far_key.shape[2]
    if batch == 0 or queries == 0:
        weights = query.new_zeros(batch, heads, queries, keys) if with_weights else None
        return query.new_zeros(batch, heads, queries, value.shape[-1]), weights
    plain = clipping.consecutive and clipping.is_causal and clipping.decay is None
    plain = plain and attention_mask is None and not dropout and not with_weights
    plain = plain and (clipping.window is None or clipping.window >= keys)
    if plain and can_attend_parts(query):
        return _attend_in_parts(*tensors, clipping, segments), None
    whole = _Whole(
        queries, key, far_key, value, *positions, attention_mask, segments, clipping, dropout
    )
    scores = CPU_SCORES if query.device.type == "cpu" else SCORES
    size = min(queries, max(MIN_ROWS, scores // (batch * heads * keys)))
    pieces = [
        (query[..., start : start + size, :], far_query[..., start : start + size, :], start)
        for start in range(0, queries, size)
    ]
    with torch.autocast(query.device.type, enabled=False):  # scores in half precision otherwise
        if torch.is_grad_enabled() and len(pieces) > 1:
            # Otherwise the backward pass would keep all scores.
            blocks = [
                checkpoint(whole.block, *piece, with_weights, use_reentrant=False)
                for piece in pieces
            ]
        else:
            blocks = [whole.block(*piece, with_weights) for piece in pieces]
    outputs, weights = zip(*blocks, strict=True)
    return torch.cat(outputs, dim=-2), torch.cat(weights, dim=-2) if with_weights else None


class _Whole(NamedTuple):
    """What every block of queries in `attend_clipped` attends to, T being those of all blocks."""

    queries: int
    key: Tensor
    far_key: Tensor
    value: Tensor
    query_positions: Tensor
    key_positions: Tensor
    attention_mask: Tensor | None
    segments: Tensor | None
    clipping: Clipping
    dropout: float

    def block(
        self, rows: Tensor, far_rows: Tensor, start: int, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Output (B, H, t, Dv), and the weights (B, H, t, S) or None, of queries from ``start``."""
        keys, groups = self.far_key.shape[2], self.far_key.shape[1]
        stop = start + rows.shape[-2]
        last = keys - self.queries + stop if self.clipping.is_causal else keys
        wide = torch.promote_types(rows.dtype, torch.float32)
        places = self.query_positions[..., start:stop], self.key_positions[..., :last]
        scores = self._scores(rows.to(wide), far_rows.to(wide), places, keys - self.queries + start)
        mask = self._mask(start, stop, last, places, wide)
        # The lowest number instead of -inf, whose softmax over a whole row has no gradient.
        lowest = torch.finfo(wide).min
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, lowest)
        elif mask is not None:
            scores = (scores + mask).clamp(min=lowest)
        blind = scores.amax(-1, keepdim=True) <= lowest / 2
        weights = scores.softmax(-1).masked_fill(blind, 0.0).to(self.value.dtype)
        grouped = F.dropout(weights, self.dropout).unflatten(1, (groups, -1)).flatten(2, 3)
        output = (grouped @ self.value[..., :last, :]).view(*rows.shape[:-1], -1)
        return output, F.pad(weights, (0, keys - last)) if with_weights else None

    def _scores(
        self, rows: Tensor, far_rows: Tensor, places: tuple[Tensor, Tensor], index: int
    ) -> Tensor:
        """Scaled scores (B, H, t, s) of queries at places, of which the first is key ``index``."""
        limit, last = self.clipping.max_distance, places[1].shape[-1]
        near_from = self.far_key.shape[2] - self.key.shape[2]
        first = max(near_from, index - limit + 1) if self.clipping.consecutive else near_from
        distance = places[0].unsqueeze(-1) - places[1][..., first:].unsqueeze(-2)
        if distance.dim() == 3:
            distance = distance.unsqueeze(1)
        scores = _grouped_scores(far_rows, self.far_key[..., :last, :])
        near = _grouped_scores(rows, self.key[..., first - near_from : last - near_from, :])
        near = torch.where(distance < limit, near, scores[..., first:])
        return torch.cat((scores[..., :first], near), dim=-1) * self.clipping.scale

    def _mask(
        self, start: int, stop: int, last: int, places: tuple[Tensor, Tensor], wide: torch.dtype
    ) -> Tensor | None:
        """All that hides the first ``last`` keys from queries start … stop - 1, and the decay."""
        mask = cut_mask(self.attention_mask, slice(start, stop), slice(last))
        if mask is not None and mask.is_floating_point():
            mask = mask.to(wide).masked_fill(hidden_by(mask), float("-inf"))
        if self.segments is not None:
            past = self.far_key.shape[2] - self.queries
            rows = self.segments[:, past + start : past + stop]
            mask = same_segment(mask, rows, self.segments[:, :last])
        if self.clipping.is_causal:
            mask = causal_mask(mask, stop - start, last, self.key.device, self.clipping.window)
        if self.clipping.decay is not None:
            added = self.clipping.decay(*places, wide)
            mask = with_bias(mask, added.unsqueeze(1) if added.dim() == 3 else added)
        return mask


def _grouped_scores(rows: Tensor, columns: Tensor) -> Tensor:
    """(B, H, t, D) and (B, G, s, D) to (B, H, t, s)."""
    batch, groups = columns.shape[:2]
    grouped = rows.reshape(batch, groups, -1, rows.shape[-1])
    scores = grouped @ columns.to(rows.dtype).transpose(-2, -1)
    return scores.view(*rows.shape[:-1], columns.shape[-2])


def _attend_in_parts(
    query: Tensor,
    key: Tensor,
    far_query: Tensor,
    far_key: Tensor,
    value: Tensor,
    clipping: Clipping,
    segments: Tensor | None,
) -> Tensor:
    """`attend_clipped` at consecutive positions, without a mask."""
    queries, keys, limit = query.shape[-2], far_key.shape[-2], clipping.max_distance
    tensors = in_autocast(query, F.pad(key, (0, 0, keys - key.shape[-2], 0)), far_query, far_key)
    tensors = *tensors, *in_autocast(value)
    if segments is None:
        parts = list(clipped_parts(queries, keys, limit))
        return attend_parts(parts, *tensors, scale=clipping.scale)
    outputs = []
    for row, *text in zip(segments, *tensors, strict=True):
        # Every document is a text of its own.
        lengths = row.unique_consecutive(return_counts=True)[1].tolist()
        parts = document_parts(lengths, queries, limit)
        outputs.append(attend_parts(parts, *(x[None] for x in text), scale=clipping.scale))
    return torch.cat(outputs)


@opaque(differentiable=5)
def _attend_clipped(
    query: Tensor,
    key: Tensor,
    far_query: Tensor,
    far_key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    segments: Tensor | None,
    query_positions: Tensor,
    key_positions: Tensor,
    max_distance: int,
    consecutive: bool,
    is_causal: bool,
    window: int | None,
    scale: float,
    decay: list[float] | None,
) -> Tensor:
    """`attend_clipped` for torch.compile, whose operators take no named tuples."""
    return attend_clipped(
        query,
        key,
        far_query,
        far_key,
        value,
        Clipping(max_distance, consecutive, is_causal, window, scale, decay_of(decay)),
        positions=(query_positions, key_positions),
        attention_mask=attention_mask,
        segments=segments,
    )[0]


def far_query_map(query: Tensor, free_pairs: int) -> Tensor:
    """What a query at position W multiplies in coefficients, as keys at position 0.

    There the second member of a collinear pair's key is 0.

    Args:
        query: Q' at position W, (..., D).
        free_pairs: F.

    Returns:
        (..., P + F).
    """
    width = query.shape[-1]
    return torch.cat((query[..., : width // 2], query[..., width - free_pairs :]), dim=-1)


def check_clipped_form(form: ScoreForm, collinear_pairs: int) -> None:
    """Raise ValueError if scores of collinear pairs depend on more than the distance."""
    if collinear_pairs and not form.shift_invariant:
        raise ValueError(
            f"max_distance needs scores that depend on distances alone; those of form {form.name} "
            "depend on both positions: use strict or magnitude, or make all pairs free"
        )
