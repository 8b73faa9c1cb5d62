"""PoPE, polar coordinate position embedding (arXiv 2509.10534).

    score(m, n) = Σ_c softplus(q_c) softplus(k_c) cos((n - m) θ_c + δ_c) / √d,   c = 0 … d - 1

Every number of a head has a frequency of its own, θ_c = base^(-c/d), and the phase δ_c in [-2π, 0]
is learned, from 0 on. Collinearity at full width: magnitudes alone depend on the text. The phase is
learned for every query head, also where several share a key.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coca_attention.ops import Rotation, key_map
from studies.verdict.collinear import SHIFTED, shift
from studies.verdict.score import Score


class PoPE(Score):
    """Magnitudes by softplus, with a phase for every head and frequency.

    Args:
        heads: H.
        rotation: Positions, of width 2d.
    """

    def __init__(self, heads: int, rotation: Rotation) -> None:
        super().__init__(heads, rotation)
        self.query_width = self.key_width = rotation.width // 2
        self.learned = nn.ParameterDict(SHIFTED.initial_parameters(heads, self.query_width))

    def forward(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        phase = self.learned["phase"].clamp(-2 * math.pi, 0)
        tables = torch.cat(shift(cos, sin, -phase.unsqueeze(1)), dim=-1)
        effective = F.softplus(query).repeat(1, 1, 1, 2) * (tables * self.query_width**-0.5)
        return effective, key_map(F.softplus(key), cos, sin)
