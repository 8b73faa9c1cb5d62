"""What the settings of several parts share."""

import math
from typing import Literal

from coca_attention.errors import UserError

Scaling = Literal["none", "linear", "ntk", "dynamic", "yarn"]
"""Rotary scaling of an evaluation; ``ntk`` computes the base from the length of each text."""


def check_scaling(kind: str, factor: float) -> None:
    """Raise UserError unless a rotary scaling can have a factor."""
    if kind != "none" and not 1 <= factor < math.inf:
        raise UserError(f"the factor of a scaling must be at least 1, got {factor:g}")
