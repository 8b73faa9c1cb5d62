"""Modules of the user's own, which register what they add."""

import importlib
import os

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
