"""Shared by the commands: options from documented fields, a progress bar, tables."""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coca_attention.errors import UserError
from coca_lab.options import DESCRIBE, OptionParser, take_option

log = logging.getLogger(__name__)

Run = Callable[[list[str]], None]
POSITIONALS = {
    "model": "Folder or name of a Transformers model.",
    "prompt": "Text to continue; - reads it from standard input.",
    "shell": "bash, zsh or tcsh.",
    "target": "Folder (or file, with --gguf) to write; it must not exist yet, or be empty.",
}


def parse(
    program: str,
    command: Run,
    words: list[str],
    sections: list[type],
    positionals: Sequence[str] = (),
    epilog: str | None = None,
    leading: Mapping[str, str] | None = None,
) -> list[Any]:
    """Parse words into the strings of the positionals and an instance of every section.

    Args:
        program: Name of the command in its help.
        command: The function; its docstring is the description in the help.
        words: Words of the command line.
        sections: Documented dataclasses; their fields are the options.
        positionals: Names of the required words.
        epilog: Help text below the options.
        leading: Words that the command has read itself, and their help.

    Raises:
        UserError: If a word is unknown or a value is invalid.
        SystemExit: After printing help.
    """
    parser = OptionParser(program, command.__doc__, epilog=epilog)
    for name in positionals:
        parser.add_argument(name, type=str, help=POSITIONALS[name])
    parser.leading = dict(leading or {})
    for section in sections:
        parser.add_class_arguments(section)
    instances = parser.read(words)
    values: list[Any] = [instances[name] for name in positionals]
    for section in sections:
        fields = section.__dataclass_fields__
        values.append(section(**{name: instances[name] for name in fields}))
    return values


def parse_file(
    words: list[str], command: Run, make_parser: Callable[[], OptionParser], kind: str, usage: str
) -> tuple[str, list[str], Path]:
    """Split the words of a command that takes a YAML file and overrides of it.

    Args:
        words: Words of the command line.
        command: The function; its docstring is the description in the help.
        make_parser: Makes the parser of the file, for the help.
        kind: What such a file is called.
        usage: An example, for the message if the file is not the first word.

    Returns:
        The file, the overrides and the output folder, by default ``runs/`` and the file's name.

    Raises:
        UserError: If the first word is an option.
        SystemExit: After printing help.
    """
    asked = [
        word
        for word in words
        if word in ("-h", DESCRIBE) or re.fullmatch(r"--([\w.-]+\.)?help", word)
    ]
    if asked:
        parser = make_parser()
        parser.leading = {kind.upper(): f"YAML file: {usage}"}
        parser.add_argument("--output", help="Folder; by default runs/NAME for NAME.yaml.")
        parser.description = command.__doc__
        parser.read(asked[:1])
    if not words or words[0].startswith("-"):
        raise UserError(f"the {kind} comes first: {usage}")
    path, *overrides = words
    overrides, output = take_option(overrides, "--output")
    return path, overrides, Path(output or Path("runs") / Path(path).stem)


class Progress:
    """A progress bar, used as a function of (label, done, total).

    Where the output is not a terminal, it is a line per label, and one for every minute.
    """

    said: tuple[str, float] = ("", 0.0)

    def __enter__(self) -> Callable[[str, int, int], None]:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,}/{task.total:,}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self.task = self.bar.add_task("")
        return self.advance

    def advance(self, label: str, done: int, total: int) -> None:
        if not self.bar.console.is_terminal:
            name, at = self.said
            if label != name or time.monotonic() - at >= 60:
                self.said = (label, time.monotonic())
                log.info("%s: %s of %s", label, f"{done:,}", f"{total:,}")
            return
        # Started here and not on entering: during training, Trainer shows a bar of its own.
        self.bar.start()
        self.bar.update(self.task, description=label, completed=done, total=total)
        if done >= total:
            self.bar.stop()

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Print a table with right-aligned numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column(header[0], overflow="fold")
    for name in header[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def duration(seconds: float) -> str:
    """A time to two digits or so."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} seconds"


def megabytes(size: int) -> str:
    """A number of bytes in MB (10^6) or, from 10,000 MB, in GB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e10 else f"{size / 1e6:,.1f} MB"
