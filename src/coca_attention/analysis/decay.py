"""Bounds of the attention score over the distance (CoCA paper, Eq. 19 to 21), and their check.

Legend: N (query, key) pairs of tokens, P rotary pairs, s = m - n their distance.

Both bounds are Abel's summation by parts, with the coefficient behind the last pair taken as
zero. The paper leaves that zero unsaid; without it, coefficients that are all equal would be
bounded by 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ROUND_OFF = 1e-9
"""What a left side may exceed its right side by, relative to the numbers that were added."""


def _turns(distances: Tensor, theta: Tensor) -> Tensor:
    """e^{i s θ_j}: (N,) and (P,) to (N, P), complex128."""
    angles = distances.double().unsqueeze(-1) * theta
    return torch.polar(torch.ones_like(angles), angles)


def _largest_step(coefficients: Tensor) -> Tensor:
    """Largest |x_{i+1} - x_i| over the pairs, with zero behind the last: (..., P) to (...)."""
    return steps(coefficients).amax(-1)


def steps(coefficients: Tensor) -> Tensor:
    """|x_{i+1} - x_i| of neighbouring pairs, with zero behind the last: (..., P)."""
    behind = torch.zeros_like(coefficients[..., :1])
    return torch.cat((coefficients, behind), dim=-1).diff(dim=-1).abs()


def rotary_scores(coefficients: Tensor, distances: Tensor, theta: Tensor) -> Tensor:
    """a(s) = Re Σ_j h_j e^{i s θ_j} (Eq. 2).

    Args:
        coefficients: h_j = q_j k_j^*, (..., N, P), complex, or l_j = |q_j| |k_j|, real.
        distances: s, (N,).
        theta: Angle per token of every pair, (P,).

    Returns:
        (..., N), float64, before scaling.
    """
    return (coefficients * _turns(distances, theta)).sum(-1).real


def rotary_bound(coefficients: Tensor, distances: Tensor, theta: Tensor) -> Tensor:
    """Right side of Eq. 19: max_i |h_{i+1} - h_i| Σ_j |S_{j+1}|; arguments as `rotary_scores`."""
    sums = _turns(distances, theta).cumsum(-1)
    return _largest_step(coefficients) * sums.abs().sum(-1)


def collinear_bound(magnitudes: Tensor, distances: Tensor, theta: Tensor) -> Tensor:
    """Right side of Eq. 20: max_i |l_{i+1} - l_i| Σ_j |C_{j+1}|. Holds where all Θ_j are 0.

    Args:
        magnitudes: l_j = |q_j| |k_j|, (..., N, P), real.
        distances: s, (N,).
        theta: Angle per token of every pair, (P,).

    Returns:
        (..., N), float64.
    """
    sums = _turns(distances, theta).real.cumsum(-1)
    return _largest_step(magnitudes) * sums.abs().sum(-1)


@dataclass
class BoundCheck:
    """An inequality tried on many numbers."""

    checked: int = 0
    """Numbers compared."""
    violations: int = 0
    """How many left sides exceed their right side by more than round-off."""
    largest_ratio: float | None = None
    """Largest left side over right side, where the right side is more than round-off."""

    def add(self, left: Tensor, right: Tensor, size: Tensor) -> None:
        """Compare.

        Args:
            left: What should be at most ``right``; any shape.
            right: Of the same shape.
            size: Sum of the magnitudes of the numbers added on the left, which sets the
                round-off; broadcastable.
        """
        slack = ROUND_OFF * size.expand(left.shape)
        self.checked += left.numel()
        self.violations += int((left > right + slack).sum())
        sound = right > slack
        if bool(sound.any()):
            ratio = float((left[sound] / right[sound]).max())
            self.largest_ratio = max(ratio, self.largest_ratio or 0.0)
