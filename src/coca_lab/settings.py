"""What the settings of several parts share."""

import math
from typing import Literal

from coca_attention.errors import UserError

Scaling = Literal["none", "linear", "ntk", "dynamic", "yarn"]
"""Rotary scaling of an evaluation; ``ntk`` computes the base from the length of each text."""
PIECE = 64
"""Tokens of a pass in which a stream is read. The result does not depend on it."""


def check_scaling(kind: str, factor: float) -> None:
    """Raise UserError unless a rotary scaling can have a factor."""
    if kind != "none" and not 1 <= factor < math.inf:
        raise UserError(f"the factor of a scaling must be at least 1, got {factor:g}")


def check_sizes(window: int, sinks: int) -> None:
    """Raise UserError unless the window has a token and the number of sinks is not negative."""
    if window < 1:
        raise UserError(f"the window must be at least 1 token, got {window}")
    if sinks < 0:
        raise UserError(f"the number of sinks must be 0 or more, got {sinks}")
