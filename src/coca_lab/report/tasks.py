"""The table of tasks that the report shows, and those that are a table alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files

import yaml

from coca_lab.report.angles import angle_sections
from coca_lab.report.bench import bench_facts, bench_sections
from coca_lab.report.perplexity import perplexity_facts, perplexity_sections
from coca_lab.report.prompts import passkey_sections, prompt_facts, ruler_sections
from coca_lab.report.results import Cell, Facts, all_cells, comparable
from coca_lab.report.section import Section
from coca_lab.report.study import gather_seeds, study_sections

Cells = Sequence[Cell]
Tasks = dict[str, list[list[Cell]]]
"""By the name of a task, groups of comparable cells."""
PAPER_LENGTH = 512
"""Training length of the paper's models, in tokens."""
PAPER_WINDOWS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class TaskReport:
    """How the cells of one task are shown.

    Attributes:
        sections: From the cells to sections of the page; the terminal shows their tables.
        title: Heading of a page that has no other task.
        facts: From a cell to what its figures depend on besides the model. Cells that differ in a
            fact are never shown in one section; by default all cells are comparable.
        noun: What such cells are results on.
    """

    sections: Callable[[Cells], list[Section]]
    title: str = "Long context"
    facts: Callable[[Cell], Facts] = lambda cell: {}
    noun: str = "text"


def harness_sections(cells: Cells) -> list[Section]:
    """Results of the lm-evaluation-harness, in the layout of the paper's Table 5."""
    scores = {
        (cell["model"], cell["name"], metric): value
        for cell in cells
        for metric, value in cell["metrics"].items()
        if "stderr" not in metric and isinstance(value, int | float)
    }
    columns = list(dict.fromkeys((name, metric) for _, name, metric in scores))
    rows = []
    for model in dict.fromkeys(cell["model"] for cell in cells):
        values = [scores.get((model, *column)) for column in columns]
        rows.append([model, *("–" if v is None else f"{v:.4g}" for v in values)])
    header = ["model", *(f"{name}: {metric.partition(',')[0]}" for name, metric in columns)]
    note = f"lm-evaluation-harness {', '.join(sorted({str(cell['harness']) for cell in cells}))}."
    limits = sorted({cell["limit"] for cell in cells if cell["limit"] is not None})
    if limits:
        note += f" At most {limits[-1]} questions per task."
    return [Section("Short context", header=header, rows=rows, note=note)]


def recall_sections(cells: Cells) -> list[Section]:
    """Right answers by the length of the text, a row for every model and number of pairs."""
    shares = {
        (f"{cell['model']}, {cell['pairs']} pairs", cell["length"]): cell["accuracy"]
        for cell in cells
        if cell["scaling"] == "none"
    }
    lengths = sorted({length for _, length in shares})
    rows = [
        [name, *(f"{shares[name, n]:.2f}" if (name, n) in shares else "" for n in lengths)]
        for name in dict.fromkeys(name for name, _ in shares)
    ]
    header = ["right answers at", *(f"{n:,}" for n in lengths)]
    return [Section("Associative recall", header=header, rows=rows)] if rows else []


def paper_sections(task: str, cells: Cells, every: bool) -> list[Section]:
    """The paper's tables about a task: those that compare with models among the cells, or all."""
    # Tables 1 to 3 compare with models of the paper's training length, Table 4 with models that
    # have position interpolation of their own, and so were trained under it.
    compared = {
        "its training length": any(c.get("training_length") == PAPER_LENGTH for c in cells),
        "interpolated models": any(
            cell.get("scaling") == "none"
            and (cell.get("rope_parameters") or {}).get("rope_type") == "linear"
            for cell in cells
        ),
    }
    text = files("coca_lab.report").joinpath("paper.yaml").read_text(encoding="utf-8")
    paper = yaml.safe_load(text).get(task, {"columns": "", "tables": []})
    header = [paper["columns"], *(f"{n:,}" for n in PAPER_WINDOWS)]
    return [
        Section(table["title"], header=header, rows=table["rows"], note=table.get("note", ""))
        for table in paper["tables"]
        if every or compared[table["of"]]
    ]


def _facts(*names: str) -> Callable[[Cell], Facts]:
    """The facts that are fields of a cell."""
    return lambda cell: {name: cell[name] for name in names if cell.get(name) is not None}


REPORTS: dict[str, TaskReport] = {
    "study": TaskReport(study_sections, "Several seeds", _facts("file"), "study"),
    "perplexity": TaskReport(
        perplexity_sections, "Perplexity against context length", perplexity_facts
    ),
    "passkey": TaskReport(passkey_sections, "Passkey retrieval", prompt_facts, "prompts"),
    "ruler": TaskReport(ruler_sections, "RULER", prompt_facts, "prompts"),
    "recall": TaskReport(recall_sections, "Associative recall", _facts("seed", "file"), "texts"),
    "harness": TaskReport(
        harness_sections, "Short context", _facts("limit", "harness"), "questions"
    ),
    "bench": TaskReport(bench_sections, "Benchmarks", bench_facts, "measurement"),
    "angles": TaskReport(
        angle_sections, "Angles between queries and keys", _facts("documents", "tokens", "longest")
    ),
}
"""By the field ``task`` of a cell, in the order of the page."""


def by_task(cells: Cells) -> Tasks:
    """For every task that the report shows, in the order of the page, its comparable cells."""
    gather_seeds(cells)
    chosen = {name: [cell for cell in cells if cell["task"] == name] for name in REPORTS}
    return {name: comparable(of, REPORTS[name].facts) for name, of in chosen.items() if of}


def groups_of(tasks: Tasks) -> Iterator[tuple[str, list[Cell], str]]:
    """The groups of every task, by its name; and what they are called, if a task has several."""
    for name, groups in tasks.items():
        for number, group in enumerate(groups, 1):
            yield name, group, f"{REPORTS[name].noun} {number}" if len(groups) > 1 else ""


def printed_tables(cells: Cells) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows of every table for the terminal, as text."""
    tables = []
    for name, group, called in groups_of(by_task(all_cells([{"results": cells}]))):
        for section in REPORTS[name].sections(group):
            if section.rows and section.printed:
                first, *header = map(str, section.header)
                header = [f"{first} ({called})" if called else first, *header]
                tables.append((header, [[*map(str, row)] for row in section.rows]))
    return tables
