"""The report page: one self-contained HTML file."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from coca_attention.environment import check_writable, write_text
from coca_attention.errors import UserError
from coca_attention.report.results import all_cells, read_results
from coca_attention.report.tasks import REPORTS, by_task
from coca_attention.report.training import training_sections


def write_report(
    paths: Sequence[str | Path], output: str | Path, *, title: str | None = None
) -> Path:
    """Read result files and write the page.

    Args:
        paths: Result files of ``coca eval`` or ``coca quickstart``, or run folders (for their
            training curves).
        output: The HTML file.
        title: Heading of the page; by default it names what was measured.

    Raises:
        UserError: If a file is invalid or there is nothing to show.
    """
    output = Path(output)
    check_writable(output)
    write_text(output, build_report(read_results(paths), title=title))
    return output


def build_report(contents: Sequence[dict[str, Any]], *, title: str | None = None) -> str:
    """HTML of the page from the contents of result files.

    Raises:
        UserError: If there is nothing to show, or a result lacks a required field.
    """
    try:
        return _render(contents, title)
    except KeyError as error:
        raise UserError(
            f"a result lacks the field {error}; was the file written by this version of coca eval?"
        ) from error


def _render(contents: Sequence[dict[str, Any]], title: str | None) -> str:
    tasks = by_task(all_cells(contents))
    training = [run for content in contents for run in content.get("training", [])]
    sections = [s for name, cells in tasks.items() for s in REPORTS[name].sections(cells)]
    sections += training_sections(training)
    if not sections:
        raise UserError("the result files hold neither results nor training curves")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(
        files("coca_attention.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    )
    return template.render(
        title=title or _title(list(tasks)),
        findings=[text for name, cells in tasks.items() for text in REPORTS[name].findings(cells)],
        sections=sections,
        recipes={
            run["name"]: yaml.safe_dump(run["recipe"], sort_keys=False)
            for run in training
            if "recipe" in run
        },
        environments=_unique(
            [
                environment
                for content in contents
                for environment in [content.get("environment"), *content.get("environments", [])]
            ]
        ),
    )


def _title(tasks: Sequence[str]) -> str:
    if not tasks:
        return "Training"
    return REPORTS[tasks[0]].title if len(tasks) == 1 else "Long context"


def _unique(values: Sequence[Any]) -> list[Any]:
    unique: list[Any] = []
    for value in values:
        if value is not None and value not in unique:
            unique.append(value)
    return unique
