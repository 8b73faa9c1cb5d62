"""Collinear Constrained Attention (CoCA) for PyTorch and Transformers.

- `coca_attention.ops`: `coca_attention(query, key_coefficients, value)` and its parts.
- `coca_attention.layers`: `CoCAAttention`, a module for any PyTorch model.
- `coca_attention.models`: ``coca_*`` models, registered with Transformers' Auto classes.

Importing the package imports neither torch nor Transformers: names are loaded when they are first
used, and the models when Transformers' Auto classes are first asked for one.
"""

import importlib
from typing import TYPE_CHECKING, Any

from coca_attention.imports import when_imported

if TYPE_CHECKING:
    from coca_attention.layers import CoCAAttention
    from coca_attention.models import convert, load_original, set_rotary_scaling
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
    "fold",
    "load_original",
    "register_form",
    "register_rule",
    "set_rotary_scaling",
]

_MODULES = {
    "CoCAAttention": "layers",
    "convert": "models",
    "load_original": "models",
    "set_rotary_scaling": "models",
}
AUTO_CLASSES = "transformers.models.auto.configuration_auto"
OWN_TYPES = ("coca_", "alibi_gpt_neox")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'ops')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]


class _Configurations(dict):
    """What was registered with AutoConfig; asked for one of our types, it registers our models."""

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str) and key.startswith(OWN_TYPES) and not super().__contains__(key):
            importlib.import_module("coca_attention.models")
        return super().__contains__(key)


def _await_use(auto: Any) -> None:
    auto.CONFIG_MAPPING._extra_content = _Configurations(auto.CONFIG_MAPPING._extra_content)


when_imported(AUTO_CLASSES, _await_use)
