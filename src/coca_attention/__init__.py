"""Collinear Constrained Attention (CoCA) for PyTorch and Transformers.

- `coca_attention.ops`: `coca_attention(query, key_coefficients, value)` and its parts.
- `coca_attention.layer`: `CoCAAttention`, a module for any PyTorch model.
- `coca_attention.models`: ``coca_*`` models for Transformers. Importing it registers them with the
  Auto classes.

Importing this package imports nothing else. Each name below imports torch when it is first used;
`convert`, `extend_context`, `load_original` and `set_rotary_scaling` also Transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coca_attention.layer import CoCAAttention
    from coca_attention.models import convert, extend_context, load_original, set_rotary_scaling
    from coca_attention.ops import (
        Rotation,
        ScoreForm,
        coca_attention,
        fold,
        register_form,
        register_rule,
    )

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


MODELS = ("convert", "extend_context", "load_original", "set_rotary_scaling")
"""The names that `coca_attention.models` has."""


def __getattr__(name: str) -> object:
    if name in ("layer", "ops"):
        return import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "models" if name in MODELS else "layer" if name == "CoCAAttention" else "ops"
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
