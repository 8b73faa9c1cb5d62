"""The table of tasks that the report shows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from coca_lab.report import paper
from coca_lab.report.angles import angle_sections, angle_table
from coca_lab.report.attention import attention_sections, attention_tables
from coca_lab.report.bench import bench_facts, bench_sections, bench_tables
from coca_lab.report.groups import Facts, comparable
from coca_lab.report.harness import harness_sections
from coca_lab.report.lines import prompt_facts
from coca_lab.report.needles import needle_facts, needle_sections, needle_tables
from coca_lab.report.passkey import (
    passkey_findings,
    passkey_sections,
    passkey_tables,
)
from coca_lab.report.perplexity import (
    perplexity_facts,
    perplexity_findings,
    perplexity_sections,
    perplexity_tables,
)
from coca_lab.report.results import all_cells
from coca_lab.report.search import search_findings, search_sections, search_tables
from coca_lab.report.section import Section, Table
from coca_lab.report.streaming import streaming_sections

Cells = Sequence[dict[str, Any]]


def _facts(*names: str) -> Callable[[dict[str, Any]], Facts]:
    """The facts that are fields of a cell."""
    return lambda cell: {name: cell[name] for name in names if cell.get(name) is not None}


@dataclass(frozen=True)
class TaskReport:
    """How the cells of one task are shown.

    Attributes:
        sections: From the cells to sections of the page.
        tables: From the cells to tables for the terminal; by default those of the sections.
        findings: From the cells to sentences for the head of the page.
        title: Heading of a page that has no other task.
        facts: From a cell to what its figures depend on besides the model. Cells that differ in a
            fact are never shown in one section; by default all cells are comparable.
        noun: What such cells are results on.
        paper: From the cells, and whether the paper's figures were asked for, to sections with
            these.
    """

    sections: Callable[[Cells], list[Section]]
    tables: Callable[[Cells], Sequence[Table]] | None = None
    findings: Callable[[Cells], list[str]] = lambda cells: []
    title: str = "Long context"
    facts: Callable[[dict[str, Any]], Facts] | None = None
    noun: str = "text"
    paper: Callable[[Cells, bool], list[Section]] = lambda cells, asked: []


REPORTS: dict[str, TaskReport] = {
    "search": TaskReport(
        search_sections, search_tables, search_findings, "Search", _facts("file"), "search"
    ),
    "perplexity": TaskReport(
        perplexity_sections,
        perplexity_tables,
        perplexity_findings,
        "Perplexity against context length",
        perplexity_facts,
        paper=paper.perplexity_sections,
    ),
    "passkey": TaskReport(
        passkey_sections,
        passkey_tables,
        passkey_findings,
        "Passkey retrieval",
        prompt_facts,
        "prompts",
        paper.passkey_sections,
    ),
    "needles": TaskReport(
        needle_sections, needle_tables, title="Needles", facts=needle_facts, noun="prompts"
    ),
    "streaming": TaskReport(
        streaming_sections,
        title="Endless text",
        facts=_facts("source", "text_field", "bad_lines", "held_out", "tokens", "ranges"),
    ),
    "harness": TaskReport(
        harness_sections, title="Short context", facts=_facts("limit", "harness"), noun="questions"
    ),
    "bench": TaskReport(
        bench_sections, bench_tables, title="Benchmarks", facts=bench_facts, noun="measurement"
    ),
    "angles": TaskReport(
        angle_sections,
        lambda cells: [angle_table(cells)],
        title="Angles between queries and keys",
        facts=_facts("documents", "tokens", "longest"),
    ),
    "attention": TaskReport(
        attention_sections,
        attention_tables,
        title="Where the answer’s attention goes",
        facts=prompt_facts,
        noun="prompts",
    ),
}
"""By the field ``task`` of a cell, in the order of the page."""


def by_task(cells: Cells) -> dict[str, list[list[dict[str, Any]]]]:
    """For every task that the report shows, in the order of the page, its comparable cells."""
    groups: dict[str, list[list[dict[str, Any]]]] = {}
    for name, report in REPORTS.items():
        found = [cell for cell in cells if cell["task"] == name]
        if found:
            groups[name] = [found] if report.facts is None else comparable(found, report.facts)
    return groups


def printed_tables(cells: Cells) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows of every table for the terminal, as text."""
    tables: list[Table] = []
    for name, groups in by_task(all_cells([{"results": cells}])).items():
        report = REPORTS[name]
        for number, group in enumerate(groups, 1):
            if report.tables is not None:
                found = report.tables(group)
            else:
                found = [(s.header, s.rows) for s in report.sections(group) if s.rows]
            which = f" ({report.noun} {number})" if len(groups) > 1 else ""
            tables += [([f"{header[0]}{which}", *header[1:]], rows) for header, rows in found]
    return [
        ([str(entry) for entry in header], [[str(entry) for entry in row] for row in rows])
        for header, rows in tables
    ]
