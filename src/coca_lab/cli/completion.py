"""The command ``coca completion``: what a shell needs to complete commands and options."""

from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import shtab

from coca_attention.errors import UserError
from coca_lab.cli import COMMANDS, Run, load
from coca_lab.cli.console import DESCRIBE, Described, parse
from coca_lab.cli.evaluation import task_commands

SHELLS = ("bash", "zsh", "tcsh")


def run_completion(words: list[str]) -> None:
    """Print a script that completes commands, options and values in bash, zsh or tcsh."""
    (shell,) = parse("coca completion", run_completion, words, [], ["shell"])
    if shell not in SHELLS:
        raise UserError(f"completion is for {', '.join(SHELLS)}, got {shell!r}")
    root = ArgumentParser("coca")
    commands = root.add_subparsers()
    for table in COMMANDS.values():
        for name, (_, summary) in table.items():
            child = commands.add_parser(name, help=summary)
            if name == "eval":
                tasks = child.add_subparsers()
                for task, run in task_commands().items():
                    # Without help, shtab leaves it out.
                    _add_options(tasks.add_parser(task, help=task), run)
            else:
                _add_options(child, load(name))
    print(shtab.complete(root, shell=shell))


def _add_options(parser: ArgumentParser, command: Run) -> None:
    """Add a command's options, of which types say the values, and words that are files."""
    for name, kind in options_of(command).items():
        literals = [one for one in (kind, *get_args(kind)) if get_origin(one) is Literal]
        values = [str(value) for one in literals for value in get_args(one)]
        parser.add_argument(f"--{name.replace('_', '-')}", choices=values or None)
    word: Any = parser.add_argument("words", nargs="*")
    word.complete = shtab.FILE


def options_of(command: Run) -> Mapping[str, Any]:
    """Types of a command's options by name; the command is asked for them in place of being run."""
    try:
        command([DESCRIBE])
    except Described as described:
        return described.parser.types
    except UserError:
        pass  # coca serve, whose options are those of Transformers' server
    return {}
