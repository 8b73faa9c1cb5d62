"""How much attention changes when all positions move by the same number of tokens.

Legend: H query heads, G key/value heads, M queries looked at, T keys, D head width.

Rotary attention and strict CoCA answer to m - n alone, so nothing changes but round-off. The slack
form (Eq. 10) answers to m and n.
"""

import torch
from torch import Tensor

from coca_attention.analysis.capture import LayerHeads
from coca_attention.ops import apply_rotary, key_map, query_map


def score_rows(heads: LayerHeads, queries: Tensor, shift: int = 0) -> Tensor:
    """Scaled attention scores of some queries against every key, all positions moved by a shift.

    In float64 from the layer's activations, so that what changes is the score and no rounding.

    Args:
        heads: A layer's queries and keys of one text (B = 1).
        queries: Indices of queries, (M,).
        shift: Added to the positions of queries and keys, in tokens.

    Returns:
        (H, M, T), float64; keys after a query are scored too.
    """
    query, key = heads.query[0, :, queries].double(), heads.key[0].double()
    angles = (torch.arange(key.shape[-2]) + shift).double().unsqueeze(-1) * heads.theta
    cos, sin = angles.cos() * heads.magnitude, angles.sin() * heads.magnitude
    if heads.form == "vanilla":
        query = _rotate(query, cos[queries], sin[queries], heads)
        key = _rotate(key, cos, sin, heads)
    else:
        query = query_map(
            query, cos[queries], sin[queries], form=heads.form, interleaved=heads.interleaved
        )
        key = key_map(key, cos, sin, form=heads.form)
    key = key.repeat_interleave(len(query) // len(key), dim=0)
    return query @ key.transpose(-2, -1) * heads.scale


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, heads: LayerHeads) -> Tensor:
    """R_n x of the rotated span of every head; the numbers behind it pass."""
    turned = apply_rotary(x[..., : heads.rotary_width], cos, sin, heads.interleaved)
    return torch.cat((turned, x[..., heads.rotary_width :]), dim=-1)


def visible_keys(queries: Tensor, length: int, window: int | None = None) -> Tensor:
    """Which keys a causal layer's queries see, (M,) to (M, T), boolean."""
    distance = queries.unsqueeze(-1) - torch.arange(length)
    return (distance >= 0) & (distance < (window or length))


class ScoreShift:
    """Change of a layer's scores under one shift, gathered over texts.

    Scores are taken relative to the mean of their query's visible keys, for the softmax does not
    see what all of them share.
    """

    def __init__(self) -> None:
        self.changed = self.spread = self.moved = 0.0
        self.rows = 0

    def add(self, before: Tensor, after: Tensor, visible: Tensor) -> None:
        """Compare scores (H, M, T) as of `score_rows` where ``visible`` (M, T) holds."""
        change = _centred(after - before, visible)
        self.changed += float(change.square().sum())
        self.spread += float(_centred(before, visible).square().sum())
        weights = [x.masked_fill(~visible, float("-inf")).softmax(-1) for x in (before, after)]
        self.moved += float((weights[1] - weights[0]).abs().sum()) / 2
        self.rows += before.shape[0] * before.shape[1]

    @property
    def score_change(self) -> float | None:
        """Root mean square of the change over the scores' standard deviation within a query."""
        return (self.changed / self.spread) ** 0.5 if self.spread > 0 else None

    @property
    def attention_change(self) -> float | None:
        """Share of a query's attention that goes to other keys than before (total variation)."""
        return self.moved / self.rows if self.rows else None


def _centred(scores: Tensor, visible: Tensor) -> Tensor:
    scores = scores.masked_fill(~visible, 0.0)
    mean = scores.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
    return (scores - mean).masked_fill(~visible, 0.0)
