"""What the page is made of, and how numbers are written in it."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from coca_lab.report.charts import LineChart

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
        printed: Whether the terminal shows the table, too.
    """

    title: str
    lead: str = ""
    text: str = ""
    chart: LineChart | None = None
    header: Sequence[str | Entry] = ()
    rows: Sequence[Sequence[str | Entry]] = ()
    note: str = ""
    muted: Collection[int] = ()
    printed: bool = True

    def csv(self) -> str:
        """The table as CSV; smaller lines have columns of their own where rows have any."""
        columns: list[list[str]] = []
        for header, *entries in zip(self.header, *self.rows, strict=True):
            small = [getattr(entry, "small", "") for entry in (header, *entries)]
            columns.append([str(header), *map(str, entries)])
            columns += [small] if any(small[1:]) else []
        return pd.DataFrame(zip(*columns, strict=True)).to_csv(header=False, index=False)


def signed(value: float, digits: str) -> str:
    """A number with its sign, a minus sign for negative ones; format such as ``.2f`` or ``.1%``."""
    return f"{value:+{digits}}".replace("-", "−")


def capital(text: str) -> str:
    """The text with a capital letter first."""
    return text[0].upper() + text[1:]


def enumeration(names: Sequence[str]) -> str:
    """Names as in a sentence: a, b and c; in quotes where they have commas of their own."""
    names = [f"“{name}”" if "," in name else name for name in names]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def span(values: Iterable[float], form: Callable[[Any], str] = "{:,}".format) -> str:
    """The smallest value and the largest: "8 to 16", or once if they are written alike."""
    values = list(values)
    ends = (min(values), max(values)) if values else ()
    return " to ".join(dict.fromkeys(map(form, ends)))


def times(ratio: float) -> str:
    """A multiple as one says it: 7.8 for 7.8125, but 0.125 and 1,024 as they are."""
    if ratio == float(f"{ratio:.3g}"):
        return f"{ratio:,.10g}"
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"


def number(value: float) -> str:
    """A perplexity with about four digits."""
    if not math.isfinite(value):
        return "inf"
    return f"{value:.2f}" if value < 100 else f"{value:,.1f}" if value < 10000 else f"{value:.3g}"
