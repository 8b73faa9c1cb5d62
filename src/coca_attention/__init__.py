"""Collinear Constrained Attention (CoCA) for PyTorch and Transformers.

- `coca_attention.ops`: `coca_attention(query, key_coefficients, value)` and its parts.
- `coca_attention.layers`: `CoCAAttention`, a module for any PyTorch model.
- `coca_attention.models`: ``coca_*`` models, registered with Transformers' Auto classes.

Importing the package imports neither torch nor Transformers: names are loaded when they are first
used, and the models when Transformers' Auto classes are first asked for one.
"""

import importlib
import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from coca_attention.lazy import attach

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

AUTO_CLASSES = "transformers.models.auto.configuration_auto"
OWN_TYPES = ("coca_", "alibi_gpt_neox")


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


def _await_use(auto: Any) -> None:
    auto.CONFIG_MAPPING._extra_content = _Configurations(auto.CONFIG_MAPPING._extra_content)


class _AutoClassesFinder(importlib.abc.MetaPathFinder):
    """Calls `_await_use` when Transformers' Auto classes are imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != AUTO_CLASSES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_await_use(module: Any) -> None:
                execute(module)
                _await_use(module)

            loader.exec_module = execute_and_await_use
        return spec


if AUTO_CLASSES in sys.modules:
    _await_use(sys.modules[AUTO_CLASSES])
else:
    sys.meta_path.insert(0, _AutoClassesFinder())
