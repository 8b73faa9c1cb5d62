"""What the commands share: options from documented fields, a progress bar, tables."""

from collections.abc import Callable, Sequence
from typing import Any

from coca_attention.options import OptionParser, take_option

Run = Callable[[list[str]], None]


def parse(
    program: str,
    command: Run,
    words: list[str],
    sections: list[type],
    positionals: Sequence[str] = (),
    epilog: str | None = None,
) -> list[Any]:
    """Parse words into the positionals' texts and an instance of every section.

    Args:
        program: What help calls the command.
        command: Function whose docstring describes it.
        words: The words.
        sections: Documented dataclasses; their fields are the options.
        positionals: Names of the required words before the options.
        epilog: Help text below the options.

    Raises:
        UserError: If a word is unknown or a value unfit.
        SystemExit: After printing help.
    """
    parser = OptionParser(program, command.__doc__, epilog=epilog)
    described = {
        "model": "Folder or name of a Transformers model.",
        "prompt": "Text to continue.",
        "target": "Folder to write; it must not exist yet, or be empty.",
    }
    for name in positionals:
        parser.add_argument(name, type=str, help=described[name])
    for section in sections:
        parser.add_class_arguments(section)
    instances = parser.read(_listed(words))
    values: list[Any] = [instances[name] for name in positionals]
    for section in sections:
        fields = section.__dataclass_fields__
        values.append(section(**{name: instances[name] for name in fields}))
    return values


def _listed(words: list[str]) -> list[str]:
    """Write the items of ``--windows 64,128,256`` as the list that they are meant as."""
    for option in ("--windows", "--lengths", "--kinds", "--tasks", "--shifts", "--cases"):
        words, items = take_option(words, option)
        if items is not None:
            words = [*words, f"{option}=[{items.strip('[]')}]"]
    return words


class Progress:
    """A rich progress bar as a function of (label, done, total)."""

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
        # Shown only while something is judged: training has a bar of its own.
        self.bar.start()
        self.bar.update(self.task, description=label, completed=done, total=total)
        if done >= total:
            self.bar.stop()

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Print a table, numbers to the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column(header[0])
    for name in header[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
