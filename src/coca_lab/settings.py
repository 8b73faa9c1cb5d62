"""What the settings of several parts share. Modules of settings import neither torch nor models."""

import math
import sys
from typing import Literal

from coca_attention.errors import UserError

Initialisation = Literal["fold", "calibrated", "random"]
"""How the T projections of a converted model begin; see `coca_attention.models.convert`."""
Scaling = Literal["none", "linear", "ntk", "dynamic", "yarn"]
"""Rotary scaling of an evaluation; ``ntk`` computes the base from the length of each text."""
TENSOR_PARALLEL = "tensor-parallel"
"""The device of a model whose layers are split among the processes of a launch."""
CONTEXT_PARALLEL = "context-parallel"
"""The device of a model that reads every text in parts, one in each process of a launch."""
BUILT_IN_FORMS = ("slack", "strict", "magnitude")
PIECE = 64
"""Tokens of a pass in which a stream is read. The result does not depend on it."""


def form_names() -> tuple[str, ...]:
    """Names of the score forms: the built-in ones, and those registered from outside."""
    # Nothing can have been registered before the table was imported.
    forms = sys.modules.get("coca_attention.ops.forms")
    return BUILT_IN_FORMS if forms is None else tuple(forms.FORMS)


def check_scaling(kind: str, factor: float) -> None:
    """Raise UserError unless a rotary scaling can have a factor."""
    if kind != "none" and not 1 <= factor < math.inf:
        raise UserError(f"the factor of a scaling must be at least 1, got {factor:g}")


def check_letters(layers: str) -> None:
    """Raise UserError unless a pattern of layers consists of l (local) and g (global)."""
    if not layers or set(layers) - set("lg"):
        raise UserError(f"layers must consist of the letters l and g, got {layers!r}")


def check_sizes(window: int, sinks: int) -> None:
    """Raise UserError unless the window has a token and the number of sinks is not negative."""
    if window < 1:
        raise UserError(f"the window must be at least 1 token, got {window}")
    if sinks < 0:
        raise UserError(f"the number of sinks must be 0 or more, got {sinks}")


def check_vocab_size(vocab_size: int) -> None:
    """Raise UserError unless a tokenizer can be trained with so many entries."""
    if vocab_size < 257:
        raise UserError(
            f"vocab_size must be at least 257 (256 bytes and the end of text), got {vocab_size}"
        )
    if vocab_size > 10_000_000:
        raise UserError(f"vocab_size must be at most 10 million, got {vocab_size}")
