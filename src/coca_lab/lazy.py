"""Packages whose names are imported when they are first used."""

import importlib
import sys
from collections.abc import Callable
from typing import Any


def attach(package: str, **modules: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for the ``__init__`` of a package.

    Type checkers do not follow it: the ``__init__`` imports the same names ``if TYPE_CHECKING``.

    Args:
        package: Its ``__name__``.
        modules: By submodule the names that the package takes from it, separated by spaces.
    """
    where = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{where[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: [*vars(sys.modules[package]), *where]
