"""Collinear Constrained Attention (CoCA) for PyTorch and Transformers.

- `coca_attention.ops`: `coca_attention(query, key_coefficients, value)` and its parts.
- `coca_attention.layer`: `CoCAAttention`, a module for any PyTorch model.
- `coca_attention.models`: ``coca_*`` models, registered with Transformers' Auto classes.

Importing the package imports neither torch nor Transformers: names are loaded when they are first
used, and the models when Transformers' Auto classes are first asked for one.
"""

import importlib
from typing import TYPE_CHECKING, Any

from coca_lab.extensions import when_imported
from coca_lab.lazy import attach

if TYPE_CHECKING:
    from coca_attention.layer import CoCAAttention
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

AUTO_CLASSES = "transformers.models.auto.configuration_auto"
LAZY_MODULES = "transformers.utils.import_utils"
OWN_TYPES = ("coca_", "alibi_gpt_neox")
OWN_CLASSES = ("CoCA", "AlibiGPTNeoX")


__getattr__, __dir__ = attach(
    __name__,
    layers="CoCAAttention",
    models="convert load_original set_rotary_scaling",
    ops="Rotation ScoreForm coca_attention fold register_form register_rule",
)


class _Configurations(dict):
    """What was registered with AutoConfig; asked for one of our types, it registers our models."""

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str) and key.startswith(OWN_TYPES) and not super().__contains__(key):
            importlib.import_module("coca_attention.models")
        return super().__contains__(key)


def _await_types(auto: Any) -> None:
    auto.CONFIG_MAPPING._extra_content = _Configurations(auto.CONFIG_MAPPING._extra_content)


def _await_names(utils: Any) -> None:
    """Let ``getattr(transformers, "CoCALlamaForCausalLM")``, as many tools do, find our classes."""
    # On the class, because Transformers makes its own module twice.
    find = utils._LazyModule.__getattr__

    def find_or_register(module: Any, name: str) -> Any:
        if module.__name__ == "transformers" and name.startswith(OWN_CLASSES):
            classes = importlib.import_module("coca_attention.models").CLASSES
            if name in classes:
                return classes[name]
        return find(module, name)

    utils._LazyModule.__getattr__ = find_or_register


when_imported(LAZY_MODULES, _await_names)
when_imported(AUTO_CLASSES, _await_types)
