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

from coca_attention.ops.attention import attend, can_be_opaque, in_blocks
from coca_attention.ops.decoding import weighted_values
from coca_attention.ops.forms import ScoreForm
from coca_attention.ops.opaque import opaque
from coca_attention.ops.parts import (
    attend_parts,
    can_attend_parts,
    document_parts,
    has_windows,
    in_autocast,
)
from coca_attention.ops.sight import Sight, hidden_by, restricted


class Clipping(NamedTuple):
    """How `attend_clipped` scores and hides keys; the rest as for `attend`."""

    max_distance: int  # W
    # Whether positions are consecutive wherever a query sees a key: distances are then those of
    # the indices.
    consecutive: bool = True
    is_causal: bool = True
    window: int | None = None
    scale: float = 1.0


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
) -> Tensor:
    """softmax(scale * scores + mask) V, (B, H, T, Dv), with scores Q' K'^T up to a distance of W.

    Beyond, they are those at the distance W: far_query · far_key, of `far_query_map`, (B, H, T,
    P + F), and the coefficients of all keys, (B, G, S, P + F), which are K' at position 0. The key
    has the last N keys alone, (B, G, N, D): all others must be at least W before every query.
    Positions are those of the queries and of all keys. The rest is as for `attend`.
    """
    tensors = in_autocast(query, key, far_query, far_key, value)
    (batch, _, queries), keys = query.shape[:3], far_key.shape[2]
    if batch == 0 or queries == 0:
        return query.new_zeros(*query.shape[:-1], value.shape[-1])
    if can_be_opaque(queries, attention_mask, dropout):
        return _attend_clipped(*tensors, attention_mask, segments, *positions, *clipping)
    alike = attention_mask is None or attention_mask.dim() < 3 or attention_mask.shape[-3] == 1
    one = queries == 1 and alike and not dropout and not torch.is_grad_enabled()
    plain = clipping.consecutive and clipping.is_causal and attention_mask is None and not dropout
    plain = plain and (clipping.window is None or clipping.window >= keys)
    if plain and not one and can_attend_parts(*tensors):
        return _attend_in_parts(tensors, clipping, segments)
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.masked_fill(hidden_by(attention_mask), float("-inf"))
    sight = Sight(
        queries, keys, attention_mask, segments, clipping.is_causal, clipping.window, query.device
    )
    if one:
        return _attend_one(tensors, clipping, sight, positions)
    return _attend_joined(tensors, clipping, sight, positions, dropout)


def _attend_one(
    tensors: tuple[Tensor, ...], clipping: Clipping, sight: Sight, positions: tuple[Tensor, Tensor]
) -> Tensor:
    """`attend_clipped` of one query without gradients, for which copies of keys would take long."""
    query, key, far_query, far_key, value = tensors
    wide = torch.promote_types(query.dtype, torch.float32)
    near, scores = (
        clipping.scale * x.to(wide).unflatten(1, (y.shape[1], -1)).squeeze(-2) @ y.to(wide).mT
        for x, y in ((query, key), (far_query, far_key))
    )
    first = sight.keys - key.shape[-2]
    distance = positions[0].unsqueeze(-1) - positions[1][..., first:].unsqueeze(-2)
    is_near = (distance < clipping.max_distance).unsqueeze(-3)
    near = torch.where(is_near, near, scores[..., first:])
    scores = torch.cat((scores[..., :first], near), dim=-1)
    seen, mask = sight.of(0, 1)
    output = weighted_values(scores[..., seen], value[..., seen, :], mask)
    return output.flatten(1, 2).unsqueeze(-2).to(query.dtype)


def _attend_joined(
    tensors: tuple[Tensor, ...],
    clipping: Clipping,
    sight: Sight,
    positions: tuple[Tensor, Tensor],
    dropout: float,
) -> Tensor:
    """`attend_clipped` as attention to near keys and to far keys, of which a mask hides others."""
    value, limit, past = tensors[4], clipping.max_distance, sight.keys - sight.queries
    query, near_keys, far_keys = side_by_side(*tensors[:4])

    def block(start: int, rows: Tensor) -> Tensor:
        stop = start + rows.shape[-2]
        seen, mask = sight.of(start, stop)
        # By index, keys between these may be near for one query and far for another.
        near_from, far_to = seen.start, seen.stop
        if clipping.consecutive:
            near_from = max(near_from, past + start - limit + 1)
            far_to = max(near_from, past + stop - limit)
        near, far = slice(near_from, seen.stop), slice(seen.start, far_to)
        query_positions, key_positions = positions[0][..., start:stop], positions[1][..., seen]
        distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
        is_near = (distance < limit).unsqueeze(-3)
        hidden = (
            restricted(mask, is_near)[..., near_from - seen.start :],
            restricted(mask, ~is_near)[..., : far_to - seen.start],
        )
        return attend(
            rows,
            torch.cat((near_keys[..., near, :], far_keys[..., far, :]), dim=-2),
            torch.cat((value[..., near, :], value[..., far, :]), dim=-2),
            attention_mask=torch.cat(hidden, dim=-1),
            is_causal=False,
            scale=clipping.scale,
            dropout=dropout,
        )

    return in_blocks(block, query)


def side_by_side(
    query: Tensor, key: Tensor, far_query: Tensor, far_key: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A query of width D + P + F, and near and far keys (B, G, S, D + P + F) that it scores."""
    # Near and far queries side by side; near keys, zeros; zeros, far keys.
    missing = far_key.shape[-2] - key.shape[-2]
    near_keys = F.pad(key, (0, far_key.shape[-1], missing, 0))
    return torch.cat((query, far_query), dim=-1), near_keys, F.pad(far_key, (key.shape[-1], 0))


def _attend_in_parts(
    tensors: tuple[Tensor, ...], clipping: Clipping, segments: Tensor | None
) -> Tensor:
    """`attend_clipped` at consecutive positions, without a mask."""
    query, key, far_query, far_key, value = tensors
    queries, keys, limit = query.shape[-2], far_key.shape[-2], clipping.max_distance
    if key.shape[-2] < keys:
        key = F.pad(key, (0, 0, keys - key.shape[-2], 0))
    tensors = (query, key, far_query, far_key, value)
    banded = has_windows(*tensors)
    if segments is None:
        parts = document_parts([keys], queries, limit, banded)
        return attend_parts(parts, tensors, clipping.scale)
    outputs = []
    for row, *text in zip(segments, *tensors, strict=True):
        # Every document is a text of its own.
        lengths = row.unique_consecutive(return_counts=True)[1].tolist()
        parts = document_parts(lengths, queries, limit, banded)
        outputs.append(attend_parts(parts, [x[None] for x in text], clipping.scale))
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
) -> Tensor:
    """`attend_clipped` for torch.compile, whose operators take no named tuples."""
    return attend_clipped(
        query,
        key,
        far_query,
        far_key,
        value,
        Clipping(max_distance, consecutive, is_causal, window, scale),
        positions=(query_positions, key_positions),
        attention_mask=attention_mask,
        segments=segments,
    )


def far_query_map(query: Tensor, free_pairs: int) -> Tensor:
    """What a query at position W multiplies in coefficients, as keys at position 0.

    There the second member of a collinear pair's key is 0: Q' (..., D) to (..., P + F).
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
