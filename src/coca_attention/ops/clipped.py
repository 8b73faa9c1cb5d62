"""Attention under clipped distances: a key farther back than W tokens is scored as if W back.

Within W tokens nothing changes, and no angle is ever larger than W theta_j: ReRoPE (Su, 2023,
kexue.fm/archives/9708).

Legend: B batch, T query length, S key length, N the keys that may be near, H query heads, G
key/value heads, D head width, P = D/2 rotary pairs, F free pairs.
"""

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


def attend_clipped(
    query: Tensor,
    key: Tensor,
    far_query: Tensor,
    far_key: Tensor,
    value: Tensor,
    *,
    max_distance: int,
    positions: tuple[Tensor, Tensor],
    consecutive: bool = True,
    attention_mask: Tensor | None = None,
    is_causal: bool = True,
    window: int | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
    bias: Decay | None = None,
    with_weights: bool = False,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """softmax(scale * scores + mask + bias) V, with scores Q' K'^T up to a distance of W.

    Beyond, they are those at the distance W: far_query · far_key. Scores are formed in blocks of
    queries, in float32 or wider.

    Args:
        query: Q' at the queries' positions, (B, H, T, D).
        key: K' of the last N keys at their positions, (B, G, N, D). All other keys must be at least
            W before every query.
        far_query: `far_query_map`, (B, H, T, P + F).
        far_key: The coefficients of all keys, (B, G, S, P + F), which are K' at position 0.
        value: (B, G, S, Dv).
        max_distance: W.
        positions: Of the queries, (T,) or (B, T), and of all keys, (S,) or (B, S).
        consecutive: Whether positions are consecutive wherever a query sees a key, so that keys
            that are W before it by index need no near score.
        attention_mask: Boolean (True = may attend) or additive, broadcastable to (B, H, T, S).
        is_causal: Whether query i sees only keys 0 … S - T + i.
        window: Keys that a query sees if `is_causal`, its own included; default: all before it.
        scale: Multiplies the scores.
        dropout: Probability of dropping an attention weight.
        bias: See `attend`.
        with_weights: Whether to return the attention weights.
        segments: See `attend`, (B, S).

    Returns:
        (B, H, T, Dv), and the weights (B, H, T, S) or None.
    """
    if not with_weights and can_be_opaque(query.shape[2], attention_mask, dropout):
        return _attend_clipped(
            query,
            key,
            far_query,
            far_key,
            value,
            attention_mask,
            segments,
            *positions,
            max_distance,
            consecutive,
            is_causal,
            window,
            scale,
            None if bias is None else [*bias],
        ), None
    batch, heads, queries = query.shape[:3]
    groups, keys = far_key.shape[1:3]
    near_from = keys - key.shape[-2]
    if batch == 0 or queries == 0:
        weights = query.new_zeros(batch, heads, queries, keys) if with_weights else None
        return query.new_zeros(batch, heads, queries, value.shape[-1]), weights
    plain = consecutive and is_causal and attention_mask is None and bias is None
    plain = plain and (window is None or window >= keys)
    if plain and not dropout and not with_weights and can_attend_parts(query):
        return _attend_in_parts(
            query, key, far_query, far_key, value, max_distance, scale, segments
        ), None
    wide = torch.promote_types(query.dtype, torch.float32)
    query_positions, key_positions = positions

    def scores_of(rows: Tensor, columns: Tensor) -> Tensor:
        """(B, H, t, D) and (B, G, s, D) to (B, H, t, s)."""
        grouped = rows.to(wide).reshape(batch, groups, -1, rows.shape[-1])
        found = grouped @ columns.to(wide).transpose(-2, -1)
        return found.view(batch, heads, -1, columns.shape[-2])

    def block(rows: Tensor, far_rows: Tensor, start: int) -> tuple[Tensor, Tensor | None]:
        stop = start + rows.shape[-2]
        last = keys - queries + stop if is_causal else keys
        places = query_positions[..., start:stop], key_positions[..., :last]
        first = near_from
        if consecutive:
            first = max(first, keys - queries + start - max_distance + 1)
        distance = places[0].unsqueeze(-1) - places[1][..., first:].unsqueeze(-2)
        if distance.dim() == 3:
            distance = distance.unsqueeze(1)
        scores = scores_of(far_rows, far_key[..., :last, :])
        near = scores_of(rows, key[..., first - near_from : last - near_from, :])
        near = torch.where(distance < max_distance, near, scores[..., first:])
        scores = torch.cat((scores[..., :first], near), dim=-1) * scale
        mask = cut_mask(attention_mask, slice(start, stop), slice(last))
        if mask is not None and mask.is_floating_point():
            mask = mask.to(wide).masked_fill(hidden_by(mask), float("-inf"))
        if segments is not None:
            own = segments[:, keys - queries + start : keys - queries + stop]
            mask = same_segment(mask, own, segments[:, :last])
        if is_causal:
            mask = causal_mask(mask, stop - start, last, rows.device, window)
        if bias is not None:
            added = bias(*places, wide)
            mask = with_bias(mask, added.unsqueeze(1) if added.dim() == 3 else added)
        # The lowest number instead of -inf, whose softmax over a whole row has no gradient.
        lowest = torch.finfo(wide).min
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, lowest)
        elif mask is not None:
            scores = (scores + mask).clamp(min=lowest)
        blind = scores.amax(-1, keepdim=True) <= lowest / 2
        weights = scores.softmax(-1).masked_fill(blind, 0.0).to(value.dtype)
        grouped = F.dropout(weights, dropout).view(batch, groups, -1, last)
        output = (grouped @ value[..., :last, :]).view(batch, heads, stop - start, -1)
        return output, F.pad(weights, (0, keys - last)) if with_weights else None

    scores = CPU_SCORES if query.device.type == "cpu" else SCORES
    size = min(queries, max(MIN_ROWS, scores // (batch * heads * keys)))
    pieces = [
        (query[..., start : start + size, :], far_query[..., start : start + size, :], start)
        for start in range(0, queries, size)
    ]
    with torch.autocast(query.device.type, enabled=False):  # scores in half precision otherwise
        if torch.is_grad_enabled() and len(pieces) > 1:
            # Otherwise the backward pass would keep all scores.
            found = [checkpoint(block, *piece, use_reentrant=False) for piece in pieces]
        else:
            found = [block(*piece) for piece in pieces]
    outputs, weights = zip(*found, strict=True)
    return torch.cat(outputs, dim=-2), torch.cat(weights, dim=-2) if with_weights else None


def _attend_in_parts(
    query: Tensor,
    key: Tensor,
    far_query: Tensor,
    far_key: Tensor,
    value: Tensor,
    max_distance: int,
    scale: float,
    segments: Tensor | None,
) -> Tensor:
    """`attend_clipped` at consecutive positions, without a mask."""
    queries, keys = query.shape[-2], far_key.shape[-2]
    tensors = in_autocast(query, F.pad(key, (0, 0, keys - key.shape[-2], 0)), far_query, far_key)
    tensors = *tensors, *in_autocast(value)
    if segments is None:
        parts = list(clipped_parts(queries, keys, max_distance))
        return attend_parts(parts, *tensors, scale=scale)
    outputs = []
    for row, *own in zip(segments, *tensors, strict=True):
        # Every document is a text of its own.
        lengths = row.unique_consecutive(return_counts=True)[1].tolist()
        parts = document_parts(lengths, queries, max_distance)
        outputs.append(attend_parts(parts, *(x.unsqueeze(0) for x in own), scale=scale))
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
    """`attend_clipped` for torch.compile."""
    return attend_clipped(
        query,
        key,
        far_query,
        far_key,
        value,
        max_distance=max_distance,
        positions=(query_positions, key_positions),
        consecutive=consecutive,
        attention_mask=attention_mask,
        is_causal=is_causal,
        window=window,
        scale=scale,
        bias=decay_of(decay),
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
