"""How much attention changes when all positions move by the same number of tokens.

Legend: H query heads, G key/value heads, M sampled queries, T keys, D head width.

Rotary attention and shift-invariant forms depend only on m - n, so only round-off changes. Scores
of the slack form (Eq. 10) depend on m and n.
"""

import torch
from torch import Tensor

from coca_attention.analysis.capture import VANILLA, LayerHeads
from coca_attention.ops import apply_rotary, key_map, query_map


def score_rows(heads: LayerHeads, queries: Tensor, shift: int = 0) -> Tensor:
    """Scaled attention scores of some queries against every key, with all positions shifted.

    Computed in float64 from the layer's activations, so that differences are not round-off.

    Args:
        heads: A layer's queries and keys of one text (B = 1).
        queries: Indices of queries, (M,).
        shift: Added to the positions of queries and keys, in tokens.

    Returns:
        (H, M, T), float64, including keys after a query.
    """
    query, key = heads.query[:, :, queries].double(), heads.key.double()
    positions = torch.arange(key.shape[-2]) + shift
    cos, sin = heads.rotation.tables(positions, torch.float64)
    query_positions = positions[queries]
    if heads.form == VANILLA:
        query = apply_rotary(query, cos[queries], sin[queries], heads.interleaved)
        key = apply_rotary(key, cos, sin, heads.interleaved)
    else:
        query = query_map(
            query,
            cos[queries],
            sin[queries],
            form=heads.form,
            factor=heads.rotation.query_factor(query_positions, torch.float64),
            interleaved=heads.interleaved,
            free_pairs=heads.free_pairs,
            parameters=heads.parameters,
        )
        key = key_map(key, cos, sin, free_pairs=heads.free_pairs)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return (query @ key.transpose(-2, -1) * heads.scale)[0]


def visible_keys(queries: Tensor, length: int, window: int | None = None) -> Tensor:
    """Mask of the keys visible to queries of a causal layer, (M,) to (M, T), boolean."""
    distance = queries.unsqueeze(-1) - torch.arange(length)
    return (distance >= 0) & (distance < (window or length))


class ScoreShift:
    """Change of a layer's scores under one shift, accumulated over texts.

    The mean over the visible keys of each query is subtracted first, because softmax ignores it.
    """

    def __init__(self) -> None:
        self.changed = self.spread = self.moved = 0.0
        self.rows = 0

    def add(self, before: Tensor, after: Tensor, visible: Tensor) -> None:
        """Compare scores (H, M, T) from `score_rows` where ``visible`` (M, T) is True."""
        change = _centred(after - before, visible)
        self.changed += float(change.square().sum())
        self.spread += float(_centred(before, visible).square().sum())
        weights = [x.masked_fill(~visible, float("-inf")).softmax(-1) for x in (before, after)]
        self.moved += float((weights[1] - weights[0]).abs().sum()) / 2
        self.rows += before.shape[0] * before.shape[1]

    @property
    def score_change(self) -> float | None:
        """Root mean square of the change, relative to the standard deviation within a query."""
        return (self.changed / self.spread) ** 0.5 if self.spread > 0 else None

    @property
    def attention_change(self) -> float | None:
        """Share of a query's attention that moves to other keys (total variation)."""
        return self.moved / self.rows if self.rows else None


def _centred(scores: Tensor, visible: Tensor) -> Tensor:
    scores = scores.masked_fill(~visible, 0.0)
    mean = scores.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
    return (scores - mean).masked_fill(~visible, 0.0)
