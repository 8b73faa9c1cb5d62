"""Rotary attention (RoFormer, arXiv 2104.09864, Eq. 16), and dot products without positions.

    score(m, n) = (R_m q_m) · (R_n k_n) / √D

R_m rotates pair j by m θ_j. With ``turning: 0`` no pair turns, and the score is q·k / √D (NoPE). A
width D below that of the values makes thin keys (arXiv 2603.04427), the control of every half
cache: a collinear head of width 2D has D coefficients in its cache, too.
"""

from torch import Tensor

from coca_attention.ops import Rotation, apply_rotary
from studies.verdict.score import Score


class Rotary(Score):
    """Rotary queries and keys.

    Args:
        heads: H.
        rotation: Positions, of width D.
    """

    def __init__(self, heads: int, rotation: Rotation) -> None:
        super().__init__(heads, rotation)
        self.query_width = self.key_width = rotation.width

    def forward(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        query, key = (apply_rotary(x, cos, sin) for x in (query, key))
        return query * self.query_width**-0.5, key
