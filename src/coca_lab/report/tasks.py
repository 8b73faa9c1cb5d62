"""The table of tasks that the report shows, and those that are a table alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from coca_lab.report.bench import Bench, bench_sections
from coca_lab.report.cells import (
    AboveZero,
    CheckedCell,
    Content,
    Facts,
    Needles,
    Number,
    Perplexity,
    Prompts,
    Recall,
    ResultFile,
    Ruler,
    read_as,
)
from coca_lab.report.lengths import passkey_sections, recall_sections, ruler_sections
from coca_lab.report.needles import needle_sections
from coca_lab.report.perplexity import perplexity_sections
from coca_lab.report.results import Cells, comparable, parsed
from coca_lab.report.section import Section

Tasks = dict[str, list[Cells]]
"""By the name of a task, groups of comparable cells."""


@dataclass(frozen=True)
class TaskReport:
    """How the cells of one task are shown.

    Attributes:
        sections: From the cells to sections of the page; the terminal shows their tables.
        title: Heading of a page that has no other task.
        cell: The type of its cells, which they are checked against. Its ``facts`` are what a
            figure depends on besides the model: cells that differ in one are shown apart.
    """

    sections: Callable[[Any], list[Section]]
    title: str = "Long context"
    cell: type[CheckedCell] = CheckedCell


UNDEFINED = ("NaN", "Infinity", "-Infinity")
"""Metrics that are no numbers, as JSON files of Python call them."""


class Harness(CheckedCell):
    """A task of lm-evaluation-harness."""

    name: str
    metrics: dict[str, Number | str | None]
    harness: str
    limit: AboveZero | None = None

    @property
    def facts(self) -> Facts:
        """The version, and how many questions were asked: all, if there is no limit."""
        return {"harness": self.harness, "limit": self.limit}


def harness_sections(cells: Sequence[Harness]) -> list[Section]:
    """Results of the lm-evaluation-harness, in the layout of the paper's Table 5."""
    scores = list[dict[str, str]]()
    for cell in cells:
        for name, value in cell.metrics.items():
            metric, _, answers = name.partition(",")
            if "stderr" in metric or not (isinstance(value, float) or value in UNDEFINED):
                continue
            label = f"{cell.name}: {metric}"
            if answers not in ("", "none"):  # the filter that found them in what the model wrote
                label += f", {answers}"
            shown = f"{value:.4g}" if isinstance(value, float) else value
            scores.append({"model": cell.model, "metric": label, "value": shown})
    if not scores:
        return []
    table = pd.DataFrame(scores).pivot_table(
        "value", "model", "metric", sort=False, aggfunc="first"
    )
    rows = [list(row) for row in table.fillna("–").itertuples()]
    limit = cells[0].limit
    asked = "" if limit is None else f" At most {limit:g} questions per task."
    if limit is not None and limit < 1:
        asked = f" {100 * limit:.3g} % of the questions of each task."
    note = f"lm-evaluation-harness {cells[0].harness}.{asked}"
    return [Section("Short context", header=["model", *table.columns], rows=rows, note=note)]


REPORTS: dict[str, TaskReport] = {
    "perplexity": TaskReport(perplexity_sections, "Perplexity against context length", Perplexity),
    "needles": TaskReport(needle_sections, "Needles by log probability", Needles),
    "passkey": TaskReport(passkey_sections, "Passkey retrieval", Prompts),
    "ruler": TaskReport(ruler_sections, "RULER", Ruler),
    "recall": TaskReport(recall_sections, "Associative recall", Recall),
    "harness": TaskReport(harness_sections, "Short context", Harness),
    "bench": TaskReport(bench_sections, "Benchmarks", Bench),
}
"""By the field ``task`` of a cell, in the order of the page."""


def by_task(contents: Sequence[ResultFile]) -> Tasks:
    """For every task that the report shows, in the order of the page, its comparable cells."""
    chosen: dict[str, Cells] = {name: [] for name in REPORTS}
    for file in contents:
        about = {"machine": str(file.environment or ""), "file": file.file}
        for number, content in enumerate(file.results):
            place = {**about, **content}, file.file, "results", number
            task = read_as(CheckedCell, *place).task
            if task in chosen:
                chosen[task].append(read_as(REPORTS[task].cell, *place))
    return {name: comparable(cells) for name, cells in chosen.items() if cells}


def groups_of(tasks: Tasks) -> Iterator[tuple[str, Cells, str]]:
    """The groups of every task, by its name; and what they are called, if a task has several."""
    for name, groups in tasks.items():
        for number, group in enumerate(groups, 1):
            yield name, group, f"group {number}" if len(groups) > 1 else ""


def printed_tables(cells: Sequence[Content]) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows of every table for the terminal, as text."""
    tables = []
    for name, group, called in groups_of(by_task(parsed([{"results": list(cells)}]))):
        printed = [x for x in REPORTS[name].sections(group) if x.rows and x.printed]
        firsts = [str(section.header[0]) for section in printed]
        for section in printed:
            first, *header = map(str, section.header)
            # Of tables that begin alike (RULER's tasks), the title tells which one it is.
            title = section.title if firsts.count(first) > 1 else ""
            about = ", ".join(filter(None, (title, called)))
            header = [f"{first} ({about})" if about else first, *header]
            tables.append((header, [[*map(str, row)] for row in section.rows]))
    return tables
