"""What the commands show: a progress bar, and tables."""

import logging
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from rich import progress
from rich.console import Console
from rich.table import Column, Table

log = logging.getLogger(__name__)

MINUTE = 60.0
"""Seconds between lines of progress."""


class ProgressBar:
    """A progress bar, used as a function of (label, done, total); in a file a line a minute.

    The label says how much is done, and of what.
    """

    def __enter__(self) -> Callable[[str, int, int], None]:
        self.bar = progress.Progress(
            # In a narrow terminal the label has two lines, so that the times are whole.
            progress.TextColumn("{task.description}", table_column=Column()),
            progress.BarColumn(bar_width=10, table_column=Column(no_wrap=True)),
            progress.TimeElapsedColumn(table_column=Column(no_wrap=True)),
            "elapsed,",
            progress.TimeRemainingColumn(table_column=Column(no_wrap=True)),
            "left",
            console=Console(stderr=True),
            transient=True,
            speed_estimate_period=math.inf,
        )
        self.task = self.bar.add_task("")
        self.label = ""
        self.started = time.monotonic()
        self.began: tuple[float, int] | None = None
        self.ends = 0.0
        self.has_ended = threading.Event()
        return self.advance

    def advance(self, label: str, done: int, total: int) -> None:
        self.bar.update(self.task, description=label, completed=done, total=total)
        if self.bar.console.is_terminal:
            # Started here and not on entering: during training, Trainer shows a bar of its own.
            self.bar.start()
            if done >= total:
                self.bar.stop()
            return
        now = time.monotonic()
        is_first = self.began is None
        if self.began is None:
            self.began = (now, done)
        began, before = self.began
        # The bar's own estimate begins with the second item, and the first may take minutes.
        if done > before:
            self.ends = now + (now - began) / (done - before) * (total - done)
        is_last = done >= total and label != self.label
        self.label = label
        if is_first or is_last:
            self._say()
        if is_first:
            threading.Thread(target=self._say_every_minute, daemon=True).start()

    def _say_every_minute(self) -> None:
        """Also while one item takes many."""
        while not self.has_ended.wait(MINUTE):
            self._say()

    def _say(self) -> None:
        now = time.monotonic()
        parts = [self.label]
        for name, seconds in {"elapsed": now - self.started, "left": self.ends - now}.items():
            if round(seconds) > 0:
                parts.append(f"{timedelta(seconds=round(seconds))} {name}")
        log.info("%s", ", ".join(parts))

    def __exit__(self, *_: object) -> None:
        self.has_ended.set()
        self.bar.live.stop()  # the bar's own method prints an empty line into files


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a table with right-aligned numbers."""
    print(title)  # whole, where a narrow table would break it
    table = Table(box=None, pad_edge=False)
    table.add_column(header[0], overflow="fold")
    for name in header[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def markdown_table(title: str, header: list[str], rows: list[list[str]]) -> str:
    """The same in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{title}\n\n{table}"
