"""Rotary pairs: splitting a head into pairs, and rotating them.

Legend: B batch, H heads, T positions, D head width, P = D/2 rotary pairs, R rotary width.
"""

import torch
from torch import Tensor


def check_width(width: int, what: str = "head width") -> None:
    """Raise ValueError unless ``width`` can be split into rotary pairs."""
    if width < 2 or width % 2:
        raise ValueError(f"{what} must be even and at least 2, to form rotary pairs; got {width}")


def split_pairs(
    x: Tensor, interleaved: bool = False, rotary_width: int | None = None
) -> tuple[Tensor, Tensor]:
    """First and second members of every rotary pair.

    Args:
        x: (..., D).
        interleaved: False if pair j is (j, j + D/2) as in Llama and GPT-NeoX, True if it is
            (2j, 2j + 1) as in GPT-J, Cohere and the paper's formulas.
        rotary_width: R, if only the first R elements of a head are rotated (partial rotary). Pairs
            are formed within them; the remaining elements form half-split pairs of their own.
            Default D.

    Returns:
        Two tensors (..., P), views if R = D.

    Raises:
        ValueError: If D or R is odd, or R is larger than D.
    """
    check_width(x.shape[-1])
    if rotary_width is not None and rotary_width != x.shape[-1]:
        check_width(rotary_width, "rotary width")
        if rotary_width > x.shape[-1]:
            raise ValueError(
                f"the rotary width must be at most the head width {x.shape[-1]}; got {rotary_width}"
            )
        rotated = split_pairs(x[..., :rotary_width], interleaved)
        unrotated = split_pairs(x[..., rotary_width:])
        first, second = (torch.cat(both, dim=-1) for both in zip(rotated, unrotated, strict=True))
        return first, second
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second


def join_pairs(
    first: Tensor, second: Tensor, interleaved: bool = False, rotary_width: int | None = None
) -> Tensor:
    """Inverse of `split_pairs`: (..., P) and (..., P) to (..., D)."""
    if rotary_width is not None and rotary_width != 2 * first.shape[-1]:
        pairs = rotary_width // 2
        rotated = join_pairs(first[..., :pairs], second[..., :pairs], interleaved)
        return torch.cat((rotated, first[..., pairs:], second[..., pairs:]), dim=-1)
    if interleaved:
        return torch.stack((first, second), dim=-1).flatten(-2)
    return torch.cat((first, second), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate every pair of x by its angle: R_n x (CoCA paper, Eq. 1).

    Args:
        x: (B, H, T, D).
        cos: (T, R/2) or (B, T, R/2), see `Rotation.tables`. Pairs beyond R/2 are unchanged.
        sin: Like cos.
        interleaved: Pair layout, see `split_pairs`.

    Returns:
        (B, H, T, D) in the dtype of x.
    """
    span = 2 * cos.shape[-1]
    if span < x.shape[-1]:
        rotated = apply_rotary(x[..., :span], cos, sin, interleaved)
        return torch.cat((rotated, x[..., span:]), dim=-1)
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    first, second = split_pairs(x, interleaved)
    rotated = join_pairs(first * cos - second * sin, first * sin + second * cos, interleaved)
    return rotated.to(x.dtype)
