"""Shared by the commands: options from documented fields, a progress bar, tables."""

import logging
import math
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from rich import progress
from rich.console import Console
from rich.table import Table

from coca_attention.errors import UserError
from coca_lab.arguments import SettingsParser, checked, put
from coca_lab.cli import Command

log = logging.getLogger(__name__)

POSITIONALS = {
    "folder": "Folder of a Transformers model, or its NAME or NAME@REVISION on the Hub; with "
    "--endpoint, of its tokenizer.",
    "model": "Folder of a Transformers model, or its NAME or NAME@REVISION on the Hub.",
    "model?": "Folder or name of a model; without one, this machine is described.",
    "prompt": "Text to continue; - reads it from standard input.",
    "recipe?": "Name of a recipe or study, such as passkey-1m or studies/verdict.",
    "results+": "Result files (JSON), and folders of runs and studies.",
    "target": "Folder to write; it must not exist yet, or be empty.",
}
"""Help of the words that are no options; a last ``?`` may be missing, a last ``+`` repeated."""
MINUTE = 60.0
"""Seconds between lines of progress."""
EVERYTHING, OUTPUT = "--help-all", "--output"
RAY_HELP = "Compute on Ray: started here, or the cluster at an address (--ray HOST:PORT)."
RAY: dict[str, dict[str, Any]] = {"--ray": {"nargs": "?", "const": "", "help": RAY_HELP}}
"""An option for `parse_file`."""


@dataclass
class PlacedSettings:
    """In which precision and where a model is loaded."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights."""
    device: str | None = None
    """cpu, cuda, …; by default the accelerator if there is one; auto spreads the model over all."""


def parse(
    program: str,
    command: Command,
    words: list[str],
    sections: list[type],
    positionals: Sequence[str] = (),
) -> list[Any]:
    """The words of positionals (names of `POSITIONALS`) and an instance of every section."""
    usage = " ".join([program, *(name.upper() for name in positionals), "[options]"])
    parser = SettingsParser(program, usage=usage, description=command.__doc__)
    names = [name.rstrip("?+") for name in positionals]
    for name, positional in zip(names, positionals, strict=True):
        many: Any = {"nargs": positional[-1]} if positional != name else {}
        parser.add_argument(name, help=POSITIONALS[positional], **many)
    for section in sections:
        parser.add_settings(section)
    read = put(parser.read(words), {})
    values: list[Any] = [read.pop(name) for name in names]
    problems = list[str]()
    for section in sections:
        given = {field.name: read[field.name] for field in fields(section) if field.name in read}
        try:
            values.append(checked(section, given))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("; ".join(problems))
    return values


def parse_file(
    words: list[str],
    command: Command,
    make_parser: Callable[..., SettingsParser],
    kind: str,
    usage: str,
    shown: Sequence[str] = (),
    options: Mapping[str, dict[str, Any]] | None = None,
) -> tuple[str, list[str], Namespace]:
    """The YAML file that is the first word, the words that override it, and the other options."""
    options = {OUTPUT: {"help": "Folder; by default runs/NAME for NAME.yaml."}, **(options or {})}
    parser = make_parser(shown=() if EVERYTHING in words else shown)
    parser.usage, parser.description = usage, command.__doc__
    others = SettingsParser(parser.prog, add_help=False)
    for name, each in options.items():
        parser.add_argument(name, **each)
        others.add_argument(name, **each)
    if {"-h", "--help", EVERYTHING} & set(words):
        if parser.shown:
            parser.epilog = f"{parser.prog} {EVERYTHING} shows all fields of a {kind}."
        parser.parse_args(["--help"])
    if not words or words[0].startswith("-"):
        raise UserError(f"the {kind} comes first: {usage}")
    chosen, overrides = others.parse_known_args(words[1:])
    chosen.output = Path(chosen.output or Path("runs", Path(words[0]).stem)).expanduser()
    return words[0], overrides, chosen


class ProgressBar:
    """A progress bar, used as a function of (label, done, total); in a file a line a minute."""

    def __enter__(self) -> Callable[[str, int, int], None]:
        self.bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TextColumn("{task.completed:,}/{task.total:,}"),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            speed_estimate_period=math.inf,
        )
        self.bar.add_task("")
        (self.task,) = self.bar.tasks
        self.said, self.label = -MINUTE, ""
        return self.advance

    def advance(self, label: str, done: int, total: int) -> None:
        self.bar.update(self.task.id, description=label, completed=done, total=total)
        if self.bar.console.is_terminal:
            # Started here and not on entering: during training, Trainer shows a bar of its own.
            self.bar.start()
            if done >= total:
                self.bar.stop()
            return
        now, left = time.monotonic(), self.task.time_remaining
        if now - self.said >= MINUTE or (done >= total and label != self.label):
            self.said, self.label = now, label
            more = f", {timedelta(seconds=left)} left" if left else ""
            log.info("%s: %.0f %%%s", label, self.task.percentage, more)

    def __exit__(self, *_: object) -> None:
        self.bar.live.stop()  # the bar's own method prints an empty line into files


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Print a table with right-aligned numbers."""
    table = Table(box=None, pad_edge=False)
    table.add_column(header[0], overflow="fold")
    for name in header[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
