"""The report page: one HTML file that opens from disk, with nothing to fetch."""

import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from coca_attention.environment import check_writable, write_text
from coca_attention.errors import UserError
from coca_attention.evaluation.perplexity import paired_ratio_interval
from coca_attention.report import paper
from coca_attention.report.angles import angle_sections
from coca_attention.report.bench import bench_sections
from coca_attention.report.figures import perplexity_figure
from coca_attention.report.forms import form_sections
from coca_attention.report.harness import harness_sections
from coca_attention.report.results import (
    Point,
    Series,
    all_windows,
    best_per_window,
    perplexity_series,
    read_results,
)
from coca_attention.report.retrieval import Section, position_sections, retrieval_sections
from coca_attention.report.training import training_sections


def write_report(
    paths: Sequence[str | Path], output: str | Path, *, title: str | None = None
) -> Path:
    """Read result files and write the page.

    Args:
        paths: Result files of ``coca eval`` or ``coca quickstart``, or run folders (for their
            training curves).
        output: The HTML file.
        title: Heading of the page; by default after what was measured.

    Raises:
        UserError: If a file is unfit or nothing in them can be shown.
    """
    output = Path(output)
    check_writable(output)
    write_text(output, build_report(read_results(paths), title=title))
    return output


def build_report(contents: Sequence[dict[str, Any]], *, title: str | None = None) -> str:
    """HTML of the page from the contents of result files.

    Raises:
        UserError: If they hold nothing to show, or lack what every result has.
    """
    try:
        return _render(contents, title)
    except KeyError as error:
        raise UserError(
            f"a result lacks the field {error}; was the file written by this version of coca eval?"
        ) from error


def _render(contents: Sequence[dict[str, Any]], title: str | None) -> str:
    every = [cell for content in contents for cell in content.get("results", [])]
    sections = [
        *position_sections(every),
        *retrieval_sections(every),
        *form_sections(every),
        *harness_sections(every),
        *bench_sections(every),
        *(Section(**section) for section in angle_sections(every)),
    ]
    cells = [cell for cell in every if cell["task"] == "perplexity"]
    training = [run for content in contents for run in content.get("training", [])]
    sections += training_sections(training)
    if not cells and not sections:
        raise UserError("the result files hold neither results nor training curves")
    series = perplexity_series(cells)
    windows = all_windows(series)
    lengths = {cell.get("training_length") for cell in cells}
    training_length = lengths.pop() if len(lengths) == 1 else None
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(
        files("coca_attention.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    )
    return template.render(
        title=title or _title({cell["task"] for cell in every}),
        findings=findings(series, training_length),
        figure=_safe(perplexity_figure(series, training_length)) if series else None,
        sections=[
            {**vars(section), "figure": _safe(section.figure) if section.figure else None}
            for section in sections
        ],
        windows=windows,
        rows=_rows(series, windows),
        training_length=training_length,
        facts=_facts(cells),
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
        paper_windows=paper.TABLE_1_WINDOWS,
        paper_rows=paper.TABLE_1,
    )


def _title(tasks: set[str]) -> str:
    if not tasks:
        return "Training"
    if tasks == {"angles"}:
        return "Angles between queries and keys"
    return "Perplexity against context length" if tasks <= {"perplexity"} else "Long context"


def findings(series: Sequence[Series], training_length: int | None) -> list[str]:
    """What the figures say, in sentences made from the numbers whichever way they fall."""
    plain = {item.model: item for item in series if item.kind == "none"}
    if "RoFormer" not in plain:
        return []
    sentences = []
    base = plain["RoFormer"]
    for name, item in plain.items():
        if not name.startswith("CoCA"):
            continue
        shared = [p.window for p in base.points if item.at(p.window)]
        if not shared:
            continue
        first, last = shared[0], shared[-1]
        sentences.append(
            f"{name} against RoFormer: {_change(item, base, first)} at {first:,} tokens, "
            f"{_change(item, base, last)} at {last:,}"
            + (f" ({last / training_length:g} × the training length)" if training_length else "")
            + "."
        )
    flat = [item for item in series if item.kind == "attend-last"]
    longest = all_windows(series)[-1]
    earned = False
    for item in flat:
        better = [
            other.label
            for other in series
            if other.kind != "attend-last"
            and other.model == item.model
            and (point := other.at(longest)) is not None
            and point.perplexity < item.points[0].perplexity
        ]
        if better:
            earned = True
            sentences.append(
                f"At {longest:,} tokens {' and '.join(better)} read better than through the "
                f"{item.label.removeprefix(item.model + ', ')}."
            )
    if flat and not earned:
        sentences.append(
            f"At {longest:,} tokens no model reads better than through its last tokens only: the "
            "longest window has not been earned yet."
        )
    return sentences


def _change(item: Series, base: Series, window: int) -> str:
    mine, theirs = item.at(window), base.at(window)
    assert mine is not None and theirs is not None
    if not math.isfinite(mine.perplexity) or not math.isfinite(theirs.perplexity):
        return f"perplexity {mine.perplexity:.1f} against {theirs.perplexity:.1f}"
    change = mine.perplexity / theirs.perplexity - 1
    word = "higher" if change >= 0 else "lower"
    return (
        f"perplexity {mine.perplexity:.1f} against {theirs.perplexity:.1f} "
        f"({abs(change):.1%} {word}{_paired(mine, theirs)})"
    )


def _paired(mine: Point, theirs: Point) -> str:
    """The 95 % interval of a change, documents paired; nothing where they are not the same."""
    try:
        interval = paired_ratio_interval(mine.documents, theirs.documents, seed=0)
    except ValueError:
        return ""
    if interval is None:
        return ""
    low, high = (f"{end - 1:+.1%}".replace("-", "−") for end in interval)
    return f"; 95 % interval {low} to {high}"


def _rows(series: Sequence[Series], windows: Sequence[int]) -> list[dict[str, Any]]:
    best = best_per_window(series, windows)
    rows = []
    for item in series:
        entries = []
        for window in windows:
            point = item.at(window)
            entries.append(
                None
                if point is None
                else {
                    "value": _number(point.perplexity),
                    "interval": None
                    if point.low is None or point.high is None
                    else f"{_number(point.low)} to {_number(point.high)}",
                    "best": item.kind != "attend-last" and point.perplexity == best[window],
                }
            )
        rows.append({"label": item.label, "entries": entries, "flat": item.kind == "attend-last"})
    return rows


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "inf"
    return f"{value:.2f}" if value < 100 else f"{value:,.1f}" if value < 10000 else f"{value:.3g}"


def _facts(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Stride, targets, tokens and documents, each said once where all cells agree."""
    facts = []
    plain = [cell for cell in cells if cell["scaling"] != "attend-last"]
    for name, words in (
        ("targets", "targets: {}"),
        ("stride", "stride: {} tokens"),
        ("tokens", "tokens judged at every window: {:,}"),
        ("seed", "seed of the bootstrap: {}"),
    ):
        values = list(dict.fromkeys(cell[name] for cell in plain))
        if len(values) == 1:
            facts.append(words.format(values[0]))
        elif values:
            facts.append(f"{name}: {min(values):,} to {max(values):,}")
    counts = {len(cell["documents"]) for cell in cells}
    if len(counts) == 1:
        facts.append(f"documents: {counts.pop()}")
    return facts


def _unique(values: Sequence[Any]) -> list[Any]:
    unique: list[Any] = []
    for value in values:
        if value is not None and value not in unique:
            unique.append(value)
    return unique


def _safe(drawings: dict[str, str]) -> dict[str, Markup]:
    return {name: Markup(svg) for name, svg in drawings.items()}
