"""What the page is made of, and how numbers are written in it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coca_lab.report.charts import DotChart, LineChart

TOO_FEW = "too few documents"
"""In place of an interval over them."""


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
    """A part of the page: a title, a chart, a table and a caption.

    Attributes:
        title: Its heading.
        chart: The chart, if there is one.
        header: Header of the table.
        rows: Rows of the table.
        note: The caption: conditions in fixed words, and numbers.
        is_printed: Whether the terminal shows the table, too.
        has_words: Whether the second column has words, which begin on its left; figures end on
            its right.
    """

    title: str
    chart: LineChart | DotChart | None = None
    header: Sequence[str | Entry] = ()
    rows: Sequence[Sequence[str | Entry]] = ()
    note: str = ""
    is_printed: bool = True
    has_words: bool = False


def more_or_fewer(value: float) -> str:
    """A difference of nats, which are counted: "0.610 fewer"."""
    return f"{abs(value):.3f} {'more' if round(value, 3) >= 0 else 'fewer'}"


def number(value: float) -> str:
    """A perplexity with about four digits."""
    if not math.isfinite(value):
        return "inf"
    if value < 100:
        return f"{value:.2f}"
    return f"{value:,.1f}" if value < 10000 else f"{value:.3g}"
