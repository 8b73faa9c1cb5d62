"""Modules of others: what the user wants imported, and acting when one of a package is."""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

from coca_attention.errors import UserError

EXTENSIONS = "COCA_IMPORT"
"""The environment variable with the names of the user's own modules, separated by commas."""


def import_extensions() -> None:
    """Import the modules that `EXTENSIONS` names, for what they register.

    Every command and every process of one begins with it. Processes inherit the variable, and so
    know what their parent does.

    Raises:
        UserError: If there is no such module, or it imports one that is missing.
    """
    for name in filter(None, os.environ.get(EXTENSIONS, "").split(",")):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise UserError(
                f"{EXTENSIONS}={name}: {error}; install it, or set PYTHONPATH to its folder"
            ) from error


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, action: Callable[[Any], None]) -> None:
        self.name, self.action = name, action

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_act(module: Any) -> None:
                execute(module)
                self.action(module)

            loader.exec_module = execute_and_act
        return spec


def when_imported(name: str, action: Callable[[Any], None]) -> None:
    """Call ``action`` with a module once it is imported, or now if it has been.

    Args:
        name: Full name of the module.
        action: Called right after the module has been executed.
    """
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, action))
