"""The table of tasks that the report shows: from the cells of a task to sections."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from coca_lab.cells import (
    ATTEND_LAST,
    CheckedCell,
    Content,
    Harness,
    NeedleFigures,
    Needles,
    Passkey,
    Perplexity,
    Prompts,
    Ruler,
    cell_type,
)
from coca_lab.intervals import (
    FEW_DOCUMENTS,
    FEWEST_DOCUMENTS,
    DocumentScore,
    perplexity,
    perplexity_interval,
    wilson_interval,
)
from coca_lab.report.charts import Frame
from coca_lab.report.groups import Cells, comparable
from coca_lab.report.lengths import (
    NEEDLES,
    PASSKEYS,
    PERPLEXITY,
    RULER,
    Point,
    Scores,
    ends,
    frame_of,
    length_section,
    length_sections,
    line_label,
    trained_length,
)
from coca_lab.report.result_files import ResultFile, parsed, read_as
from coca_lab.report.section import Section

Tasks = dict[str, list[Cells]]
"""By the name of a task, groups of comparable cells."""
SHARE = 0.85
"""The share of its score that a model keeps up to a length."""
UNDEFINED = ("NaN", "Infinity", "-Infinity")
"""Metrics that are no numbers, as JSON files of Python call them."""


@dataclass(frozen=True)
class TaskReport:
    """How the cells of one task are shown.

    Attributes:
        sections: From comparable cells, of the type that `coca_lab.cells.CELLS` has for the task,
            to sections of the page; the terminal shows their tables.
        title: What the task measures, for the heading of a page.
    """

    sections: Callable[[Any], list[Section]]
    title: str = "Long context"


def perplexity_sections(cells: Sequence[Perplexity]) -> list[Section]:
    """By window; apart, by position, and of what is a copy from far back."""
    caption = seeds_caption(cells, mean="Geometric means")
    if not caption:
        longer = [cell for cell in cells if cell.scaling != ATTEND_LAST]
        caption = _documents_caption(longer or cells)
    points = []
    for cell in cells:
        scores = [document.score for document in cell.documents]
        points.append(Point(cell, cell.window, cell.perplexity, cell.ci95, scores=scores))
    frame = frame_of(points, PERPLEXITY)
    sections = length_sections(frame, PERPLEXITY, caption)
    short = replace(PERPLEXITY, title="Perplexity")
    copies = [point for cell in cells for point in _copies(cell)]
    if copies:
        sections += length_sections(
            frame_of(copies, short), short, "Small: 95% intervals over documents."
        )
    positions = [
        point
        for cell in cells
        for place in cell.by_position or ()
        for point in _part(cell, place.last, f"by position, window {cell.window:,}", [place.score])
    ]
    if positions:
        by_position = replace(short, x="tokens read before, up to")
        sections += length_sections(frame_of(positions, by_position), by_position, "")
    return sections


def _documents_caption(cells: Sequence[Perplexity]) -> str:
    """What was scored, and what the intervals are of."""
    scored = [cell for cell in cells if cell.documents]
    if not scored:
        return ""
    caption = _intervals_over([len(cell.documents) for cell in scored])
    if tokens := ends(cell.tokens for cell in scored if cell.tokens):
        caption += f" Tokens scored at a length: {tokens}."
    if stride := ends(cell.stride for cell in scored if cell.stride):
        caption += f" Stride: {stride}."
    targets = {cell.targets for cell in scored if cell.targets}
    if targets:
        caption += f" Targets: {', '.join(sorted(targets))}."
    return caption


def _intervals_over(counts: Sequence[int]) -> str:
    """What the intervals of cells with so many documents each are of."""
    several = [count for count in counts if count >= FEWEST_DOCUMENTS]
    if not several:
        return f"Documents: {ends(counts)}, too few for intervals."
    rough = f", fewer than {FEW_DOCUMENTS}: rough" if min(several) < FEW_DOCUMENTS else ""
    said = f"Small: 95% intervals over documents ({ends(several)}{rough})"
    alone = ""
    if len(several) < len(counts):
        alone = f"; figures of fewer than {FEWEST_DOCUMENTS} have none"
    return f"{said}{alone}."


def _copies(cell: Perplexity) -> Iterator[Point]:
    """Of the targets that can be copied from far back, and of all others."""
    if not cell.repeats:
        return
    whole = [document.score for document in cell.documents]
    copied = [document.score for document in cell.repeats.documents]
    far = []
    rest = []
    for document, part in zip(whole, copied, strict=False):
        far.append(replace(part, id=document.id))
        tokens = document.tokens - part.tokens
        rest.append(DocumentScore(document.id, document.nats - part.nats, tokens))
    about = f"{cell.repeats.n}-grams that stand more than {cell.repeats.beyond} tokens before"
    yield from _part(cell, cell.window, f"ends of {about}", far)
    yield from _part(cell, cell.window, f"all but the ends of {about}", rest)


def _part(cell: Perplexity, x: int, kind: str, scores: Scores) -> Iterator[Point]:
    """The perplexity of some of its targets, if there are any."""
    if sum(score.tokens for score in scores) > 0:
        value = perplexity(scores)
        y = value if 1e-300 < value < math.inf else None
        yield Point(cell, x, y, perplexity_interval(scores), kind, scores)


def needle_sections(cells: Sequence[Needles]) -> list[Section]:
    """Nats a digit near and far; then in one table probabilities and the numbers found."""
    caption = seeds_caption(cells) or _intervals_over([len(cell.documents) for cell in cells])
    parts = [part for cell in cells for part in _needle_parts(cell)]
    frame = frame_of([point for point, _ in parts], NEEDLES)
    found: dict[tuple[str, int, str], list[str]] = {}
    for point, figures in parts:
        place = (line_label(point.cell, point.x), point.x, point.kind)
        probability = 0.0 if point.y is None else math.exp(-point.y)
        shown = f"{probability:.0%}, {figures.found} of {figures.needles}"
        found.setdefault(place, []).append(shown)
    lengths = sorted({point.x for point, _ in parts})
    rows = []
    for line, kind in frame[["line", "kind"]].drop_duplicates().itertuples(index=False):
        shown = ["; ".join(found.get((line, length, kind), ["–"])) for length in lengths]
        rows.append([line, kind, *shown])
    summary = Section(
        "Needles: probability of a digit (a guess has 10%), numbers found whole",
        header=["model", "where", *(f"{length:,} tokens" for length in lengths)],
        rows=rows,
        has_words=True,
    )
    sections = length_sections(frame, NEEDLES, caption)
    return [*(replace(section, is_printed=False) for section in sections), summary]


def _needle_parts(cell: Needles) -> list[tuple[Point, NeedleFigures]]:
    """Its near needles and its far ones; where nothing parts them, all."""
    if cell.near is None:
        of_all = NeedleFigures(
            nats=cell.nats, ci95=cell.ci95, found=cell.found, needles=cell.needles
        )
        return [_needle_part(cell, "", of_all, 0, sys.maxsize)]
    parts = []
    near = cell.ranges["near"]
    beyond = cell.ranges["beyond"]
    if near.needles:
        kind = f"up to {cell.near:,} tokens back"
        parts.append(_needle_part(cell, kind, near, 0, cell.near))
    if beyond.needles:
        kind = f"farther back than {cell.near:,} tokens"
        parts.append(_needle_part(cell, kind, beyond, cell.near + 1, sys.maxsize))
    return parts


def _needle_part(
    cell: Needles, kind: str, figures: NeedleFigures, nearest: int, farthest: int
) -> tuple[Point, NeedleFigures]:
    """The needles at some distances, whose documents have a score each."""
    scores = []
    for document in cell.documents:
        chosen = [each for each in document.needles if nearest <= each.distance <= farthest]
        nats = sum(math.inf if each.nats is None else each.nats for each in chosen)
        scores.append(DocumentScore(str(document.id), nats, cell.digits * len(chosen)))
    # Student's intervals may reach below 0, where no nats are.
    interval = figures.ci95 and [max(0.0, end) for end in figures.ci95]
    return Point(cell, cell.length, figures.nats, interval, kind, scores), figures


def passkey_sections(cells: Sequence[Passkey]) -> list[Section]:
    """The share found, by prompt length."""
    points = [Point(cell, cell.length, cell.accuracy, cell.wilson95) for cell in cells]
    return length_sections(frame_of(points, PASSKEYS), PASSKEYS, prompts_caption(cells))


def ruler_sections(cells: Sequence[Ruler]) -> list[Section]:
    """The mean score over the tasks that all models have, against the length; and every task's."""
    points = [Point(cell, cell.length, cell.score, cell.wilson95, cell.kind) for cell in cells]
    frame = frame_of(points, RULER)
    caption = prompts_caption(cells)
    kinds = frame["kind"].unique()
    measure = RULER if len(kinds) > 1 else replace(RULER, name=f"RULER score of {kinds[0]}")
    sections = length_sections(frame, measure, caption)
    shared = set.intersection(*frame.groupby(["line", "x"])["kind"].agg(set))
    if len(sections) > 1 and shared and frame["size"].nunique() == 1:
        mean = replace(RULER, name=f"mean RULER score of {len(shared)} tasks")
        pooled = _pooled(frame[frame["kind"].isin(shared)])
        # One chart: that of the mean.
        tables = [replace(section, chart=None) for section in sections]
        sections = [length_section(pooled, mean, mean.title, caption), *tables]
    return [_with_kept(sections[0]), *sections[1:]]


def _pooled(frame: Frame) -> Frame:
    """A frame of the means over all prompts of several kinds."""
    prompts = [len(cell.samples) or 1 for cell in frame["cell"]]
    sums = frame.assign(prompts=prompts, hits=frame["y"] * prompts)
    sums = sums.groupby(["line", "x"])[["hits", "prompts"]].sum()
    first = frame.drop_duplicates(["line", "x"]).join(sums, on=["line", "x"])
    lows = []
    highs = []
    for hits, count in zip(first["hits"], first["prompts"], strict=True):
        low, high = wilson_interval(hits, count) or (math.nan, math.nan)
        lows.append(low)
        highs.append(high)
    return first.assign(y=first["hits"] / first["prompts"], low=lows, high=highs)


def _with_kept(section: Section) -> Section:
    """The section with a column of the longest length up to which a line keeps `SHARE`."""
    if section.chart is None:
        return section
    lines = section.chart.points.groupby("line", sort=False)
    rows = [[*row, _kept(lines.get_group(row[0]))] for row in section.rows]
    note = (
        f"{section.note} Last column: {SHARE:.0%} of the score at the training context, or if it "
        "was not measured at the longest length below it, else at the shortest."
    )
    header = [*section.header, f"keeps {SHARE:.0%} up to"]
    return replace(section, header=header, rows=rows, note=note)


def _kept(line: Frame) -> str:
    """The longest length up to which a model keeps `SHARE` of its score at its training length."""
    scores = line.set_index("x")["y"].sort_index()
    trained = trained_length(line) or 0
    first = max([length for length in scores.index if length <= trained], default=scores.index[0])
    if not scores[first]:
        return "–"
    kept = (scores.loc[first:] >= SHARE * scores[first]).cummin()
    last = kept[kept].index[-1]
    return f"≥ {last:,}" if last == scores.index[-1] else f"{last:,}"


def seeds_caption(cells: Sequence[Any], mean: str = "Means") -> str:
    """Of figures from elsewhere their conditions; of several seeds, what the ranges are."""
    if cells[0].conditions:
        return f"{cells[0].conditions}."
    seeds = {cell.training_seed for cell in cells}
    if len(seeds) > 1:
        return f"{mean} of {len(seeds)} training seeds where there are several; small: their range."
    return ""


def prompts_caption(cells: Sequence[Prompts]) -> str:
    """How many prompts were answered, and how."""
    caption = seeds_caption(cells)
    if caption:
        return caption
    caption = "Small: Wilson’s 95% intervals."
    if all(cell.samples for cell in cells):
        caption += f" Prompts: {ends(len(cell.samples) for cell in cells)} each."
    first = cells[0]
    if "depths" in first.model_fields_set:
        depths = getattr(first, "depths", None)
        caption += f" Depths: {depths} in turn." if depths else " Depths: random."
    if getattr(first, "chat", False):
        caption += f" In the chat template; thinking: {getattr(first, 'thinking', 'default')}."
    return caption


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
        asked = f" {100 * limit:.3g}% of the questions of each task."
    note = f"lm-evaluation-harness {cells[0].harness}.{asked}"
    return [Section("Short context", header=["model", *table.columns], rows=rows, note=note)]


REPORTS: dict[str, TaskReport] = {
    "perplexity": TaskReport(perplexity_sections, "Perplexity against context length"),
    "needles": TaskReport(needle_sections, "Needles by log probability"),
    "passkey": TaskReport(passkey_sections, "Passkey retrieval"),
    "ruler": TaskReport(ruler_sections, "RULER"),
    "harness": TaskReport(harness_sections, "Short context"),
}
"""By the field ``task`` of a cell, in the order of the page."""


def by_task(contents: Sequence[ResultFile]) -> Tasks:
    """For every task that the report shows, in the order of the page, its comparable cells."""
    chosen: dict[str, Cells] = {name: [] for name in REPORTS}
    for file in contents:
        for index, content in enumerate(file.results):
            place = (file.file, "results", index)
            task = read_as(CheckedCell, content, *place).task
            if task in chosen:
                cell = read_as(cell_type(task), content, *place)
                cell.file = file.file
                chosen[task].append(cell)
    return {name: comparable(cells) for name, cells in chosen.items() if cells}


def groups_of(tasks: Tasks) -> Iterator[tuple[str, Cells, str]]:
    """The groups of every task, by its name; and what they are called, if a task has several."""
    for name, groups in tasks.items():
        for number, group in enumerate(groups, 1):
            yield name, group, f"texts {number} of {len(groups)}" if len(groups) > 1 else ""


def printed_tables(cells: Sequence[Content]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of every table for the terminal, as text."""
    tables = []
    for name, group, called in groups_of(by_task(parsed([{"results": list(cells)}]))):
        for section in REPORTS[name].sections(group):
            if section.rows and section.is_printed:
                title = f"{section.title} ({called})" if called else section.title
                header = [str(entry) for entry in section.header]
                rows = [[str(entry) for entry in row] for row in section.rows]
                tables.append((title, header, rows))
    return tables
