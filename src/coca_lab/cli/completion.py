"""The command ``coca completion``: what a shell needs to complete commands and options."""

from argparse import ArgumentParser
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from coca_attention.errors import UserError, install
from coca_lab.cli.console import Run, parse
from coca_lab.options import DESCRIBE, Described, OptionParser, choices

SHELLS = ("bash", "zsh", "tcsh")


def run_completion(words: list[str]) -> None:
    """Print a script that completes commands, options and values in bash, zsh or tcsh."""
    (shell,) = parse("coca completion", run_completion, words, [], ["shell"])
    if shell not in SHELLS:
        raise UserError(f"completion is for {', '.join(SHELLS)}, got {shell!r}")
    try:
        shtab: Any = import_module("shtab")
    except ImportError as error:
        raise UserError(f"this needs shtab: {install('completion')}") from error
    from coca_lab.cli import COMMANDS

    root = ArgumentParser("coca")
    _add_commands(root, COMMANDS, shtab.FILE)
    print(shtab.complete(root, shell=shell))


def _add_commands(parser: ArgumentParser, table: Mapping[str, Any], files: Any) -> None:
    commands = parser.add_subparsers()
    for name, entry in table.items():
        summary = "" if isinstance(entry, Mapping) else (entry.__doc__ or "").splitlines()[0]
        child = commands.add_parser(name, help=summary.replace("%", "%%"))
        if isinstance(entry, Mapping):
            _add_commands(child, entry, files)
            continue
        options = parser_of(entry).options()
        for option in sorted(options.keys() - {"--help"}):
            values = [str(value) for value in choices(options[option])]
            child.add_argument(option, choices=values or None)
        word: Any = child.add_argument("words", nargs="*")
        word.complete = files


def leaves(table: Mapping[str, Any]) -> list[Run]:
    """The functions of a table of commands and of the tables in it."""
    found = []
    for entry in table.values():
        found += leaves(entry) if isinstance(entry, Mapping) else [entry]
    return found


def parser_of(command: Run) -> OptionParser:
    """The parser of a command, which is asked for it in place of being run."""
    try:
        command([DESCRIBE])
    except Described as found:
        return found.parser
    except UserError:
        pass  # coca serve, whose options are those of Transformers' server
    return OptionParser()
