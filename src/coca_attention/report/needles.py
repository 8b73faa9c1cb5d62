"""Needles in the report: recall by kind and prompt length."""

from collections.abc import Sequence

from coca_attention.report.lines import (
    Cell,
    Lines,
    by_line,
    length_table,
    prompt_counts,
    share_figure,
)
from coca_attention.report.section import Section, Table


def needle_sections(cells: Sequence[Cell]) -> list[Section]:
    """A figure and a table for every kind of needle."""
    sections = []
    for kind, lines in _kinds(cells).items():
        header, rows = length_table(lines, _recall)
        points = {
            key: {length: (cell["recall"], None) for length, cell in line.items()}
            for key, line in lines.items()
        }
        sections.append(
            Section(
                f"Needles: {kind}",
                figure=share_figure(f"needles-{kind}", points, "mean recall"),
                header=["prompt length in tokens", *header],
                rows=rows,
                note="Mean share of the requested facts that the answer contains"
                + prompt_counts(lines)
                + ".",
            )
        )
    return sections


def needle_tables(cells: Sequence[Cell]) -> list[Table]:
    """Recall by prompt length for every kind, for the terminal."""
    tables: list[Table] = []
    for kind, lines in _kinds(cells).items():
        header, rows = length_table(lines, _recall)
        tables.append(([f"{kind}: recall at", *header], rows))
    return tables


def _recall(cell: Cell) -> str:
    return f"{cell['recall']:.2f}"


def _kinds(cells: Sequence[Cell]) -> dict[str, Lines]:
    kinds = dict.fromkeys(cell["kind"] for cell in cells)
    return {kind: by_line(cell for cell in cells if cell["kind"] == kind) for kind in kinds}
