"""Bounds on the attention score as a function of distance (CoCA paper, Eq. 19 to 21), and checks.

Legend: N (query, key) pairs of tokens, P rotary pairs, s = m - n their distance.

Both bounds follow from Abel's summation by parts with a zero coefficient after the last pair. The
paper does not state this zero; without it, coefficients that are all equal would be bounded by 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coca_lab.analysis.sums import Sums

ROUND_OFF = 1e-9
"""Tolerance by which a left side may exceed its right side, relative to the summed magnitudes."""


def _rotations(distances: Tensor, theta: Tensor) -> Tensor:
    """e^{i s θ_j}: (N,) and (P,) to (N, P), complex128."""
    angles = distances.double().unsqueeze(-1) * theta
    return torch.polar(torch.ones_like(angles), angles)


def _largest_step(coefficients: Tensor) -> Tensor:
    """Largest |x_{i+1} - x_i| over the pairs, with zero after the last: (..., P) to (...)."""
    return steps(coefficients).amax(-1)


def steps(coefficients: Tensor) -> Tensor:
    """|x_{i+1} - x_i| of neighbouring pairs, with zero after the last: (..., P)."""
    zero = torch.zeros_like(coefficients[..., :1])
    return torch.cat((coefficients, zero), dim=-1).diff(dim=-1).abs()


def rotary_scores(coefficients: Tensor, distances: Tensor, theta: Tensor) -> Tensor:
    """a(s) = Re Σ_j h_j e^{i s θ_j} (Eq. 2).

    Args:
        coefficients: h_j = q_j k_j^*, (..., N, P), complex, or l_j = |q_j| |k_j|, real.
        distances: s, (N,).
        theta: Angle per token of every pair, (P,).

    Returns:
        (..., N), float64, before scaling.
    """
    return (coefficients * _rotations(distances, theta)).sum(-1).real


def rotary_bound(coefficients: Tensor, distances: Tensor, theta: Tensor) -> Tensor:
    """Right side of Eq. 19: max_i |h_{i+1} - h_i| Σ_j |S_{j+1}|; see `rotary_scores`."""
    sums = _rotations(distances, theta).cumsum(-1)
    return _largest_step(coefficients) * sums.abs().sum(-1)


def collinear_bound(magnitudes: Tensor, distances: Tensor, theta: Tensor) -> Tensor:
    """Right side of Eq. 20: max_i |l_{i+1} - l_i| Σ_j |C_{j+1}|. A bound if all Θ_j are 0.

    Args:
        magnitudes: l_j = |q_j| |k_j|, (..., N, P), real.
        distances: s, (N,).
        theta: Angle per token of every pair, (P,).

    Returns:
        (..., N), float64.
    """
    sums = _rotations(distances, theta).real.cumsum(-1)
    return _largest_step(magnitudes) * sums.abs().sum(-1)


@dataclass
class BoundCheck(Sums):
    """Checks an inequality on many values."""

    checked: int = 0
    """Number of values compared."""
    violations: int = 0
    """Number of left sides that exceed their right side by more than round-off."""
    largest_ratio: float | None = None
    """Largest ratio of left to right side, among right sides above round-off."""

    def add(self, left: Tensor, right: Tensor, size: Tensor) -> None:
        """Compare left and right sides.

        Args:
            left: Values that should be at most ``right``; any shape.
            right: Same shape as left.
            size: Sum of the magnitudes of the terms on the left, which determines the round-off;
                broadcastable.
        """
        tolerance = ROUND_OFF * size.expand(left.shape)
        self.checked += left.numel()
        self.violations += int((left > right + tolerance).sum())
        significant = right > tolerance
        if bool(significant.any()):
            ratio = float((left[significant] / right[significant]).max())
            self.largest_ratio = max(ratio, self.largest_ratio or 0.0)
