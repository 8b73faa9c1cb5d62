"""Collinear Constrained Attention (CoCA) for PyTorch and Transformers.

- `coca_attention.ops`: `coca_attention(query, key_coefficients, value)` and its parts.
- `coca_attention.layer`: `CoCAAttention`, a module for any PyTorch model.
- `coca_attention.models`: ``coca_*`` models for Transformers. Importing it registers them with the
  Auto classes.

Importing this package imports only torch; `convert`, `extend_context`, `load_original` and
`set_rotary_scaling` import `coca_attention.models`, and with it Transformers, when first used.
"""

from typing import TYPE_CHECKING

from coca_attention.layer import CoCAAttention
from coca_attention.ops import (
    Rotation,
    ScoreForm,
    coca_attention,
    fold,
    register_form,
    register_rule,
)

if TYPE_CHECKING:
    from coca_attention.models import convert, extend_context, load_original, set_rotary_scaling

__version__ = "0.2.0.dev0"

__all__ = [
    "CoCAAttention",
    "Rotation",
    "ScoreForm",
    "coca_attention",
    "convert",
    "extend_context",
    "fold",
    "load_original",
    "register_form",
    "register_rule",
    "set_rotary_scaling",
]


def __getattr__(name: str) -> object:
    if name in __all__:  # those of models, which are not imported above
        from coca_attention import models

        return getattr(models, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
