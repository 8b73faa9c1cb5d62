"""What the page is made of, and how numbers are written in it."""

import csv
import io
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from coca_lab.report.charts import Chart

Table = tuple[Sequence["str | Entry"], Sequence[Sequence["str | Entry"]]]
"""Header and rows."""


@dataclass(frozen=True)
class Entry:
    """A table entry with more than text.

    Attributes:
        text: What it says.
        small: A second, smaller line.
        bold: Whether the text is bold.
    """

    text: str
    small: str = ""
    bold: bool = False

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Section:
    """A part of the page: a sentence, a chart, and folded below them text, table and note.

    Attributes:
        title: Its name.
        lead: What it shows, in one sentence: the heading above the chart.
        text: Plain text.
        chart: The chart; without one, only the title and the lead are not folded.
        header: Header of the table.
        rows: Rows of the table.
        note: Plain text in a smaller size.
        muted: Indices of rows to show in grey.
    """

    title: str
    lead: str = ""
    text: str = ""
    chart: Chart | None = None
    header: Sequence[str | Entry] = ()
    rows: Sequence[Sequence[str | Entry]] = ()
    note: str = ""
    muted: Collection[int] = ()

    def csv(self) -> str:
        """The table as CSV; the smaller lines have columns of their own."""
        smaller = [
            any(isinstance(row[i], Entry) and row[i].small for row in self.rows)  # type: ignore[union-attr]
            for i in range(len(self.header))
        ]
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        for row in (self.header, *self.rows):
            line: list[str] = []
            for entry, wide in zip(row, smaller, strict=True):
                small = entry.small if isinstance(entry, Entry) else ""
                line += (
                    [str(entry), small] if wide else [" ".join(filter(None, (str(entry), small)))]
                )
            writer.writerow(line)
        return file.getvalue()


def signed(value: float, digits: str) -> str:
    """A number with its sign, a minus sign for negative ones; format such as ``.2f`` or ``.1%``."""
    return f"{value:+{digits}}".replace("-", "−")


def enumeration(names: Sequence[str]) -> str:
    """Names as in a sentence: a, b and c."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are known; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def number(value: float) -> str:
    """A perplexity with about four digits."""
    if not math.isfinite(value):
        return "inf"
    return f"{value:.2f}" if value < 100 else f"{value:,.1f}" if value < 10000 else f"{value:.3g}"
