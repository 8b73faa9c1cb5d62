"""What a score function is.

Legend: B batch, T tokens, H query heads, G key/value heads, D head width, P = D/2 rotary pairs.
"""

from torch import Tensor, nn

from coca_attention.ops import Rotation


class Score(nn.Module):
    """From projected queries and keys to effective ones, whose dot products are the scores.

    Args:
        heads: H.
        rotation: Positions; its temperature and decay are applied by the attention, not here.

    Attributes:
        query_width: Numbers that the query projection gives every query head.
        key_width: Numbers that the key projection gives every key head, and that a cache must hold
            besides the values: positions are applied after it.
    """

    query_width: int
    key_width: int

    def __init__(self, heads: int, rotation: Rotation) -> None:
        super().__init__()
        self.heads = heads
        self.rotation = rotation

    def forward(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Effective queries, scaled, and effective keys.

        Args:
            query: (B, H, T, query_width).
            key: (B, G, T, key_width).
            cos: cos of the angles at the T positions, (T, R/2), from `Rotation.tables`.
            sin: Like cos.

        Returns:
            (B, H, T, E) and (B, G, T, E), for a width E of the score's own.
        """
        raise NotImplementedError
