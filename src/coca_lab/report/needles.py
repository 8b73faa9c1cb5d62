"""Needles in the report: R-precision by kind and prompt length, recall of earlier results."""

from collections.abc import Sequence
from typing import Any

from coca_lab.report.lines import (
    Cell,
    Lines,
    by_line,
    length_table,
    prompt_counts,
    prompt_facts,
    share_figure,
)
from coca_lab.report.section import Section, Table

EARLIER = "recall"
"""The metric of cells that name none, those of version 0.1."""
METRICS = {
    "R-precision": "Mean share of the requested facts among as many that the answer gives first",
    EARLIER: "Mean share of the requested facts anywhere in the answer, among whatever others",
}


def needle_facts(cell: Cell) -> dict[Any, Any]:
    """The facts of the prompts, and the metric."""
    return {**prompt_facts(cell), "metric": _metric(cell)}


def needle_sections(cells: Sequence[Cell]) -> list[Section]:
    """A figure and a table for every kind of needle."""
    sections, metric = [], _metric(cells[0])
    for kind, lines in _kinds(cells).items():
        header, rows = length_table(lines, _recall)
        points = {
            key: {length: (cell["recall"], None) for length, cell in line.items()}
            for key, line in lines.items()
        }
        sections.append(
            Section(
                f"Needles: {kind}",
                figure=share_figure(f"needles-{kind}", points, f"mean {metric}"),
                header=["prompt length in tokens", *header],
                rows=rows,
                note=f"{METRICS[metric]}{prompt_counts(lines)}.",
            )
        )
    return sections


def needle_tables(cells: Sequence[Cell]) -> list[Table]:
    """R-precision by prompt length for every kind, for the terminal."""
    tables: list[Table] = []
    for kind, lines in _kinds(cells).items():
        header, rows = length_table(lines, _recall)
        tables.append(([f"{kind}: {_metric(cells[0])} at", *header], rows))
    return tables


def _metric(cell: Cell) -> str:
    return cell.get("metric", EARLIER)


def _recall(cell: Cell) -> str:
    return f"{cell['recall']:.2f}"


def _kinds(cells: Sequence[Cell]) -> dict[str, Lines]:
    kinds = dict.fromkeys(cell["kind"] for cell in cells)
    return {kind: by_line(cell for cell in cells if cell["kind"] == kind) for kind in kinds}
