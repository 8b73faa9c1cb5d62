"""How positions act on queries and keys: the angles of the rotary pairs, as tables of cos and sin.

Legend: B batch, T positions, R rotary width, m a query's position, n a key's.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from coca_attention.ops.positions.pairs import check_width
from coca_attention.ops.positions.rules import UNSCALED, Rule

Table = tuple[Tensor, Tensor]
"""cos and sin of the angles of every rotated pair, each (..., T, R/2)."""


@dataclass(frozen=True)
class Rotation:
    """What a position does to a query and to a key.

    Pair j turns by the angle ``n theta_j`` at position n. Whatever else a position does acts on
    the query alone, as a factor on its tables: scores are linear in them, and what a cache holds
    of the keys does not depend on it.

    Attributes:
        width: Rotary width R, the numbers of a head that are rotated; even.
        base: Base of the geometric series of frequencies.
        rule: Rule for reading beyond the training length.
        turning: Pairs that turn; the slower ones after them have angle 0. Default: all.
        temperature: Length at which queries keep their size, in tokens: a query that sees n keys is
            multiplied by ln(n + 1) / ln(temperature + 1), so that attention does not spread out as
            texts grow (arXiv 2501.19399). Default: no such factor.
    """

    width: int
    base: float = 10000.0
    rule: Rule = field(default=UNSCALED)
    turning: int | None = None
    temperature: int | None = None

    def __post_init__(self) -> None:
        check_width(self.width, "rotary width")
        pairs = self.width // 2
        if self.turning is not None and not 0 <= self.turning <= pairs:
            raise ValueError(
                f"the number of turning pairs must lie between 0 and {pairs}, got {self.turning}"
            )
        if self.temperature is not None and self.temperature < 1:
            raise ValueError(f"temperature must be at least 1 token, got {self.temperature}")

    def frequencies(self) -> Tensor:
        """theta of shape (R/2,), float64, in radians per token.

        Raises:
            ValueError: If the base is not positive or the rule lacks a parameter.
        """
        theta = self.rule.frequencies(self.width, self.base)
        if self.turning is not None:
            theta[self.turning :] = 0.0
        return theta

    def for_length(self, length: int) -> "Rotation":
        """The rotation as it applies to a text of so many tokens."""
        return replace(self, rule=self.rule.for_length(length))

    def tables(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Table:
        """cos and sin of every rotated pair's angle.

        Angles are formed in float64 (float32 on devices without it): at position 100,000 a float32
        angle is already off by 0.004 radians.

        Args:
            positions: Positions, any shape (..., T), integer or floating.
            dtype: dtype of the result.

        Returns:
            cos and sin, each (..., T, R/2).
        """
        if self.rule.follows_length:
            return self.for_length(int(positions.max().item()) + 1).tables(positions, dtype)
        angle_dtype = torch.float32 if positions.device.type == "mps" else torch.float64
        theta = self.frequencies().to(positions.device, angle_dtype)
        angles = positions.to(angle_dtype).unsqueeze(-1) * theta
        magnitude = self.rule.magnitude
        return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)

    def query_factor(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """What queries are multiplied by at their positions; None where nothing multiplies them.

        Args:
            positions: Positions, any shape (..., T).
            dtype: dtype of the result, float32 or wider.

        Returns:
            (..., T).
        """
        if self.temperature is None:
            return None
        # n + 1, where the query at position m = n - 1 sees n keys.
        return (positions.to(dtype) + 2).log() / math.log(self.temperature + 1)
