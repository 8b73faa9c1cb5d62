"""Angles between query and key, anomalous tokens, border crossings, and bounds on the scores.

Legend: H query heads, N (query, key) pairs of tokens, P rotary pairs, m a query's position, n a
key's, d = m - n their distance. The score of rotary pair j is |q_j| |k_j| cos(Θ_j + d θ_j) (CoCA
paper, Eq. 3), where Θ_j is the angle before rotation, counterclockwise from k_j to q_j.

Functions named ``…_sums`` give what one text contributes to a figure and ``…_values`` the figure,
so that texts may be read apart. Their size does not depend on the length of the text.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coca_attention.ops.positions import split_pairs

TURN = 2 * math.pi
CASES = ("a", "b", "c", "d")
"""Figure 3 of the paper: (a) m < n, Θ ≤ π; (b) m > n, Θ ≤ π; (c) m < n, Θ > π; (d) m > n, Θ > π."""
SNAP = 1e-9
"""Angles this near to a full turn, in radians, count as 0: round-off is not case (d)."""
ROUND_OFF = 1e-9
"""By how much a left side may exceed its right side, relative to the summed magnitudes."""

Sums = dict[str, Any]
"""What one text contributes to figures, by name."""
Findings = dict[str, Any]
"""Figures, as plain JSON values by name; docs/analysis.md describes them."""


class SeenKeys(NamedTuple):
    """Queries and the keys that they see, before rotation; each (H, N, P), complex128."""

    query: Tensor
    # k_n; in a CoCA model the key collinear with q_m that gives its score at m = n = 0, q_m * t_n
    # in the paper's forms (Eq. 7).
    built: Tensor
    # The key at position 0 that, rotated to n, gives the model's score: another one in the slack
    # form alone, whose key at n is q_m * R_n [t_n, t_n] (Eq. 10) and not R_n (q_m * t_n).
    effective: Tensor


class Borders(NamedTuple):
    """Crossings of the borders of Figure 7: of q_j, of -q_j, and full turns, back at k_j."""

    peaks: Tensor
    troughs: Tensor
    returns: Tensor


def numbers(values: Tensor) -> list[float | None]:
    """Plain numbers for JSON; None for values that are not finite."""
    return [x if math.isfinite(x) else None for x in values.tolist()]


def complex_pairs(x: Tensor, rotary_width: int, interleaved: bool = False) -> Tensor:
    """The R/2 rotated pairs of heads (..., D) before rotation as complex128 (Eq. 1), (..., R/2)."""
    first, second = split_pairs(x[..., :rotary_width], interleaved)
    return torch.complex(first.double(), second.double())


def signed_angles(query: Tensor, key: Tensor) -> Tensor:
    """Angle from k_j to q_j in radians, in [-π, π], float64; meaningless if either is zero."""
    return (query * key.conj()).angle()


def initial_angles(query: Tensor, key: Tensor) -> Tensor:
    """Θ_j of section 2.2, in [0, 2π); arguments as in `signed_angles`."""
    angles = torch.remainder(signed_angles(query, key), TURN)
    return angles.masked_fill((angles < SNAP) | (angles > TURN - SNAP), 0.0)


def anomalous_distance(angles: Tensor, theta: Tensor) -> Tensor:
    """τ_j in tokens, up to which a pair's score rises: (2π - Θ_j) / θ_j if Θ_j > π, else 0."""
    rises = (angles > math.pi) & (theta > 0)  # a pair that does not turn never rises
    return torch.where(rises, (TURN - angles) / theta, 0.0)


def farthest_key(length: int, window: int | None = None) -> int:
    """Largest distance in a text of ``length`` tokens, limited by a sliding window."""
    return min(length, window or length) - 1


def anomalous_tokens(tau: Tensor, length: int, window: int | None = None) -> Tensor:
    """Number of earlier tokens at a distance below τ, seen from the last token of a text."""
    return (tau.ceil() - 1).clamp(0, farthest_key(length, window))


def anomalous_share(tokens: Tensor, length: int, window: int | None = None) -> Tensor:
    """Share of all causal (m, n) pairs of a text whose distance is at most ``tokens``."""
    # A text of L tokens has L - d pairs at distance d, so c L - c (c + 1) / 2 up to distance c.
    last = farthest_key(length, window)
    every = last * length - last * (last + 1) / 2
    return (tokens * length - tokens * (tokens + 1) / 2) / every


def borders_crossed(angles: Tensor, theta: Tensor, distance: int) -> Borders:
    """Borders crossed as m - n grows from 0, which does not count, to ``distance`` (Eq. 25)."""
    # The slope of the score changes its sign where Θ_j + d θ_j passes a multiple of π: an even one
    # at q_j, an odd one at -q_j.
    swept = distance * theta
    start, end = angles / TURN, (angles + swept) / TURN
    return Borders(
        peaks=end.floor() - start.floor(),
        troughs=(end + 0.5).floor() - (start + 0.5).floor(),
        returns=(swept / TURN).floor().expand(angles.shape),
    )


def angle_sums(
    query: Tensor, key: Tensor, theta: Tensor, lengths: Sequence[int], window: int | None, bins: int
) -> Sums:
    """Angles, anomalous tokens and borders of complex queries and keys (H, N, P)."""
    # Where the ReLU gives t = 0 there is no angle: such pairs are counted, and left out elsewhere.
    angled = (query * key.conj()).abs() > 0
    angles = initial_angles(query, key)
    above = (angles > math.pi) & angled
    tau = anomalous_distance(angles, theta)

    def summed(x: Tensor) -> Tensor:
        return x.double().masked_fill(~angled, 0.0).sum((0, 1))

    by_length = []  # anomalous tokens and share, crossings of q_j, of -q_j, full turns
    for length in lengths:
        tokens = anomalous_tokens(tau, length, window)
        borders = borders_crossed(angles, theta, farthest_key(length, window))
        parts = (tokens, anomalous_share(tokens, length, window), *borders)
        by_length.append(torch.stack([summed(part) for part in parts]))
    largest = signed_angles(query, key).abs().masked_fill(~angled, 0.0)
    places = (angles / TURN * bins).long().clamp(max=bins - 1) + torch.arange(len(theta)) * bins
    return {
        "samples": angled.shape[0] * angled.shape[1],
        "angled": angled.sum((0, 1)),
        "histogram": places[angled].bincount(minlength=len(theta) * bins).view(-1, bins),
        "above": summed(above),
        "largest": float(largest.max()) if largest.numel() else 0.0,
        "tau": summed(tau),
        "by_length": torch.stack(by_length),
    }


def angle_values(sums: Sums, theta: Tensor, lengths: Sequence[int], window: int | None) -> Findings:
    """The figures of `angle_sums`."""
    angled, above = sums["angled"], sums["above"]
    by_length = []
    for length, of_length in zip(lengths, sums["by_length"], strict=True):
        tokens, share, *crossed = map(numbers, of_length / angled)
        collinear = numbers((farthest_key(length, window) * theta / math.pi).floor())
        borders = dict(zip(Borders._fields, crossed, strict=True)) | {"collinear": collinear}
        of_text = {"length": length, "anomalous_tokens": tokens, "anomalous_share": share}
        by_length.append(of_text | {"borders": borders})
    # A causal model attends only where m > n: cases (b) and (d).
    cases = torch.stack((0 * above, angled - above, 0 * above, above)).sum(-1) / angled.sum()
    return {
        "samples": int(sums["samples"]),
        "zero_share": numbers(1 - angled / sums["samples"]),
        "cases": dict(zip(CASES, numbers(cases), strict=True)),
        "case_d": numbers(above / angled),
        "largest": sums["largest"],
        "histogram": [numbers(row) for row in sums["histogram"] / angled.unsqueeze(-1)],
        "tau": numbers(sums["tau"] / above),
        "lengths": by_length,
    }


def steps(coefficients: Tensor) -> Tensor:
    """|x_{i+1} - x_i| of neighbouring pairs, (..., P), with zero after the last."""
    # Both bounds, by Abel's summation by parts, need this zero, which the paper does not state:
    # coefficients that are all equal would be bounded by 0.
    zero = torch.zeros_like(coefficients[..., :1])
    return torch.cat((coefficients, zero), dim=-1).diff(dim=-1).abs()


def _rotations(distances: Tensor, theta: Tensor) -> Tensor:
    """e^{i d θ_j}: (N,) and (P,) to (N, P), complex128."""
    angles = distances.double().unsqueeze(-1) * theta
    return torch.polar(torch.ones_like(angles), angles)


def rotary_scores(coefficients: Tensor, distances: Tensor, theta: Tensor) -> Tensor:
    """a(d) = Re Σ_j h_j e^{i d θ_j} (Eq. 2), (..., N), of h_j = q_j k_j^* or l_j = |q_j| |k_j|."""
    return (coefficients * _rotations(distances, theta)).sum(-1).real


def rotary_bound(coefficients: Tensor, distances: Tensor, theta: Tensor) -> Tensor:
    """Right side of Eq. 19: max_i |h_{i+1} - h_i| Σ_j |S_{j+1}|; see `rotary_scores`."""
    sums = _rotations(distances, theta).cumsum(-1)
    return steps(coefficients).amax(-1) * sums.abs().sum(-1)


def collinear_bound(magnitudes: Tensor, distances: Tensor, theta: Tensor) -> Tensor:
    """Right side of Eq. 20: max_i |l_{i+1} - l_i| Σ_j |C_{j+1}|. A bound if all Θ_j are 0."""
    sums = _rotations(distances, theta).real.cumsum(-1)
    return steps(magnitudes).amax(-1) * sums.abs().sum(-1)


def bound_check(left: Tensor, right: Tensor, size: Tensor) -> Sums:
    """How often ``left`` exceeds ``right`` beyond the round-off of terms of summed ``size``."""
    tolerance = ROUND_OFF * size.expand(left.shape)
    ratios = (left / right)[right > tolerance]
    return {
        "checked": left.numel(),
        "violations": int((left > right + tolerance).sum()),
        "largest_ratio": float(ratios.max()) if len(ratios) else None,
    }


def decay_sums(seen: SeenKeys, distances: Tensor, theta: Tensor) -> Sums:
    """Scores and bounds of keys at distances (N,), and the inequalities checked."""
    coefficients = seen.query * seen.effective.conj()  # h_j
    magnitudes = (seen.query * seen.built.conj()).abs()  # l_j of collinear keys
    size = coefficients.abs().sum(-1)
    score = rotary_scores(coefficients, distances, theta).abs()
    rotary = rotary_bound(coefficients, distances, theta)
    collinear = collinear_bound(magnitudes, distances, theta)
    at_zero = rotary_scores(magnitudes, distances, theta).abs()
    by_distance = {}
    for distance in distances.unique().tolist():
        here = (distances == distance).unsqueeze(0) & (size > 0)
        parts = [(x[here] / size[here]).sum() for x in (score, rotary, collinear)]
        by_distance[str(distance)] = torch.stack([*parts, here.sum().double()])
    each = steps(coefficients.abs()), steps(coefficients), size.unsqueeze(-1)
    return {
        "eq19": bound_check(score, rotary, size),
        "eq20": bound_check(at_zero, collinear, magnitudes.sum(-1)),
        "eq21": bound_check(*each),
        "score_against_eq20": bound_check(score, collinear, size),
        "by_distance": by_distance,
    }


def decay_values(sums: Sums) -> Findings:
    """The figures of `decay_sums`."""
    rows = []
    for distance in sorted(sums["by_distance"], key=int):
        *parts, count = sums["by_distance"][distance]
        means = zip(("score", "eq19", "eq20"), numbers(torch.stack(parts) / count), strict=True)
        rows.append({"distance": int(distance), **dict(means)})
    checks = {
        name: check | {field: int(check[field]) for field in ("checked", "violations")}
        for name, check in sums.items()
        if name != "by_distance"
    }
    return checks | {"by_distance": rows}
