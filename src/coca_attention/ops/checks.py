"""Checks of shapes, and of tensors that fit each other."""

from numbers import Integral

import torch
from torch import Tensor


def check_width(width: int, what: str = "head width") -> None:
    """Raise ValueError unless ``width`` can be split into rotary pairs."""
    whole = isinstance(width, Integral | torch.SymInt) and not isinstance(width, bool)
    if not whole or width < 2 or width % 2:
        raise ValueError(f"{what} must be even and at least 2, to form rotary pairs; got {width!r}")


def check_heads(heads: int, kv_heads: int) -> None:
    """Raise ValueError unless heads can share key/value heads."""
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"the number of key/value heads must divide the number of query heads; got {kv_heads} "
            f"and {heads}"
        )


def check_positions(name: str, positions: Tensor, batch: int, length: int) -> None:
    """Raise ValueError unless positions have shape (length,) or (batch, length)."""
    if tuple(positions.shape) not in ((length,), (batch, length)):
        raise ValueError(
            f"{name} must have shape ({length},) or ({batch}, {length}), got "
            f"{tuple(positions.shape)}"
        )


def check_operands(query: Tensor, key_coefficients: Tensor, value: Tensor) -> None:
    """Raise ValueError or TypeError unless shapes and dtypes fit each other."""
    operands = {"query": query, "key_coefficients": key_coefficients, "value": value}
    for name, tensor in operands.items():
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (batch, heads, length, width), got shape "
                f"{tuple(tensor.shape)}"
            )
        if tensor.dtype != query.dtype or not tensor.is_floating_point():
            raise TypeError(
                f"query, key_coefficients and value must share one floating dtype; {name} is "
                f"{tensor.dtype}, query is {query.dtype}"
            )
    batch, heads, _, width = query.shape
    check_width(width)
    kv_heads, _, coefficients = key_coefficients.shape[1:]
    if not width // 2 <= coefficients <= width:
        raise ValueError(
            f"key_coefficients must have one number per rotary pair, {width // 2} for head width "
            f"{width}, and one more per free pair; got {coefficients} (use fold() to halve a "
            "full-width projection)"
        )
    if value.shape[:3] != key_coefficients.shape[:3] or batch != value.shape[0]:
        raise ValueError(
            f"batch, key/value heads and key length must match: query {tuple(query.shape)}, "
            f"key_coefficients {tuple(key_coefficients.shape)}, value {tuple(value.shape)}"
        )
    check_heads(heads, kv_heads)
