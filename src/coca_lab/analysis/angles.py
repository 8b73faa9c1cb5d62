"""The angle between query and key, anomalous tokens, and border crossings.

Legend: H query heads, N (query, key) pairs of tokens, P rotary pairs, m a query's position, n a
key's, d = m - n their distance.

The score of rotary pair j is |q_j| |k_j| cos(Θ_j + d θ_j) (CoCA paper, Eq. 3), where Θ_j is the
angle before rotation, measured counterclockwise from k_j to q_j. All functions are elementwise in
Θ, so angles may have any shape (..., P).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from coca_attention.ops.positions import split_pairs

TURN = 2 * math.pi
CASES = ("a", "b", "c", "d")
"""Figure 3 of the paper: (a) m < n, Θ ≤ π; (b) m > n, Θ ≤ π; (c) m < n, Θ > π; (d) m > n, Θ > π."""
SNAP = 1e-9
"""Angles within this distance of a full turn, in radians, count as 0, so that round-off is not
case (d)."""


class Borders(NamedTuple):
    """Number of crossings of each border of Figure 7.

    Attributes:
        peaks: Crossings of q_j, where the score changes from rising to falling.
        troughs: Crossings of -q_j, where it changes from falling to rising.
        returns: Full turns, each of which passes the starting point k_j, where the score does not
            change its direction.
    """

    peaks: Tensor
    troughs: Tensor
    returns: Tensor


def complex_pairs(x: Tensor, rotary_width: int, interleaved: bool = False) -> Tensor:
    """Rotated pairs of a head as complex numbers (Eq. 1): first member real, second imaginary.

    Args:
        x: (..., D), before rotation.
        rotary_width: Rotary width R; elements beyond it have no angle.
        interleaved: Pair layout, see `split_pairs`.

    Returns:
        (..., R/2), complex128.
    """
    first, second = split_pairs(x[..., :rotary_width], interleaved)
    return torch.complex(first.double(), second.double())


def signed_angles(query: Tensor, key: Tensor) -> Tensor:
    """Angle from k_j counterclockwise to q_j, in [-π, π]; meaningless if either is zero.

    Args:
        query: q before rotation, (..., P), complex.
        key: k before rotation, broadcastable to the query.

    Returns:
        (..., P), float64, in radians.
    """
    return (query * key.conj()).angle()


def initial_angles(query: Tensor, key: Tensor) -> Tensor:
    """Θ_j of section 2.2, in [0, 2π); arguments as in `signed_angles`."""
    angles = torch.remainder(signed_angles(query, key), TURN)
    return angles.masked_fill((angles < SNAP) | (angles > TURN - SNAP), 0.0)


def figure_3_cases(angles: Tensor, distances: Tensor) -> Tensor:
    """The case of Figure 3 for every angle, as an index into `CASES`.

    Args:
        angles: Θ in [0, 2π), (..., N, P).
        distances: m - n, (N,). Positive in a causal model: cases (b) and (d).

    Returns:
        (..., N, P), int64.

    Raises:
        ValueError: If a distance is zero, which the figure does not cover.
    """
    if bool((distances == 0).any()):
        raise ValueError("distances must not be zero: Figure 3 is about different positions")
    return 2 * (angles > math.pi).long() + (distances > 0).long().unsqueeze(-1)


def anomalous_distance(angles: Tensor, theta: Tensor) -> Tensor:
    """τ_j, the distance up to which a pair's score rises: (2π - Θ_j) / θ_j in case (d), else 0.

    Args:
        angles: Θ in [0, 2π), (..., P).
        theta: Angle per token of every pair, (P,).

    Returns:
        (..., P), in tokens, not rounded; 0 for pairs that do not turn, whose score never rises.
    """
    rises = (angles > math.pi) & (theta > 0)
    return torch.where(rises, (TURN - angles) / theta, 0.0)


def farthest_key(length: int, window: int | None = None) -> int:
    """Largest distance in a text of ``length`` tokens, limited by a sliding window."""
    return min(length, window or length) - 1


def anomalous_tokens(tau: Tensor, length: int, window: int | None = None) -> Tensor:
    """Number of earlier tokens at a distance below τ, seen from the last token of a text.

    Args:
        tau: τ in tokens, any shape.
        length: Tokens of the text.
        window: Sliding window of the layer in tokens, including the query's own; None for all.

    Returns:
        Integers as float64, in the shape of tau.
    """
    return (tau.ceil() - 1).clamp(0, farthest_key(length, window))


def anomalous_share(tokens: Tensor, length: int, window: int | None = None) -> Tensor:
    """Share of all causal (m, n) pairs of a text whose distance is at most ``tokens``.

    A text of L tokens has L - d pairs at distance d, so up to distance c there are
    c L - c (c + 1) / 2.

    Args:
        tokens: From `anomalous_tokens` for this length and window.
        length: L, at least 2.
        window: Sliding window of the layer in tokens, including the query's own; None for all.

    Returns:
        Float64 in [0, 1], in the shape of tokens.
    """
    last = farthest_key(length, window)
    every = last * length - last * (last + 1) / 2
    return (tokens * length - tokens * (tokens + 1) / 2) / every


def borders_crossed(angles: Tensor, theta: Tensor, distance: int) -> Borders:
    """Borders crossed as m - n grows from 0 to ``distance`` (Figure 7, Eq. 25).

    The slope of the score changes its sign where Θ_j + d θ_j passes a multiple of π: an even one at
    q_j, an odd one at -q_j. A border at d = 0 is the starting point and does not count as crossed.

    Args:
        angles: Θ in [0, 2π), (..., P).
        theta: Angle per token of every pair, (P,).
        distance: Tokens, at least 0.
    """
    swept = distance * theta
    start = angles / TURN
    end = (angles + swept) / TURN
    return Borders(
        peaks=end.floor() - start.floor(),
        troughs=(end + 0.5).floor() - (start + 0.5).floor(),
        returns=(swept / TURN).floor().expand(angles.shape),
    )
