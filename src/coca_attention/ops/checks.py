"""Checks of what describes positions: types and ranges."""

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor


def check_width(width: int, what: str = "head width") -> None:
    """Raise ValueError unless ``width`` can be split into rotary pairs."""
    whole = _is_whole(width) or torch.jit.is_tracing()  # which takes sizes for tensors
    if not whole or width < 2 or width % 2:
        raise ValueError(f"{what} must be even and at least 2, to form rotary pairs; got {width}")


def check_heads(heads: int, kv_heads: int) -> None:
    """Raise ValueError unless heads can share key/value heads."""
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"the number of key/value heads must divide the number of query heads; got {kv_heads} "
            f"and {heads}"
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral | torch.SymInt) and not isinstance(value, bool)


def check_whole(
    name: str,
    value: Any,
    lowest: int = 1,
    highest: int | None = None,
    error: type[ValueError] = ValueError,
) -> None:
    """Raise ``error`` unless a value is a whole number in a range; True is none."""
    if not _is_whole(value) or value < lowest or (highest is not None and value > highest):
        limits = f"from {lowest}" if highest is None else f"between {lowest} and {highest}"
        raise error(f"{name} must be a whole number {limits}, got {value!r}")


def check_real(
    name: str,
    value: Any,
    lowest: float = 0,
    *,
    above: bool = False,
    error: type[ValueError] = ValueError,
) -> None:
    """Raise ``error`` unless a value is a finite number from ``lowest`` on, or above it."""
    real = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not real or value < lowest or (above and value == lowest):
        limits = f"{'above' if above else 'from'} {lowest}"
        raise error(f"{name} must be a finite number {limits}, got {value!r}")


def check_positions(name: str, positions: Tensor, batch: int, length: int) -> None:
    """Raise ValueError unless positions have shape (length,) or (batch, length)."""
    if tuple(positions.shape) not in ((length,), (batch, length)):
        raise ValueError(
            f"{name} must have shape ({length},) or ({batch}, {length}), got "
            f"{tuple(positions.shape)}"
        )
