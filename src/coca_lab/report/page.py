"""The report page: one self-contained HTML file; and its charts as files."""

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from coca_attention.errors import UserError
from coca_lab.cells import CheckRecord, Content
from coca_lab.files import check_output, write_text
from coca_lab.report.charts import Palette
from coca_lab.report.checks import check_section
from coca_lab.report.groups import tell_apart, without_copies
from coca_lab.report.result_files import (
    ResultFile,
    TrainingRun,
    paper_figures,
    parsed,
)
from coca_lab.report.section import Section
from coca_lab.report.task_sections import REPORTS, Tasks, by_task, groups_of
from coca_lab.report.training import training_sections
from coca_lab.yaml_files import dump_yaml

MARK = "--page: #fff; --text: #1b1b1b;"
"""In the style of every page, those of earlier versions included."""


def write_report(
    contents: Sequence[Content],
    output: str | Path,
    *,
    title: str | None = None,
    paper: bool = False,
    figures: str | Path | None = None,
) -> Path:
    """Write the page.

    Args:
        contents: Of result files (see `read_results`).
        output: The HTML file.
        title: Heading of the page; by default that of the study, or what was measured.
        paper: Also show the paper's Tables 1 to 4.
        figures: Folder for every chart as SVG, PDF and PNG; by default there are none.

    Raises:
        UserError: If a result is invalid, there is nothing to show, or ``output`` is no such page.
    """
    output = Path(output)
    check_output(output, "page of coca report", lambda text: MARK in text)
    if paper:
        contents = [*contents, *paper_figures()]
    page = build_report(contents, title=title)
    if figures is not None:
        write_figures(contents, figures)
    write_text(output, page)
    return output


def write_figures(contents: Sequence[Content], folder: str | Path) -> None:
    """Write every chart of a page as SVG, PDF and PNG, for a column of a paper.

    Args:
        contents: Of result files.
        folder: Is made; the files are named after the charts' titles, and replace those there.

    Raises:
        UserError: If a result is invalid.
    """
    from coca_lab.report import drawing  # here, since Altair takes half a second

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    palette: Palette = {}
    sections = page_sections(*parts_of(parsed(contents)))
    for number, section in enumerate(sections, 1):
        if section.chart is None:
            continue
        words = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-")
        stem = folder / f"{number}-{words}"
        for ending, content in drawing.for_print(section.chart, palette).items():
            path = stem.with_name(f"{stem.name}.{ending}")
            path.write_bytes(content)


def build_report(contents: Sequence[Content], *, title: str | None = None) -> str:
    """HTML of the page from the contents of result files.

    Raises:
        UserError: If there is nothing to show, or a result lacks a required field.
    """
    from coca_lab.report import drawing  # here, since Altair takes half a second

    found = parsed(contents)
    checks, tasks, runs = parts_of(found)
    sections = page_sections(checks, tasks, runs)
    if not sections:
        others = {str(cell.get("task")) for file in found for cell in file.results}
        raise UserError(
            "the result files hold neither results that the report shows nor training runs"
            + (f"; they are of {', '.join(sorted(others))}" if others else "")
        )
    environments = []
    for file in found:
        if file.environment and file.environment not in environments:
            environments.append(file.environment)
    palette: Palette = {}
    shown = []
    for number, section in enumerate(sections, 1):
        drawn = {}
        if section.chart:
            drawn["words"] = f"{section.title}. {section.chart.words()}"
            for name, width in {"wide": drawing.WIDE, "narrow": drawing.NARROW}.items():
                picture = drawing.specification(section.chart, palette, width)
                drawn[name] = drawing.static_svg(picture, f"s{number}{name[0]}")
        shown.append((section, drawn))
    groups = []  # of what is not comparable, with its models and files
    for name, group, called in groups_of(tasks):
        if called:
            members = ", ".join(dict.fromkeys(cell.model for cell in group if cell.model))
            sources = ", ".join(dict.fromkeys(cell.file for cell in group if cell.file))
            members += f" ({sources})" if sources else ""
            groups.append((f"{REPORTS[name].title}, {called}", members))
    studies = {file.study.title for file in found if file.study}
    if len(studies) == 1:
        title = title or studies.pop()
    measured = " · ".join(REPORTS[name].title for name in tasks) or "Training"
    if checks:
        measured = "Which method reads farther"
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    source = files("coca_lab.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    return template.from_string(source).render(
        title=title or measured,
        decisions=[check.decision for check in checks],
        palettes={theme: drawing.colours(theme) for theme in drawing.INKS},
        failures=[each for file in found for each in file.failures.items()],
        groups=groups,
        sections=shown,
        recipes={run.model: dump_yaml(run.recipe) for run in runs if run.recipe},
        environments=environments,
    )


def parts_of(
    contents: Sequence[ResultFile],
) -> tuple[list[CheckRecord], Tasks, list[TrainingRun]]:
    """What result files hold; names that mean two models are told apart by their files."""
    checks = [content.check for content in contents if content.check]
    runs = without_copies([run for content in contents for run in content.training])
    tasks = by_task(contents)
    tell_apart([group for groups in tasks.values() for group in groups], runs)
    return checks, tasks, runs


def page_sections(
    checks: Sequence[CheckRecord], tasks: Tasks, runs: Sequence[TrainingRun]
) -> list[Section]:
    """The sections of a page, in the order of the tasks."""
    sections = [check_section(check) for check in checks]
    for name, group, called in groups_of(tasks):
        for section in REPORTS[name].sections(group):
            title = f"{section.title} ({called})" if called else section.title
            chart = section.chart
            if chart is not None and chart.points["x"].nunique() < 2:
                chart = None  # dots above one another, of which the table says more
            sections.append(replace(section, title=title, chart=chart))
    return sections + training_sections(runs)
