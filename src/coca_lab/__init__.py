"""The laboratory: training, evaluation, analysis, studies, reports, and the command coca."""

import importlib
import os

EXTENSIONS = "COCA_IMPORT"
"""The environment variable with the names of the user's own modules, separated by commas."""


def main() -> int:
    """The command ``coca``."""
    from coca_lab.cli import main as command  # the other parts do not need it

    return command()


def import_extensions() -> None:
    """Import the user's own modules, for what they register; every process begins with it."""
    from coca_attention.errors import UserError  # imports torch

    for name in filter(None, os.environ.get(EXTENSIONS, "").split(",")):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise UserError(
                f"{EXTENSIONS}={name}: {error}; install it, or set PYTHONPATH to its folder"
            ) from error
