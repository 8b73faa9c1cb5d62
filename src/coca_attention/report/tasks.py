"""The table of tasks that the report shows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from coca_attention.report.angles import angle_sections, angle_table
from coca_attention.report.attention import attention_sections, attention_tables
from coca_attention.report.bench import bench_sections, bench_tables
from coca_attention.report.harness import harness_sections
from coca_attention.report.needles import needle_sections, needle_tables
from coca_attention.report.passkey import passkey_sections, passkey_tables
from coca_attention.report.perplexity import (
    perplexity_findings,
    perplexity_sections,
    perplexity_tables,
)
from coca_attention.report.results import all_cells
from coca_attention.report.search import search_findings, search_sections, search_tables
from coca_attention.report.section import Section, Table

Cells = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class TaskReport:
    """How the cells of one task are shown.

    Attributes:
        sections: From the cells to sections of the page.
        tables: From the cells to tables for the terminal; by default those of the sections.
        findings: From the cells to sentences for the head of the page.
        title: Heading of a page that has no other task.
    """

    sections: Callable[[Cells], list[Section]]
    tables: Callable[[Cells], Sequence[Table]] | None = None
    findings: Callable[[Cells], list[str]] = lambda cells: []
    title: str = "Long context"


REPORTS: dict[str, TaskReport] = {
    "search": TaskReport(search_sections, search_tables, search_findings, "Search"),
    "perplexity": TaskReport(
        perplexity_sections,
        perplexity_tables,
        perplexity_findings,
        "Perplexity against context length",
    ),
    "passkey": TaskReport(passkey_sections, passkey_tables),
    "needles": TaskReport(needle_sections, needle_tables),
    "harness": TaskReport(harness_sections),
    "bench": TaskReport(bench_sections, bench_tables),
    "angles": TaskReport(
        angle_sections, lambda cells: [angle_table(cells)], title="Angles between queries and keys"
    ),
    "attention": TaskReport(
        attention_sections, attention_tables, title="Where the answer’s attention goes"
    ),
}
"""By the field ``task`` of a cell, in the order of the page."""


def by_task(cells: Cells) -> dict[str, Cells]:
    """The cells of every task that the report shows, in the order of the page."""
    found = {name: [cell for cell in cells if cell["task"] == name] for name in REPORTS}
    return {name: group for name, group in found.items() if group}


def printed_tables(cells: Cells) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows of every table for the terminal, as text."""
    tables: list[Table] = []
    for name, group in by_task(all_cells([{"results": cells}])).items():
        report = REPORTS[name]
        if report.tables is not None:
            tables += report.tables(group)
        else:
            tables += [(s.header, s.rows) for s in report.sections(group) if s.rows]
    return [
        ([str(entry) for entry in header], [[str(entry) for entry in row] for row in rows])
        for header, rows in tables
    ]
