"""What the page is made of."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

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
    """A heading with an optional text, figure, table and note, in this order.

    Attributes:
        title: The heading.
        text: Plain text.
        figure: ``{"wide": svg, "narrow": svg}``, from `coca_lab.report.figures.draw`.
        header: Header of the table.
        rows: Rows of the table.
        note: Plain text in a smaller size.
        muted: Indices of rows to show in grey.
    """

    title: str
    text: str = ""
    figure: dict[str, str] | None = None
    header: Sequence[str | Entry] = ()
    rows: Sequence[Sequence[str | Entry]] = ()
    note: str = ""
    muted: Collection[int] = field(default=())
