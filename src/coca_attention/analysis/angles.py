"""The angle between a query and a key, the tokens it makes anomalous, the borders it crosses.

Legend: H query heads, N (query, key) pairs of tokens, P rotary pairs, m a query's position, n a
key's, d = m - n their distance.

The score of rotary pair j is |q_j| |k_j| cos(Θ_j + d θ_j) (CoCA paper, Eq. 3), Θ_j being the angle
before rotation, measured counterclockwise from k_j to q_j. Everything here is elementwise in Θ, so
angles may have any shape that ends in P.
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
"""Angles closer to a whole turn than this, in radians, are 0: round-off is no case (d)."""


class Borders(NamedTuple):
    """How often the relative angle crosses each of Figure 7's borders.

    Attributes:
        peaks: Crossings of q_j, where the score turns from rising to falling.
        troughs: Crossings of -q_j, where it turns from falling to rising.
        returns: Full turns, each of which passes k_j, where the rotation began; the score turns
            nowhere there.
    """

    peaks: Tensor
    troughs: Tensor
    returns: Tensor


def complex_pairs(x: Tensor, rotary_width: int, interleaved: bool = False) -> Tensor:
    """Rotated pairs of a head as complex numbers (Eq. 1): first member real, second imaginary.

    Args:
        x: (..., D), before rotation.
        rotary_width: Numbers of a head that are rotated, R; the others have no angle.
        interleaved: Pair layout, see `split_pairs`.

    Returns:
        (..., R/2), complex128.
    """
    first, second = split_pairs(x[..., :rotary_width], interleaved)
    return torch.complex(first.double(), second.double())


def signed_angles(query: Tensor, key: Tensor) -> Tensor:
    """Angle from k_j counterclockwise to q_j, in [-π, π]; without meaning where one is zero.

    Args:
        query: q before rotation, (..., P), complex.
        key: k before rotation, broadcastable to the query.

    Returns:
        (..., P), float64, in radians.
    """
    return (query * key.conj()).angle()


def initial_angles(query: Tensor, key: Tensor) -> Tensor:
    """Θ_j of section 2.2, in [0, 2π); arguments as of `signed_angles`."""
    angles = torch.remainder(signed_angles(query, key), TURN)
    return angles.masked_fill((angles < SNAP) | (angles > TURN - SNAP), 0.0)


def figure_3_cases(angles: Tensor, distances: Tensor) -> Tensor:
    """Which case of Figure 3 every angle belongs to, as an index into `CASES`.

    Args:
        angles: Θ in [0, 2π), (..., N, P).
        distances: m - n, (N,). A causal model attends where it is positive: cases (b) and (d).

    Returns:
        (..., N, P), int64.

    Raises:
        ValueError: If a distance is zero, which is no case of the figure.
    """
    if bool((distances == 0).any()):
        raise ValueError("the four cases need tokens at different positions: a distance is zero")
    return 2 * (angles > math.pi).long() + (distances > 0).long().unsqueeze(-1)


def anomalous_distance(angles: Tensor, theta: Tensor) -> Tensor:
    """τ_j, the distance up to which a pair's score rises: (2π - Θ_j) / θ_j in case (d), else 0.

    Args:
        angles: Θ in [0, 2π), (..., P).
        theta: Angle per token of every pair, (P,), positive.

    Returns:
        (..., P), in tokens, not rounded.
    """
    return torch.where(angles > math.pi, (TURN - angles) / theta, 0.0)


def farthest_key(length: int, window: int | None = None) -> int:
    """Largest distance inside a text of ``length`` tokens, and inside a sliding window."""
    return min(length, window or length) - 1


def anomalous_tokens(tau: Tensor, length: int, window: int | None = None) -> Tensor:
    """Earlier tokens at a distance below τ, seen from the last token of a text.

    Args:
        tau: τ in tokens, any shape.
        length: Tokens of the text.
        window: Tokens that a layer sees, the query's own included; None for all.

    Returns:
        Whole numbers of the shape of tau, float64.
    """
    return (tau.ceil() - 1).clamp(0, farthest_key(length, window))


def anomalous_share(tokens: Tensor, length: int, window: int | None = None) -> Tensor:
    """Share of all causal (m, n) pairs of a text whose distance is at most ``tokens``.

    A text of L tokens has L - d pairs at distance d, so up to distance c there are
    c L - c (c + 1) / 2.

    Args:
        tokens: What `anomalous_tokens` gives for this length and window.
        length: L, at least 2.
        window: Tokens that a layer sees, the query's own included; None for all.

    Returns:
        The shape of tokens, float64, in [0, 1].
    """
    last = farthest_key(length, window)
    every = last * length - last * (last + 1) / 2
    return (tokens * length - tokens * (tokens + 1) / 2) / every


def borders_crossed(angles: Tensor, theta: Tensor, distance: int) -> Borders:
    """Borders crossed while m - n grows from 0 to ``distance`` (Figure 7, Eq. 25).

    The score's slope changes its sign where Θ_j + d θ_j passes a multiple of π: an even one at
    q_j, an odd one at -q_j. A border met at d = 0 is where the rotation begins, and not crossed.

    Args:
        angles: Θ in [0, 2π), (..., P).
        theta: Angle per token of every pair, (P,).
        distance: Tokens, at least 0.
    """
    swept = distance * theta
    begin = angles / TURN
    end = (angles + swept) / TURN
    return Borders(
        peaks=end.floor() - begin.floor(),
        troughs=(end + 0.5).floor() - (begin + 0.5).floor(),
        returns=(swept / TURN).floor().expand(angles.shape),
    )
