"""The keys that queries see, and how much scores change when all positions move alike.

Legend: H query heads, G key/value heads, T length, M sampled queries, N pairs of tokens, P rotated
pairs, D head width, m a query's position, n a key's.

Rotary attention and shift-invariant forms depend only on m - n, so only round-off changes. Scores
of the slack form (Eq. 10) depend on m and n.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coca_attention.ops import apply_rotary, get_form, key_map, query_map
from coca_lab.analysis.angles import SeenKeys, Sums, complex_pairs, numbers
from coca_lab.analysis.capture import VANILLA, LayerHeads, visible_keys


class TokenPairs(NamedTuple):
    """Indices of queries and keys in a text, each (N,), int64, with m > n."""

    queries: Tensor
    keys: Tensor

    @property
    def distances(self) -> Tensor:
        """m - n, (N,)."""
        return self.queries - self.keys


def draw_pairs(length: int, count: int, window: int | None, rng: np.random.Generator) -> TokenPairs:
    """Draw pairs with replacement, uniformly from the causal pairs of a text inside the window."""
    distances = np.arange(1, min(length, window or length))
    if len(distances):  # in a window of one token, a token sees only itself
        probabilities = (length - distances) / (length - distances).sum()
        distances = rng.choice(distances, size=count, p=probabilities)
    return _pairs_at(distances, length, rng)


def pairs_by_distance(
    length: int, count: int, window: int | None, rng: np.random.Generator
) -> TokenPairs:
    """Draw ``count`` pairs at each of the distances 1, 2, 4, … in a text and a window."""
    distances = 2 ** np.arange((min(length, window or length) - 1).bit_length())
    return _pairs_at(np.repeat(distances, count), length, rng)


def _pairs_at(distances: np.ndarray, length: int, rng: np.random.Generator) -> TokenPairs:
    keys = rng.integers(length - distances)
    return TokenPairs(torch.from_numpy(keys + distances), torch.from_numpy(keys))


def _paired(heads: LayerHeads, pairs: TokenPairs) -> tuple[Tensor, Tensor]:
    """Queries (H, N, P), complex128, and keys alike, or the float64 coefficients of CoCA models."""
    query = complex_pairs(heads.query[0, :, pairs.queries], heads.rotation.width, heads.interleaved)
    key = heads.key[0, :, pairs.keys].repeat_interleave(len(query) // heads.key.shape[1], dim=0)
    if heads.form == VANILLA:
        return query, complex_pairs(key, heads.rotation.width, heads.interleaved)
    collinear = len(heads.theta)
    return query[..., :collinear], key[..., :collinear].double()


def relative_parts(heads: LayerHeads, query: Tensor) -> tuple[Tensor, Tensor]:
    """U and V, (H, N, P), of the score Re Σ_j t_j (U_j e^{-i(m-n)θ_j} + V_j e^{-i(m+n)θ_j})."""
    # In every form Q' = A cos mθ + B sin mθ and K' = t (cos nθ, sin nθ); A and B are (H, N, 2, P).
    one, zero = torch.ones_like(query.real), torch.zeros_like(query.real)
    learned = {n: x.double().unsqueeze(1) for n, x in (heads.parameters or {}).items()}
    (a0, a1), (b0, b1) = (
        get_form(heads.form).query(query.real, query.imag, cos, sin, **learned).unbind(-2)
        for cos, sin in ((one, zero), (zero, one))
    )
    return torch.complex(a0 + b1, b0 - a1) / 2, torch.complex(a0 - b1, a1 + b0) / 2


def seen_keys(heads: LayerHeads, pairs: TokenPairs) -> SeenKeys:
    """Queries of a layer and the keys they see in one text (B = 1), without free pairs."""
    query, key = _paired(heads, pairs)
    if heads.form == VANILLA:
        return SeenKeys(query, key, key)
    relative, absolute = relative_parts(heads, query)
    turned = torch.polar(torch.ones_like(key), -2 * pairs.keys.double().unsqueeze(-1) * heads.theta)
    size = query.abs().square()
    built, effective = (
        query * torch.where(size == 0, 0, key * score / size)
        for score in ((relative + absolute).real, relative + absolute * turned)
    )
    return SeenKeys(query, built, effective)


def part_energies(heads: LayerHeads, pairs: TokenPairs) -> Tensor:
    """Summed squares of the relative and the absolute part of the scores of some pairs, (2,)."""
    query, key = _paired(heads, pairs)
    if heads.form == VANILLA:
        return torch.stack(((query * key).abs().square().sum(), query.real.new_zeros(())))
    relative, absolute = relative_parts(heads, query)
    turns = heads.theta > 0  # the others do not depend on positions
    parts = torch.where(turns, relative, relative + absolute), absolute * turns
    return torch.stack([(key * part).abs().square().sum() for part in parts])


def score_rows(heads: LayerHeads, queries: Tensor, shift: int = 0) -> Tensor:
    """Scaled scores (H, M, T) of queries (M,) against every key, with all positions shifted."""
    # In float64, so that differences are not round-off.
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


def shift_sums(heads: LayerHeads, queries: Tensor, shifts: list[int]) -> Sums:
    """By shift, the change of a layer's scores of some queries (M,)."""
    visible = visible_keys(queries, heads.key.shape[-2], heads.window)
    before = score_rows(heads, queries)
    return {str(s): change_sums(before, score_rows(heads, queries, s), visible) for s in shifts}


def change_sums(before: Tensor, after: Tensor, visible: Tensor) -> Sums:
    """Change of scores (H, M, T) where ``visible`` (M, T) is True."""

    def centred(scores: Tensor) -> Tensor:
        # Without the mean over a query's visible keys, which softmax ignores.
        scores = scores.masked_fill(~visible, 0.0)
        mean = scores.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
        return (scores - mean).masked_fill(~visible, 0.0)

    weights = [x.masked_fill(~visible, float("-inf")).softmax(-1) for x in (before, after)]
    return {
        "changed": centred(after - before).square().sum(),
        "spread": centred(before).square().sum(),
        "moved": (weights[1] - weights[0]).abs().sum() / 2,
        "rows": before.shape[0] * before.shape[1],
    }


def change_values(sums: Sums) -> dict[str, float | None]:
    """From `change_sums`: the changes of scores and attention, described in docs/analysis.md."""
    scores, attention = (sums["changed"] / sums["spread"]).sqrt(), sums["moved"] / sums["rows"]
    score_change, attention_change = numbers(torch.stack((scores, attention)))
    return {"score_change": score_change, "attention_change": attention_change}
