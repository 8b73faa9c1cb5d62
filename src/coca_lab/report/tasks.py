"""The table of tasks that the report shows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coca_lab.report import paper
from coca_lab.report.angles import angle_sections, angle_table
from coca_lab.report.bench import bench_facts, bench_sections, bench_tables
from coca_lab.report.perplexity import perplexity_facts, perplexity_sections, perplexity_tables
from coca_lab.report.prompts import (
    needle_sections,
    needle_tables,
    passkey_sections,
    passkey_tables,
    prompt_facts,
)
from coca_lab.report.results import Cell, Facts, all_cells, comparable
from coca_lab.report.section import Section, Table
from coca_lab.report.study import gather_seeds, study_sections, study_tables

Cells = Sequence[Cell]


@dataclass(frozen=True)
class TaskReport:
    """How the cells of one task are shown.

    Attributes:
        sections: From the cells to sections of the page.
        tables: From the cells to tables for the terminal; by default those of the sections.
        title: Heading of a page that has no other task.
        facts: From a cell to what its figures depend on besides the model. Cells that differ in a
            fact are never shown in one section; by default all cells are comparable.
        noun: What such cells are results on.
        paper: From the cells, and whether the paper's figures were asked for, to sections with
            these.
    """

    sections: Callable[[Cells], list[Section]]
    tables: Callable[[Cells], Sequence[Table]] | None = None
    title: str = "Long context"
    facts: Callable[[Cell], Facts] = lambda cell: {}
    noun: str = "text"
    paper: Callable[[Cells, bool], list[Section]] = lambda cells, asked: []


def harness_sections(cells: Cells) -> list[Section]:
    """Results of the lm-evaluation-harness, in the layout of the paper's Table 5."""
    found = {
        (cell["model"], cell["name"], metric): value
        for cell in cells
        for metric, value in cell["metrics"].items()
        if "stderr" not in metric and isinstance(value, int | float)
    }
    columns = list(dict.fromkeys((name, metric) for _, name, metric in found))
    rows = []
    for model in dict.fromkeys(cell["model"] for cell in cells):
        values = [found.get((model, *column)) for column in columns]
        rows.append([model, *("–" if v is None else f"{v:.4g}" for v in values)])
    header = ["model", *(f"{name}: {metric.partition(',')[0]}" for name, metric in columns)]
    note = f"lm-evaluation-harness {', '.join(sorted({str(cell['harness']) for cell in cells}))}."
    limits = sorted({cell["limit"] for cell in cells if cell["limit"] is not None})
    if limits:
        note += f" At most {limits[-1]} questions per task."
    return [Section("Short context", header=header, rows=rows, note=note)]


def _facts(*names: str) -> Callable[[Cell], Facts]:
    """The facts that are fields of a cell."""
    return lambda cell: {name: cell[name] for name in names if cell.get(name) is not None}


REPORTS: dict[str, TaskReport] = {
    "study": TaskReport(study_sections, study_tables, "Study", _facts("file"), "study"),
    "perplexity": TaskReport(
        perplexity_sections,
        perplexity_tables,
        "Perplexity against context length",
        perplexity_facts,
        paper=paper.perplexity_sections,
    ),
    "passkey": TaskReport(
        passkey_sections,
        passkey_tables,
        "Passkey retrieval",
        prompt_facts,
        "prompts",
        paper.passkey_sections,
    ),
    "needles": TaskReport(needle_sections, needle_tables, "Needles", prompt_facts, "prompts"),
    "harness": TaskReport(
        harness_sections, title="Short context", facts=_facts("limit", "harness"), noun="questions"
    ),
    "bench": TaskReport(bench_sections, bench_tables, "Benchmarks", bench_facts, "measurement"),
    "angles": TaskReport(
        angle_sections,
        lambda cells: [angle_table(cells)],
        "Angles between queries and keys",
        _facts("documents", "tokens", "longest"),
    ),
}
"""By the field ``task`` of a cell, in the order of the page."""


def by_task(cells: Cells) -> dict[str, list[list[Cell]]]:
    """For every task that the report shows, in the order of the page, its comparable cells."""
    gather_seeds(cells)
    groups: dict[str, list[list[Cell]]] = {}
    for name, report in REPORTS.items():
        found = [cell for cell in cells if cell["task"] == name]
        if found:
            groups[name] = comparable(found, report.facts)
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
