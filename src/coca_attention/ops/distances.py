"""Attention under a map of distances: near keys are scored by near queries, far ones by far ones.

Both are rotated to other positions, see `DistanceMap`. Within a distance of ``near`` tokens nothing
changes.

Legend: B batch, T query length, S key length, N the keys that may be near, H query heads, G
key/value heads, D head width, P = D/2 rotary pairs, F free pairs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coca_attention.ops.attention import attend, can_be_opaque, in_blocks
from coca_attention.ops.decoding import KeyFrames, half_scores, weighted_values
from coca_attention.ops.opaque import opaque
from coca_attention.ops.parts import (
    attend_parts,
    can_attend_parts,
    document_parts,
    has_windows,
    in_autocast,
)
from coca_attention.ops.positions import are_consecutive
from coca_attention.ops.sight import Sight, hidden_by, restricted


def attend_by_distance(
    query: Tensor,
    key: Tensor,
    far_query: Tensor,
    far_key: Tensor,
    value: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    near: int,
    consecutive: bool | None = None,
    attention_mask: Tensor | None = None,
    segments: Tensor | None = None,
    is_causal: bool = True,
    window: int | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(scale * scores + mask) V, (B, H, T, Dv), with scores Q' K'^T of near keys.

    Those of far keys are the products of far queries and far keys, of a width E.

    Args:
        query: Q', (B, H, T, D).
        key: K' of the last N keys, (B, G, N, D); all others must be far from every query.
        far_query: Q' at `DistanceMap.far_queries`, (B, H, T, E); if all far keys are at position 0,
            that of `far_query_map`, E = P + F.
        far_key: All keys at `DistanceMap.far_keys`, (B, G, S, E): at position 0 coefficients; with
            slope 1 the same tensor as ``key``, of which nothing is copied.
        value: (B, G, S, Dv).
        query_positions: (T,) or (B, T).
        key_positions: Of all keys, (S,) or (B, S).
        near: Distance from which on a key is far, see `DistanceMap`.
        consecutive: Whether positions are consecutive wherever a query sees a key: distances are
            then those of the indices. By default the positions are looked at, for which a GPU is
            waited for.
        attention_mask: As for `attend`, like the arguments after it.
    """
    tensors = in_autocast(query, key, far_query, far_key, value)
    queries = query.shape[-2]
    keys = far_key.shape[-2]
    if query.shape[0] == 0 or queries == 0:
        return query.new_zeros(*query.shape[:-1], value.shape[-1])
    if can_be_opaque(queries, attention_mask, dropout):
        return _attend_by_distance(
            *tensors,
            query_positions,
            key_positions,
            near,
            consecutive,
            attention_mask,
            segments,
            is_causal,
            window,
            scale,
            dropout,
        )
    if consecutive is None:
        consecutive = are_consecutive(query_positions, key_positions, segments)
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.masked_fill(hidden_by(attention_mask), float("-inf"))
    sight = Sight(queries, keys, attention_mask, segments, is_causal, window, query.device)
    distance = Distance(query_positions, key_positions, near, consecutive)
    of_all_heads = (
        attention_mask is None or attention_mask.dim() < 3 or attention_mask.shape[-3] == 1
    )
    if queries == 1 and of_all_heads and not dropout and not torch.is_grad_enabled():
        return _attend_one(tensors, sight, distance, scale)
    if (
        consecutive
        and is_causal
        and attention_mask is None
        and not dropout
        and (window is None or window >= keys)
        and can_attend_parts(*tensors)
    ):
        query, key, far_query, far_key, value = tensors
        if key.shape[-2] < keys:  # padding by nothing is a copy
            key = F.pad(key, (0, 0, keys - key.shape[-2], 0))
        tensors = (query, key, far_query, far_key, value)
        banded = has_windows(*tensors)
        if segments is None:
            return attend_parts(document_parts([keys], queries, near, banded), tensors, scale)
        outputs = []
        for row, *text in zip(segments, *tensors, strict=True):
            # Every document is a text of its own.
            lengths = row.unique_consecutive(return_counts=True)[1].tolist()
            parts = document_parts(lengths, queries, near, banded)
            outputs.append(attend_parts(parts, [x[None] for x in text], scale))
        return torch.cat(outputs)
    return _attend_joined(tensors, sight, distance, scale, dropout)


_attend_by_distance = opaque(attend_by_distance, differentiable=5)


class Distance(NamedTuple):
    """Which keys are near a query."""

    queries: Tensor  # positions, (T,) or (B, T)
    keys: Tensor
    near: int
    consecutive: bool

    def is_near(self, rows: slice, columns: slice) -> Tensor:
        """Whether some keys are near some queries, (1, t, s) or (B, 1, t, s)."""
        distance = self.queries[..., rows].unsqueeze(-1) - self.keys[..., columns].unsqueeze(-2)
        return (distance < self.near).unsqueeze(-3)


def _attend_one(
    tensors: tuple[Tensor, ...], sight: Sight, distance: Distance, scale: float
) -> Tensor:
    """`attend_by_distance` of one query without gradients, where copies of keys would take long."""
    query, key, far_query, far_key, value = tensors
    wide = torch.promote_types(query.dtype, torch.float32)

    def scores_of(rows: Tensor, keys: Tensor) -> Tensor:
        """(B, G, H/G, s); the heads that share keys are the rows of one product."""
        rows = (scale * rows.to(wide)).unflatten(1, (keys.shape[1], -1)).squeeze(-2)
        return rows @ keys.to(wide).mT

    if distance.consecutive:
        beyond = max(sight.keys - distance.near, 0)
        near = scores_of(query, key[..., beyond - sight.keys :, :])
        scores = torch.cat((scores_of(far_query, far_key[..., :beyond, :]), near), dim=-1)
    else:
        first = sight.keys - key.shape[-2]
        far = scores_of(far_query, far_key)
        is_near = distance.is_near(slice(None), slice(first, None))
        near = torch.where(is_near, scores_of(query, key), far[..., first:])
        scores = torch.cat((far[..., :first], near), dim=-1)
    seen, mask = sight.of(0, 1)
    output = weighted_values(scores[..., seen], value[..., seen, :], mask)
    return output.flatten(1, 2).unsqueeze(-2).to(query.dtype)


def _attend_joined(
    tensors: tuple[Tensor, ...], sight: Sight, distance: Distance, scale: float, dropout: float
) -> Tensor:
    """`attend_by_distance` as attention to near and far keys, of which a mask hides the others."""
    query, key, far_query, far_key, value = tensors
    past = sight.keys - sight.queries
    # Near and far queries side by side; near keys, zeros; zeros, far keys.
    missing = far_key.shape[-2] - key.shape[-2]
    near_keys = F.pad(key, (0, far_key.shape[-1], missing, 0))
    far_keys = F.pad(far_key, (key.shape[-1], 0))
    query = torch.cat((query, far_query), dim=-1)

    def block(start: int, rows: Tensor) -> Tensor:
        stop = start + rows.shape[-2]
        seen, mask = sight.of(start, stop)
        # By index, keys between these may be near for one query and far for another.
        near_from = seen.start
        far_to = seen.stop
        if distance.consecutive:
            near_from = max(near_from, past + start - distance.near + 1)
            far_to = max(near_from, past + stop - distance.near)
        near = slice(near_from, seen.stop)
        far = slice(seen.start, far_to)
        is_near = distance.is_near(slice(start, stop), seen)
        near_mask = restricted(mask, is_near)[..., near_from - seen.start :]
        far_mask = restricted(mask, ~is_near)[..., : far_to - seen.start]
        return attend(
            rows,
            torch.cat((near_keys[..., near, :], far_keys[..., far, :]), dim=-2),
            torch.cat((value[..., near, :], value[..., far, :]), dim=-2),
            attention_mask=torch.cat((near_mask, far_mask), dim=-1),
            is_causal=False,
            scale=scale,
            dropout=dropout,
        )

    return in_blocks(block, query)


def attend_half_by_distance(
    query: Tensor,
    far_query: Tensor,
    coefficients: Tensor,
    value: Tensor,
    near: KeyFrames,
    far: KeyFrames | None,
    attention_mask: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """`attend_by_distance` of one query (B, H, 1, D), without forming keys: (B, H, 1, Dv).

    Args:
        query: Q', (B, H, 1, D), without a gradient.
        far_query: As for `attend_by_distance`.
        coefficients: Of all keys, (B, G, S, P + F).
        value: (B, G, S, Dv).
        near: Frames of the last keys, which are near.
        far: Frames of the others; None if the coefficients are far keys.
        attention_mask: As for `attend_half`.
        scale: Multiplies the scores.
    """
    beyond = coefficients.shape[-2] - near.length
    others = coefficients[..., :beyond, :]
    last = coefficients[..., beyond:, :]
    if far is None:
        rows = scale * far_query.to(near.first.dtype).unflatten(1, (others.shape[1], -1))
        scores = rows.squeeze(-2) @ others.to(rows).mT
    else:
        scores = half_scores(far_query, others, far, scale)
    scores = torch.cat((scores, half_scores(query, last, near, scale)), dim=-1)
    output = weighted_values(scores, value, attention_mask)
    return output.flatten(1, 2).unsqueeze(-2).to(query.dtype)


def far_query_map(query: Tensor, free_pairs: int) -> Tensor:
    """What a far query multiplies in coefficients, which are keys at position 0.

    There the second member of a collinear pair's key is 0: Q' (..., D) to (..., P + F).
    """
    width = query.shape[-1]
    return torch.cat((query[..., : width // 2], query[..., width - free_pairs :]), dim=-1)
