"""The report page: one self-contained HTML file."""

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

import yaml
from jinja2 import Environment, StrictUndefined

from coca_attention.errors import UserError
from coca_lab.files import check_output, write_text
from coca_lab.report.cells import Content, ResultFile, TrainingRun, models_of
from coca_lab.report.charts import COLOURS, LineChart, Palette
from coca_lab.report.results import (
    Cells,
    paper_figures,
    parsed,
    read_results,
    tell_apart,
    without_copies,
)
from coca_lab.report.section import Section, capital, enumeration
from coca_lab.report.tasks import REPORTS, Tasks, by_task, groups_of
from coca_lab.report.training import training_sections

MARK = "--page: #fff; --text: #1b1b1b;"
"""In the style of every page, those of earlier versions included."""
OPEN = 6
"""Charts shown at first; what comes after them is folded away."""
GLOSSARY = {  # words in names of models, scalings or forms, and what a reader needs to know
    "Roles": (
        ["Roles", "roles"],
        "local layers with a short window, then one that sees all, without positions",
    ),
    "Native": (
        ["Native", "native"],
        "roles without temperature and decay, an architecture of Transformers and llama.cpp",
    ),
    "RoFormer": (["RoFormer"], "rotary positions (RoPE)"),
    "Slack, strict": (["slack", "strict"], "CoCA by the paper’s Eq. 10 and Eq. 9"),
    "Last n tokens only": (["attend-last"], "the text before them is left out"),
    "NTK, YaRN, PI": (
        ["ntk", "yarn", "linear", "dynamic"],
        "frequencies rescaled by the factor in brackets, without training",
    ),
}
"""Of the names that pages of this project have."""


def write_report(
    paths: Sequence[str | Path],
    output: str | Path,
    *,
    title: str | None = None,
    paper: bool = False,
) -> Path:
    """Read result files and write the page.

    Args:
        paths: Result files of ``coca eval`` and others, or folders (see `read_results`).
        output: The HTML file.
        title: Heading of the page; by default the study's, or what was measured.
        paper: Also show the paper's Tables 1 to 4.

    Raises:
        UserError: If a file is invalid, there is nothing to show, or ``output`` is no such page.
    """
    output = Path(output)
    check_output(output, "page of coca report", lambda text: MARK in text)
    write_text(output, build_report(read_results(paths), title=title, paper=paper))
    return output


def build_report(
    contents: Sequence[Content], *, title: str | None = None, paper: bool = False
) -> str:
    """HTML of the page from the contents of result files.

    Raises:
        UserError: If there is nothing to show, or a result lacks a required field.
    """
    own = parsed(contents)
    found = [*own, *parsed(paper_figures() if paper else ())]
    tasks, runs = tasks_and_runs(found)
    sections = page_sections(tasks, runs)
    if not sections:
        raise UserError("the result files hold neither results nor training curves")
    every = [each for file in found for each in (file.environment, *file.environments) if each]
    environments = [each for n, each in enumerate(every) if each not in every[:n]]
    palette: Palette = {}
    shown = [_shown(section, number, palette) for number, section in enumerate(sections, 1)]
    drawn = [number for number, section in enumerate(sections) if section.chart]
    fold = drawn[OPEN] if len(drawn) > OPEN else len(sections)
    _, light, dark = zip(*COLOURS, strict=True)
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    source = files("coca_lab.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    return template.from_string(source).render(
        title=title or _title(own, tasks, runs),
        palettes={"light": light, "dark": dark},
        failures=[each for file in found for each in file.failures.items()],
        words=glossary(tasks),
        groups=[f"{capital(c)}: {_members(group)}" for _, group, c in groups_of(tasks) if c],
        first=shown[:fold],
        more=shown[fold:],
        recipes={
            run.model: yaml.safe_dump(run.recipe, sort_keys=False) for run in runs if run.recipe
        },
        environments=environments,
    )


def tasks_and_runs(contents: Sequence[ResultFile]) -> tuple[Tasks, list[TrainingRun]]:
    """What result files hold; names that mean two models are told apart by their files."""
    runs = without_copies([run for content in contents for run in content.training])
    tasks = by_task(contents)
    tell_apart([group for groups in tasks.values() for group in groups], runs)
    return tasks, runs


def page_sections(tasks: Tasks, runs: Sequence[TrainingRun]) -> list[Section]:
    """The sections of a page in order; the first one has a chart, if any has."""
    sections: list[Section] = []
    for name, group, called in groups_of(tasks):
        parts = REPORTS[name].sections(group)
        sections += [_of_group(part, called) for part in parts] if called else parts
    sections += training_sections(runs)
    drawn = [section for section in sections if section.chart]
    return sorted(sections, key=lambda section: section not in drawn[:1])


def glossary(tasks: Tasks) -> dict[str, str]:
    """What the names on the page mean, of those that have a meaning here."""
    cells = _cells(tasks)
    kinds = {f"{getattr(cell, 'scaling', '')} {cell.attention}" for cell in cells}
    said = " ".join([*models_of(cells), *kinds])
    return {
        name: text
        for name, (words, text) in GLOSSARY.items()
        if any(re.search(rf"\b{word}", said) for word in words)
    }


def _shown(section: Section, number: int, palette: Palette) -> dict[str, object]:
    """The section, its pictures, and its table as CSV."""
    table = f"data:text/csv;charset=utf-8,{quote(section.csv())}" if section.rows else ""
    shown: dict[str, object] = {"section": section, "first": None, "more": None, "csv": table}
    if chart := section.chart:
        shown["first"] = _drawn(section.title, chart, f"s{number}", palette)
        if chart.everything:
            shown["more"] = _drawn(section.title, chart.everything, f"m{number}", palette)
    return shown


def _drawn(title: str, chart: LineChart, prefix: str, palette: Palette) -> dict[str, str]:
    """A chart in words, and as pictures for wide and narrow pages."""
    from coca_lab.report import drawing  # here, since Altair takes half a second

    widths = {"wide": drawing.WIDE, "narrow": drawing.NARROW}
    return {"words": f"{title}. {chart.words()}"} | {
        name: drawing.static_svg(drawing.specification(chart, palette, width), prefix + name[0])
        for name, width in widths.items()
    }


def _of_group(section: Section, called: str) -> Section:
    """The section, saying which of several groups of comparable results it shows."""
    lead = f"{capital(called)}: {section.lead}" if section.lead else ""
    return replace(section, title=f"{section.title} ({called})", lead=lead)


def _members(cells: Cells) -> str:
    """The models of comparable cells, or the machine, and the files that they are from."""
    names = ", ".join(dict.fromkeys(cell.file for cell in cells if cell.file))
    about = ", ".join(models_of(cells)) or cells[0].machine
    return f"{about} ({names})" if about and names else about or names


def _cells(tasks: Tasks) -> Cells:
    return [cell for groups in tasks.values() for group in groups for cell in group]


def _title(contents: Sequence[ResultFile], tasks: Tasks, runs: Sequence[TrainingRun]) -> str:
    """The study's, if all is from one; else what was measured, and of which models."""
    studies = {content.study.title if content.study else "" for content in contents}
    if len(studies) == 1 and any(studies):
        return studies.pop()
    titles = [REPORTS[name].title for name in tasks]
    what = " · ".join(titles) if len(titles) in (1, 2) else "Long context" if titles else "Training"
    names = models_of(_cells(tasks) or runs)
    if len(names) > 3:
        names = [*names[:2], f"{len(names) - 2} more"]
    return f"{what}: {enumeration(names)}" if names else what
