"""Figures against the length read: points → frame → a chart, a table and a caption.

A frame has a row for every line and length, with the columns of a chart's points: ``line`` (the
name), ``x`` (tokens), ``y`` (the figure), ``low`` and ``high``; and ``model``, ``scaling``,
``kind``, ``size``, ``seeds``, ``few`` (documents, too few for an interval), ``cell`` and
``scores``.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from coca_attention.errors import UserError
from coca_lab.cells import ATTEND_LAST, Figure
from coca_lab.intervals import (
    FEWEST_DOCUMENTS,
    DocumentScore,
    differences,
    mean_nats,
    nats_interval,
    scored_documents,
)
from coca_lab.report.charts import MOST, Frame, LineChart
from coca_lab.report.section import TOO_FEW, Entry, Section, more_or_fewer, number

SCALING_NAMES = {
    "none": "",
    "ntk": "NTK",
    "ntk_text": "NTK",
    "dynamic": "dynamic NTK",
    "linear": "PI",
    "yarn": "YaRN",
}
"""In the order of a page."""
ALONE = "last "
"""So begins the scaling of needles in the last tokens alone."""
Scores = Sequence[DocumentScore]


@dataclass(frozen=True)
class Point:
    """A figure of a cell.

    Attributes:
        cell: The cell.
        x: Tokens.
        y: The figure, None where it overflowed.
        interval: Ends of its interval.
        kind: What sets it apart from other figures of the task; each kind has its own chart.
        scores: Of the documents, for paired differences.
    """

    cell: Figure
    x: int
    y: float | None
    interval: Sequence[float] | None = None
    kind: str = ""
    scores: Scores = ()


@dataclass(frozen=True)
class Measure:
    """What the figures of a task are.

    Attributes:
        title: Heading of its section.
        name: Of the figure, as in a sentence.
        x: What the length is.
        form: A figure as text; shares are in percent, as on their axes.
        shares: Whether they are shares, of which the largest is best; otherwise the lowest is.
        ratios: Whether figures are compared by their ratio, as perplexities are, and not by their
            difference; the mean of seeds is then the geometric one.
        digits: Whether they are nats a digit, beside which tables have the digit's probability.
    """

    title: str
    name: str
    x: str
    form: Callable[[float], str] = "{:.0%}".format
    shares: bool = False
    ratios: bool = False
    digits: bool = False


PERPLEXITY = Measure(
    "Perplexity against the length read at once",
    "perplexity",
    x="tokens read at once",
    form=number,
    ratios=True,
)
PASSKEYS = Measure(
    "Passkeys found, by prompt length",
    "share of passkeys found",
    x="prompt length in tokens",
    shares=True,
)
RULER = Measure("RULER", "RULER score", x="tokens of prompt and answer", shares=True)
NEEDLES = Measure(
    "Needles by log probability",
    "nats a digit",
    x="tokens of the text",
    form="{:.2f}".format,
    digits=True,
)


def line_label(cell: Figure, x: int) -> str:
    """The name of the line that a cell belongs to."""
    if cell.scaling == "none":
        return cell.model
    if cell.scaling == ATTEND_LAST:
        return f"{cell.model}, the last {x:,} tokens alone"
    if cell.scaling.startswith(ALONE):
        return f"{cell.model}, the {cell.scaling}"
    reach = f" to {round(cell.factor, 2):g} L" if cell.factor else ""
    # The length that the caption calls L is not said again.
    name, _, given = cell.scaling.partition(" (")
    options = given.removesuffix(")").split(", ")
    said = ", ".join(each for each in options if each != f"length={cell.training_length}")
    method = SCALING_NAMES.get(name, name) + (f" ({said})" if said else "")
    return f"{cell.model} + {method}{reach}"


def frame_of(points: Sequence[Point], measure: Measure) -> Frame:
    """A frame, in the order of the page: the last tokens alone at every length, means of seeds."""
    lengths = sorted({point.x for point in points if point.cell.scaling != ATTEND_LAST})
    rows = []
    for point in points:
        cell = point.cell
        last = cell.scaling == ATTEND_LAST
        low, high = point.interval or (math.nan, math.nan)
        few = 1 < scored_documents(point.scores) < FEWEST_DOCUMENTS
        if few:
            low = high = math.nan
        row = {
            "line": line_label(cell, point.x),
            "model": cell.model,
            "scaling": cell.scaling,
            "kind": point.kind,
            "size": cell.size,
            "seed": cell.training_seed,
            "y": math.inf if point.y is None else point.y,
            "low": low,
            "high": high,
            "few": few,
            "cell": cell,
            "scores": point.scores,
        }
        everywhere = lengths if last and lengths else [point.x]
        rows += [row | {"x": x} for x in everywhere]
    frame: Frame = pd.DataFrame(rows)
    others = (each for each in frame["scaling"].unique() if each != ATTEND_LAST)
    scalings = [*SCALING_NAMES, *others, ATTEND_LAST]
    scaling = frame["scaling"].map(scalings.index)
    model, _ = frame["model"].factorize()
    line, _ = frame["line"].factorize()
    ordered = frame.iloc[np.lexsort((frame["x"], line, scaling, model))]
    return _one_a_place(ordered, geometric=measure.ratios)


def _one_a_place(frame: Frame, geometric: bool) -> Frame:
    """A row for every line and length: the mean of its seeds, with their range as interval."""
    place = ["size", "kind", "line", "x"]
    seeds = frame.groupby(place)["seed"].nunique().rename("seeds")
    first = frame.drop_duplicates(place).join(seeds, on=place)
    once = frame.merge(first.loc[first["seeds"] < 2, [*place, "y", "cell"]], on=place)
    # Two evaluations of a model can share a cell, such as that of the last tokens.
    for row in once[once["y_x"] != once["y_y"]].itertuples():
        files = " and ".join(dict.fromkeys([row.cell_y.file, row.cell_x.file])) or "the results"
        raise UserError(
            f"{files}: two different figures of {row.model} ({row.scaling}) at {row.x} tokens: "
            "give one of them, or name a model otherwise by coca eval --name"
        )
    several = frame.join(seeds, on=place).query("seeds > 1").groupby(place)["y"]
    first = first.set_index(place)
    mean = _geometric_mean if geometric else "mean"
    first.update(several.agg(y=mean, low="min", high="max"))
    return first.reset_index()


def _geometric_mean(values: Frame) -> float:
    """Of perplexities: the exponential of the mean log perplexity."""
    return float(np.exp(np.log(values.astype(float)).mean()))


def length_sections(frame: Frame, measure: Measure, caption: str) -> list[Section]:
    """A section for every kind and size of figures."""
    sections = []
    for (kind, size), part in frame.groupby(["kind", "size"], sort=False):
        title = ", ".join(filter(None, (measure.title, kind, size)))
        sections.append(length_section(part, measure, title, caption))
    return sections


def length_section(frame: Frame, measure: Measure, title: str, caption: str) -> Section:
    """The section of a frame whose lines have one figure a length."""
    lengths = sorted(frame["x"].unique().tolist())
    trained = trained_length(frame)
    paired = _paired_column(frame, measure)
    chart = LineChart(
        frame,
        measure.x,
        measure.name if measure.shares else f"{measure.name} (lower is better)",
        ticks=lengths,
        shares=measure.shares,
        mark=(trained, "training context") if trained else None,
        # Beside paired differences, intervals over documents say less of which line is lower.
        bars=paired is None,
    )
    beside = " (probability)" if measure.digits else ""
    header: list[str | Entry] = [f"{measure.name}{beside} at"]
    for length in lengths:
        multiple = ""
        if trained and length >= trained:
            multiple = f"{length / trained:,.4g} L"
        elif trained:
            multiple = f"{length / trained:.2g} L"
        header.append(Entry(f"{length:,}", multiple))
    entries = _entries(frame, measure)
    rows: list[list[str | Entry]] = []
    for line in frame["line"].unique():
        rows.append([line, *(entries.get((line, length), "–") for length in lengths)])
    if paired is not None:
        name, by_line = paired
        header.append(name)
        rows = [[*row, by_line.get(str(row[0]), "–")] for row in rows]
        caption += (
            " Last column: over the same documents, with paired 95% intervals; those that have "
            f"{1 if measure.ratios else 'fewer and more nats'} show no difference."
        )
    if trained:
        caption += f" L: the training context, {trained:,} tokens."
    drawn = chart.drawn()["line"].nunique()
    if len(lengths) > 1 and drawn == MOST and drawn < len(rows):
        caption += f" The chart has {drawn} of {len(rows)} lines."
    return Section(title, chart=chart, header=header, rows=rows, note=caption.strip())


def _entries(frame: Frame, measure: Measure) -> dict[tuple[str, int], Entry]:
    """By line and length, the figure with its interval; the best of unlike ones is bold."""
    figures = frame.groupby("x")["y"]
    best = figures.agg("max" if measure.shares else "min").map(measure.form)
    worst = figures.agg("min" if measure.shares else "max").map(measure.form)
    entries = {}
    for row in frame.itertuples():
        shown = measure.form(row.y)
        interval = ""
        if not math.isnan(row.low):
            interval = f"{measure.form(row.low)} to {measure.form(row.high)}"
        elif row.few:
            interval = TOO_FEW
        bold = shown == best[row.x] and shown != worst[row.x]
        beside = f" ({math.exp(-row.y):.0%})" if measure.digits else ""
        entries[row.line, row.x] = Entry(f"{shown}{beside}", interval, bold)
    return entries


def _paired_column(frame: Frame, measure: Measure) -> tuple[str, dict[str, str | Entry]] | None:
    """Header, and by line, its figure against the best one of the longest length.

    None unless two lines read the same documents there.
    """
    known = frame[(frame["seeds"] < 2) & (frame["scores"].map(len) > 1)]
    full = known[(known["scaling"] != ATTEND_LAST) & np.isfinite(known["y"].astype(float))]
    if full.empty:
        return None
    longest = full["x"].max()
    far = full[full["x"] == longest]
    base = far.loc[far["y"].idxmin()]
    found: dict[str, str | Entry] = {}
    for row in known[known["x"] == longest].itertuples():
        documents = [(score.id, score.tokens) for score in row.scores]
        if documents == [(score.id, score.tokens) for score in base["scores"]]:
            found[row.line] = paired_difference(row.scores, base["scores"], measure.ratios)
    if len(found) < 2:
        return None
    found[base["line"]] = ""
    return f"against {base['line']} at {longest:,}", found


def paired_difference(mine: Scores, theirs: Scores, ratios: bool) -> str | Entry:
    """How much worse the first is on the same documents, and whether the interval allows none.

    What differs by less than is written, as by rounding, is the same.
    """
    between = differences(mine, theirs)
    interval = nats_interval(between)
    mean = mean_nats(between)
    if interval is None or not math.isfinite(mean):
        return "–"
    low, high = interval
    if ratios:
        ratio, least, most = np.exp(np.clip([mean, low, high], -700, 700))
        form = ".3f" if most < 100 else ".4g"
        shown = f"{ratio:{form}} ×"
        first = f"{least:{form}}"
        last = f"{most:{form}}"
    else:
        shown = more_or_fewer(mean)
        first = more_or_fewer(low)
        last = more_or_fewer(high)
    if scored_documents(between) < FEWEST_DOCUMENTS:
        return Entry(shown, TOO_FEW)
    if low <= 0 <= high:
        shown = "the same" if first == last else f"{shown}, no difference shown"
    for word in (" more", " fewer"):
        if last.endswith(word):  # is said once of both ends
            first = first.removesuffix(word)
    return Entry(shown, f"{first} to {last}")


def trained_length(frame: Frame) -> int | None:
    """The training length, if all models share one."""
    lengths = {cell.training_length for cell in frame["cell"]}
    return lengths.pop() if len(lengths) == 1 else None


def ends(values: Iterable[int]) -> str:
    """The smallest and the largest number: "8 to 16", or one if they are equal."""
    every = sorted(set(values))
    if len(every) < 2:
        return "".join(f"{value:,}" for value in every)
    return f"{every[0]:,} to {every[-1]:,}"
