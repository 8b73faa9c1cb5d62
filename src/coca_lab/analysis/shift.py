"""How much attention changes when all positions move by the same number of tokens.

Legend: H query heads, G key/value heads, M sampled queries, T keys, D head width.

Rotary attention and shift-invariant forms depend only on m - n, so only round-off changes. Scores
of the slack form (Eq. 10) depend on m and n.
"""

import torch
from torch import Tensor

from coca_attention.ops import apply_rotary, key_map, query_map
from coca_lab.analysis.angles import complex_pairs
from coca_lab.analysis.capture import VANILLA, LayerHeads
from coca_lab.analysis.keys import TokenPairs, query_parts
from coca_lab.analysis.sums import Sums


def score_rows(heads: LayerHeads, queries: Tensor, shift: int = 0) -> Tensor:
    """Scaled attention scores of some queries against every key, with all positions shifted.

    Computed in float64 from the layer's activations, so that differences are not round-off.

    Args:
        heads: A layer's queries and keys of one text (B = 1).
        queries: Indices of queries, (M,).
        shift: Added to the positions of queries and keys, in tokens.

    Returns:
        (H, M, T), float64, including keys after a query, and a decay if there is one.
    """
    query, key = heads.query[:, :, queries].double(), heads.key.double()
    positions = torch.arange(key.shape[-2]) + shift
    cos, sin = heads.rotation.tables(positions, torch.float64)
    factor = heads.rotation.query_factor(positions[queries], torch.float64, heads.window)
    if heads.form == VANILLA:
        query = apply_rotary(query, cos[queries], sin[queries], heads.interleaved)
        key = apply_rotary(key, cos, sin, heads.interleaved)
        if factor is not None:
            query = query * factor.unsqueeze(-1)
    else:
        query = query_map(
            query,
            cos[queries],
            sin[queries],
            form=heads.form,
            factor=factor,
            interleaved=heads.interleaved,
            free_pairs=heads.free_pairs,
            parameters=heads.parameters,
        )
        key = key_map(key, cos, sin, free_pairs=heads.free_pairs)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = (query @ key.transpose(-2, -1) * heads.scale)[0]
    if heads.rotation.bias is not None:
        scores = scores + heads.rotation.bias(positions[queries], positions, torch.float64)
    return scores


def relative_parts(heads: LayerHeads, query: Tensor) -> tuple[Tensor, Tensor]:
    """The relative part of a form's scores, and the rest (App. D.4).

    The score of a pair with coefficient t is the real part of

        t (relative e^{-i(m - n)θ} + absolute e^{-i(m + n)θ}),

    because forms are linear in cos mθ and sin mθ, and keys are t (cos nθ, sin nθ). Averaged over
    all common shifts of the positions, the second term is 0: the first is the nearest relative
    score.

    Args:
        heads: A layer of a CoCA model.
        query: Collinear pairs of queries before rotation, (H, N, C), complex128.

    Returns:
        relative and absolute, each (H, N, C), complex128.
    """
    (a0, a1), (b0, b1) = (part.unbind(-2) for part in query_parts(heads, query))
    return torch.complex(a0 + b1, b0 - a1) / 2, torch.complex(a0 - b1, a1 + b0) / 2


def part_energies(heads: LayerHeads, pairs: TokenPairs) -> Tensor:
    """Summed squares of the relative and the absolute part of the scores of some pairs, (2,)."""
    query = complex_pairs(heads.query[0, :, pairs.queries], heads.rotary_width, heads.interleaved)
    key = heads.key[0, :, pairs.keys].repeat_interleave(len(query) // heads.key.shape[1], dim=0)
    if heads.form == VANILLA:
        key = complex_pairs(key, heads.rotary_width, heads.interleaved)
        return torch.stack(((query * key).abs().square().sum(), query.real.new_zeros(())))
    collinear = len(heads.theta)
    coefficients = key[..., :collinear].double()
    relative, absolute = relative_parts(heads, query[..., :collinear])
    turns = heads.theta > 0  # the others do not depend on positions
    parts = torch.where(turns, relative, relative + absolute), absolute * turns
    return torch.stack([(coefficients * part).abs().square().sum() for part in parts])


def visible_keys(queries: Tensor, length: int, window: int | None = None) -> Tensor:
    """Mask of the keys visible to queries of a causal layer, (M,) to (M, T), boolean."""
    distance = queries.unsqueeze(-1) - torch.arange(length)
    return (distance >= 0) & (distance < (window or length))


class ScoreShift(Sums):
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
