"""Perplexity in the report: by window, by position and on key tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from coca_attention.errors import UserError
from coca_attention.intervals import DocumentScore, paired_ratio_interval
from coca_attention.report import paper
from coca_attention.report.figures import colours, draw
from coca_attention.report.lines import (
    DASHES,
    Cell,
    Key,
    line_key,
    line_label,
    signed,
    strict_minus_slack,
)
from coca_attention.report.section import Entry, Section, Table

BASELINES = ("rope", "alibi", None)
"""What cells call attention that is not CoCA."""


@dataclass(frozen=True)
class Point:
    """Perplexity at one window; ``low`` and ``high`` are the ends of the 95 % interval."""

    window: int
    perplexity: float
    low: float | None
    high: float | None
    documents: tuple[DocumentScore, ...] = ()


@dataclass(frozen=True)
class Series:
    """One line of the figure and one row of the table.

    ``kind`` is the scaling; ``attend-last`` has a single point, which applies to every window.
    """

    model: str
    attention: str | None
    kind: str
    label: str
    points: tuple[Point, ...]

    def at(self, window: int) -> Point | None:
        """The point of a window."""
        if self.kind == "attend-last":
            return self.points[0]
        return next((p for p in self.points if p.window == window), None)


def perplexity_series(cells: Sequence[Cell]) -> list[Series]:
    """Lines of perplexity against the window; models in the order of their first appearance.

    Raises:
        UserError: If two different cells have the same line and window.
    """
    grouped: dict[Key, list[Cell]] = {}
    for cell in cells:
        group = grouped.setdefault(line_key(cell), [])
        # Two evaluations of a model share the cell of attend-last.
        if not any(_same(cell, other) for other in group):
            group.append(cell)
    models = list(dict.fromkeys(model for model, _, _ in grouped))
    series = []
    for key, group in grouped.items():
        model, kind, _ = key
        windows = [cell["window"] for cell in group]
        if len(set(windows)) < len(windows):
            raise UserError(
                f"the results hold {model} ({kind}) at one window twice; give result files of "
                "different models or settings"
            )
        label = line_label(key) if kind != "attend-last" else f"{model}, {_last(windows[0])}"
        points = tuple(_point(cell) for cell in sorted(group, key=lambda cell: cell["window"]))
        series.append(Series(model, group[0]["attention"], kind, label, points))
    return sorted(
        series, key=lambda item: (models.index(item.model), list(DASHES).index(item.kind))
    )


def perplexity_sections(cells: Sequence[Cell]) -> list[Section]:
    """Figure and table by window, the paper's figures, positions, key tokens, and the forms."""
    series = perplexity_series(cells)
    windows = all_windows(series)
    trained = _training_length(cells)
    header = [
        Entry(f"{window:,}", f"{window / trained:g} ×" if trained else "") for window in windows
    ]
    sections = [
        Section(
            "Perplexity against the length read at once",
            figure=_figure(series, trained),
            note="Shaded: 95 % bootstrap interval over documents, for the lines without scaling. "
            + "; ".join(_facts(cells))
            + ".",
        ),
        Section(
            "Perplexity by window",
            header=["Tokens read at once", *header],
            rows=_rows(series, windows),
            muted=[i for i, item in enumerate(series) if item.kind == "attend-last"],
            note="Bold: the lowest of a column. Below each figure its 95 % interval. A row “last n "
            "tokens only” shows the perplexity of the model without any text before these: long "
            "windows are useful only if they improve on it.",
        ),
        Section(
            "The paper’s figures (its Table 1, training from scratch)",
            header=["Tokens read at once", *(f"{window:,}" for window in paper.TABLE_1_WINDOWS)],
            rows=[[label, *values] for label, values in paper.TABLE_1.items()],
            note="350 million parameters, 50 billion tokens, training length 512, 100 documents of "
            "PG-19, stride 512 (arXiv 2309.08646). Model sizes and texts differ: compare the "
            "shapes, not the numbers.",
        ),
    ]
    placed = [cell for cell in cells if cell.get("by_position")]
    for window in sorted({cell["window"] for cell in placed}):
        sections.append(_position_section([c for c in placed if c["window"] == window]))
    keyed = [cell for cell in cells if cell.get("key_tokens")]
    if keyed:
        header, rows = key_table(keyed)
        sections.append(
            Section(
                "Perplexity on key tokens",
                text="Tokens that an evaluator predicts from a long context only, after LongPPL.",
                header=header,
                rows=rows,
                note=f"{keyed[0]['key_tokens']:,} tokens.",
            )
        )
    return sections + strict_minus_slack(
        cells, "perplexity", "window", "Strict minus slack: perplexity", paper.TABLE_3_PERPLEXITY
    )


def perplexity_tables(cells: Sequence[Cell]) -> list[Table]:
    """Perplexity by window, and on key tokens, for the terminal."""
    series = perplexity_series(cells)
    windows = all_windows(series)
    rows = []
    for item in series:
        points = [item.at(window) for window in windows]
        rows.append([item.label, *(f"{p.perplexity:.1f}" if p else "–" for p in points)])
    tables: list[Table] = [(["perplexity at", *(f"{window:,}" for window in windows)], rows)]
    keyed = [cell for cell in cells if cell.get("key_tokens")]
    return tables + ([key_table(keyed)] if keyed else [])


def perplexity_findings(cells: Sequence[Cell]) -> list[str]:
    """CoCA against the first rotary model, and long windows against the last tokens alone."""
    series = perplexity_series(cells)
    trained = _training_length(cells)
    plain = [item for item in series if item.kind == "none"]
    base = next((item for item in plain if item.attention == "rope"), None)
    if base is None:
        return []
    sentences = []
    for item in plain:
        shared = [p.window for p in base.points if item.at(p.window)]
        if item.attention in BASELINES or not shared:
            continue
        first, last = shared[0], shared[-1]
        sentences.append(
            f"{item.model} against {base.model}: {_change(item, base, first)} at {first:,} tokens, "
            f"{_change(item, base, last)} at {last:,}"
            + (f" ({last / trained:g} × the training length)" if trained else "")
            + "."
        )
    longest = all_windows(series)[-1]
    alone = [item for item in series if item.kind == "attend-last"]
    improved = []
    for item in alone:
        better = [
            other.label
            for other in series
            if other.kind != "attend-last"
            and other.model == item.model
            and (point := other.at(longest)) is not None
            and point.perplexity < item.points[0].perplexity
        ]
        if better:
            improved.append(
                f"At {longest:,} tokens the perplexity of {' and '.join(better)} is lower than "
                f"with the {_last(item.points[0].window)}."
            )
    if alone and not improved:
        improved = [
            f"At {longest:,} tokens no model has a lower perplexity than with its last tokens "
            "only: none of them benefits from the longest window yet."
        ]
    return sentences + improved


def all_windows(series: Sequence[Series]) -> list[int]:
    """Window sizes of the table's columns."""
    return sorted({p.window for s in series if s.kind != "attend-last" for p in s.points})


def key_table(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Perplexity on key tokens: one row per model and scaling, one column per window."""
    found = {
        (line_key(cell), cell["window"]): cell["key_perplexity"]
        for cell in cells
        if cell["scaling"] != "attend-last"
    }
    windows = sorted({window for _, window in found})
    rows = []
    for key in dict.fromkeys(key for key, _ in found):
        values = [found.get((key, window)) for window in windows]
        rows.append([line_label(key), *("–" if v is None else f"{v:.1f}" for v in values)])
    return ["key tokens: perplexity at", *(f"{window:,}" for window in windows)], rows


def _position_section(cells: Sequence[Cell]) -> Section:
    """Perplexity by the number of tokens read before, for cells of one window."""
    rows = []
    for cell in cells:
        means = [
            None if b["nats"] is None or not b["tokens"] else b["nats"] / b["tokens"]
            for b in cell["by_position"]
        ]
        entries = ["–" if mean is None else f"{math.exp(mean):.1f}" for mean in means]
        rows.append([line_label(line_key(cell)), *entries])
    ranges = [f"{b['first']:,} to {b['last']:,}" for b in cells[0]["by_position"]]
    return Section(
        f"Perplexity by position, window {cells[0]['window']:,}",
        header=["tokens read before", *ranges],
        rows=rows,
    )


def _training_length(cells: Sequence[Cell]) -> int | None:
    """The training length, if all models share one."""
    lengths = {cell.get("training_length") for cell in cells}
    return lengths.pop() if len(lengths) == 1 else None


def _same(cell: Cell, other: Cell) -> bool:
    """Whether two cells are of the same measurement with the same result."""
    names = ("window", "stride", "targets", "documents")
    return all(cell[name] == other[name] for name in names)


def _point(cell: Cell) -> Point:
    low, high = cell.get("ci95") or (None, None)
    documents = tuple(
        DocumentScore(d["id"], math.inf if d["nats"] is None else d["nats"], d["tokens"])
        for d in cell["documents"]
    )
    value = math.inf if cell["perplexity"] is None else cell["perplexity"]
    return Point(cell["window"], value, low, high, documents)


def _last(window: int) -> str:
    return f"last {window} tokens only"


def _change(item: Series, base: Series, window: int) -> str:
    mine, theirs = item.at(window), base.at(window)
    assert mine is not None and theirs is not None
    values = f"perplexity {mine.perplexity:.1f} against {theirs.perplexity:.1f}"
    if not math.isfinite(mine.perplexity) or not math.isfinite(theirs.perplexity):
        return values
    change = mine.perplexity / theirs.perplexity - 1
    word = "higher" if change >= 0 else "lower"
    return f"{values} ({abs(change):.1%} {word}{_paired(mine, theirs)})"


def _paired(mine: Point, theirs: Point) -> str:
    """The 95 % interval of a change over paired documents; empty if the documents differ."""
    try:
        interval = paired_ratio_interval(mine.documents, theirs.documents, seed=0)
    except ValueError:
        return ""
    if interval is None:
        return ""
    low, high = (signed(end - 1, ".1%") for end in interval)
    return f"; 95 % interval {low} to {high}"


def _rows(series: Sequence[Series], windows: Sequence[int]) -> list[list[str | Entry]]:
    """Perplexity with its interval; the lowest of a column, attend-last aside, is bold."""
    rows: list[list[str | Entry]] = [[item.label] for item in series]
    for window in windows:
        points = [item.at(window) for item in series]
        best = min(
            point.perplexity
            for item, point in zip(series, points, strict=True)
            if point is not None and item.kind != "attend-last"
        )
        for item, point, row in zip(series, points, rows, strict=True):
            if point is None:
                row.append("–")
                continue
            interval = ""
            if point.low is not None and point.high is not None:
                interval = f"{_number(point.low)} to {_number(point.high)}"
            bold = item.kind != "attend-last" and point.perplexity == best
            row.append(Entry(_number(point.perplexity), interval, bold))
    return rows


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "inf"
    return f"{value:.2f}" if value < 100 else f"{value:,.1f}" if value < 10000 else f"{value:.3g}"


def _facts(cells: Sequence[Cell]) -> list[str]:
    """Stride, targets, tokens and documents: a value where all cells agree, else the range."""
    facts = []
    plain = [cell for cell in cells if cell["scaling"] != "attend-last"]
    for name, words in (
        ("targets", "targets: {}"),
        ("stride", "stride: {} tokens"),
        ("tokens", "tokens scored at every window: {:,}"),
        ("seed", "seed of the bootstrap: {}"),
    ):
        values = list(dict.fromkeys(cell[name] for cell in plain))
        if len(values) == 1:
            facts.append(words.format(values[0]))
        elif name == "targets":
            facts.append(f"targets: {' and '.join(values)}")
        elif values:
            facts.append(f"{name}: {min(values):,} to {max(values):,}")
    counts = {len(cell["documents"]) for cell in cells}
    if len(counts) == 1:
        facts.append(f"documents: {counts.pop()}")
    return facts


def _figure(series: Sequence[Series], training_length: int | None) -> dict[str, str]:
    """Perplexity against the tokens read at once (the paper's Figure 1), with 95 % bands."""
    windows = all_windows(series)
    colour = colours(item.model for item in series)

    def plot(axes: Axes) -> None:
        for item in series:
            style: dict[str, Any] = {
                "label": item.label,
                "color": colour[item.model],
                "ls": DASHES[item.kind],
            }
            if item.kind == "attend-last":
                value = item.points[0].perplexity
                axes.plot([windows[0], windows[-1]], [value, value], lw=1.2, **style)
                continue
            x = [point.window for point in item.points]
            y = [point.perplexity for point in item.points]
            axes.plot(x, y, marker="o", ms=4, lw=1.8, **style)
            if item.kind == "none" and all(point.low is not None for point in item.points):
                low = [point.low or 0.0 for point in item.points]
                high = [point.high or 0.0 for point in item.points]
                axes.fill_between(x, low, high, color=colour[item.model], alpha=0.08, lw=0)
        if training_length is not None:
            axes.axvline(training_length, color="#444444", lw=1, ls=(0, (1, 2)))
            axes.annotate(
                "training length",
                (training_length, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(4, -4),
                textcoords="offset points",
                va="top",
                fontsize=8,
                color="#444444",
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(windows, [f"{window:,}" for window in windows])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        low, high = axes.get_ylim()
        if high / low > 20:
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="y", which="minor", labelsize=8)
        axes.set_xlabel("window: tokens read at once")
        axes.set_ylabel("perplexity (lower is better)")

    return draw("perplexity", plot)
