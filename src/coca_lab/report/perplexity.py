"""Perplexity in the report: by window, by position and on key tokens."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from coca_lab.intervals import (
    FEW_DOCUMENTS,
    DocumentScore,
    paired_ratio_interval,
    perplexity,
)
from coca_lab.report.figures import INK, MARKERS, draw, turns
from coca_lab.report.lines import (
    DASHES,
    Cell,
    Lines,
    by_line,
    enumeration,
    line_key,
    line_label,
    signed,
    strict_minus_slack,
    times_trained,
)
from coca_lab.report.repeats import repeat_tables
from coca_lab.report.section import Entry, Section, Table

NAMED = 8
"""Models named after the first in a sentence."""


def perplexity_sections(cells: Sequence[Cell]) -> list[Section]:
    """Figure and table by window, positions, key tokens, and the forms."""
    lines = by_line(cells, "window")
    windows = _windows(lines)
    trained = _training_length(cells)
    header = [
        Entry(f"{window:,}", f"{window / trained:g} ×" if trained else "") for window in windows
    ]
    sections = [
        Section(
            "Perplexity against the length read at once",
            figure=_figure(lines, trained),
            note="Shaded: 95 % interval over documents, for the lines without scaling. "
            + "; ".join(_facts(cells))
            + ".",
        ),
        Section(
            "Perplexity by window",
            header=["Tokens read at once", *header],
            rows=_rows(lines, windows),
            muted=[i for i, key in enumerate(lines) if key[1] == "attend-last"],
            note="Bold: the lowest of a column. Below each figure its 95 % interval."
            + _about_context(cells)
            + (
                " A row “last n tokens only” shows the perplexity of the model without any text "
                "before these: long windows are useful only if they improve on it."
                if any(key[1] == "attend-last" for key in lines)
                else ""
            )
            + _about_few(cells),
        ),
    ]
    placed = [cell for cell in cells if cell.get("by_position")]
    for alike in _by_ranges(placed):
        header, rows = _position_table(alike)
        title = f"Perplexity by position, window {alike[0]['window']:,}"
        sections.append(Section(title, header=header, rows=rows))
    for alike in _by_key_tokens(cells):
        header, rows = key_table(alike)
        sections.append(
            Section(
                "Perplexity on key tokens",
                text="Tokens that an evaluator predicts from a long context only, after LongPPL.",
                header=header,
                rows=rows,
                note=f"{alike[0]['key_tokens']:,} tokens.",
            )
        )
    for header, rows in repeat_tables(cells):
        sections.append(
            Section(
                "Copied from far back, and the rest",
                text="Targets that end an n-gram which stands earlier in the document, but only "
                "farther back than the short context, and all others.",
                header=header,
                rows=rows,
            )
        )
    return sections + strict_minus_slack(
        cells, "perplexity", "window", "Strict minus slack: perplexity"
    )


def perplexity_facts(cell: Cell) -> dict[str, Any]:
    """What a perplexity depends on: the documents, the tokens scored of each, the stride."""
    facts = {name: cell[name] for name in ("targets", "text") if cell.get(name) is not None}
    facts["documents"] = [(d["id"], d["tokens"]) for d in cell.get("documents", [])]
    if cell.get("scaling") != "attend-last":  # has a stride of its own
        facts["stride"] = cell.get("stride")
    return facts


def perplexity_tables(cells: Sequence[Cell]) -> list[Table]:
    """Perplexity by window, and on key tokens, for the terminal."""
    lines = by_line(cells, "window")
    windows = _windows(lines)
    rows = []
    for key, line in lines.items():
        found = [_at(line, window) for window in windows]
        values = ["–" if cell is None else f"{_value(cell):.1f}" for cell in found]
        rows.append([line_label(key), *values])
    tables: list[Table] = [(["perplexity at", *(f"{window:,}" for window in windows)], rows)]
    once = [cell for cell in cells if cell.get("targets") == "one-pass" and "by_position" in cell]
    tables += [_position_table(cells) for cells in _by_ranges(once)]
    tables += [key_table(alike) for alike in _by_key_tokens(cells)]
    tables += repeat_tables(cells)
    few = _about_few(cells)
    return [*tables, ([few.strip()], [])] if few else tables


def perplexity_findings(cells: Sequence[Cell]) -> list[str]:
    """Who is lowest, then the others; and long windows against the last tokens alone."""
    lines = by_line(cells, "window")
    plain = {key: line for key, line in lines.items() if key[1] != "attend-last"}
    if not plain:
        return []
    windows = _windows(lines)
    sentences = [_ranking(plain, window) for window in dict.fromkeys((windows[0], windows[-1]))]
    longest = windows[-1]
    alone = [(key[0], line) for key, line in lines.items() if key[1] == "attend-last"]
    improved = []
    for model, line in alone:
        last, cell = next(iter(line.items()))
        better = [
            line_label(key)
            for key, other in lines.items()
            if key[0] == model and key[1] != "attend-last" and longest in other
            if _value(other[longest]) < _value(cell)
        ]
        if better:
            improved.append(
                f"At {longest:,} tokens the perplexity of {enumeration(better)} is lower than "
                f"with the last {last} tokens only."
            )
    if alone and not improved:
        improved = [
            f"At {longest:,} tokens no model has a lower perplexity than with its last tokens "
            "only: none of them benefits from the longest window yet."
        ]
    return sentences + improved


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


def _about_context(cells: Sequence[Cell]) -> str:
    """How many tokens the targets of a column have before them; empty where strides differ."""
    plain = [cell for cell in cells if cell["scaling"] != "attend-last"]
    if {cell["targets"] for cell in plain} != {"shared"}:
        return ""
    strides, window = {cell["stride"] for cell in plain}, min(cell["window"] for cell in plain)
    if len(strides) > 1:
        return ""
    stride = strides.pop()
    return (
        f" Windows move by {stride:,} tokens: a target in column W has W − {stride - 1:,} to W "
        f"tokens before it, at {window:,} tokens {window - stride + 1:,} to {window:,}."
    )


def _about_few(cells: Sequence[Cell]) -> str:
    """A warning where intervals are over few documents; else empty."""
    count = min(len(cell["documents"]) for cell in cells)
    if count >= FEW_DOCUMENTS:
        return ""
    plural = "" if count == 1 else "s"
    return (
        f" {count} document{plural}: below {FEW_DOCUMENTS}, one unusual document "
        "makes intervals unreliable."
    )


def _by_ranges(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells of one window and the same ranges of positions each, the smallest window first."""
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        ranges = tuple((each["first"], each["last"]) for each in cell["by_position"])
        groups.setdefault((cell["window"], ranges), []).append(cell)
    return [groups[key] for key in sorted(groups)]


def _by_key_tokens(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells with the same key tokens each; older results say their number alone."""
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        if cell.get("key_tokens"):
            chosen = cell["key_tokens"], tuple(cell.get("keys") or ())
            groups.setdefault(chosen, []).append(cell)
    return list(groups.values())


def _position_table(cells: Sequence[Cell]) -> Table:
    """Perplexity by the number of tokens read before, for cells of one window."""
    rows = []
    for cell in cells:
        entries = [
            "–"
            if b["nats"] is None or not b["tokens"]
            else f"{perplexity([DocumentScore('', b['nats'], b['tokens'])]):.1f}"
            for b in cell["by_position"]
        ]
        rows.append([line_label(line_key(cell)), *entries])
    ranges = [f"{b['first']:,} to {b['last']:,}" for b in cells[0]["by_position"]]
    return ["tokens read before", *ranges], rows


def _training_length(cells: Sequence[Cell]) -> int | None:
    """The training length, if all models share one."""
    lengths = {cell.get("training_length") for cell in cells}
    return lengths.pop() if len(lengths) == 1 else None


def _windows(lines: Lines) -> list[int]:
    """Window sizes of the table's columns."""
    return sorted({w for key, line in lines.items() if key[1] != "attend-last" for w in line})


def _at(line: dict[int, Cell], window: int) -> Cell | None:
    """The cell of a window; the one of attend-last applies to every window."""
    only = next(iter(line.values()))
    return only if only["scaling"] == "attend-last" else line.get(window)


def _value(cell: Cell) -> float:
    return math.inf if cell["perplexity"] is None else cell["perplexity"]


def _ranking(lines: Lines, window: int) -> str:
    """The best line of every model at a window, the lowest first, and how far others are above."""
    best: dict[str, tuple[str, Cell]] = {}
    for key, line in lines.items():
        if window not in line:
            continue
        _, cell = best.setdefault(key[0], (line_label(key), line[window]))
        # As shown: at its training length, scaling does not make a model better.
        if _value(line[window]) < _value(cell) and _shown(line[window]) != _shown(cell):
            best[key[0]] = line_label(key), line[window]
    (name, first), *others = sorted(best.values(), key=lambda found: _value(found[1]))
    where = f"At {window:,} tokens{times_trained(lines, window)}"
    if not math.isfinite(_value(first)):
        return f"{where} no model has a finite perplexity."
    if not others:
        return f"{where} {name} has a perplexity of {_shown(first)}."
    changes = [_change(cell, first) for _, cell in others]
    rest = [
        f"{label} {_shown(cell)}{change}"
        for (label, cell), change in zip(others, changes, strict=True)
    ]
    if len(rest) > NAMED:
        rest[NAMED:] = [f"{len(rest) - NAMED} more up to {_shown(others[-1][1])}"]
    intervals = ", with 95 % intervals of the difference" if ";" in changes[0] else ""
    return (
        f"{where} {name} has the lowest perplexity, {_shown(first)}. The others{intervals}: "
        f"{'; '.join(rest)}."
    )


def _change(mine: Cell, best: Cell) -> str:
    a, b = _value(mine), _value(best)
    if not math.isfinite(a):
        return ""
    return f" ({signed(a / b - 1, '.1%')}{_paired(mine, best)})"


def _paired(mine: Cell, theirs: Cell) -> str:
    """The 95 % interval of a change over paired documents; empty if the documents differ."""
    first, second = (
        [
            DocumentScore(d["id"], math.inf if d["nats"] is None else d["nats"], d["tokens"])
            for d in cell["documents"]
        ]
        for cell in (mine, theirs)
    )
    try:
        interval = paired_ratio_interval(first, second)
    except ValueError:
        return ""
    if interval is None:
        return ""
    low, high = (signed(end - 1, ".1%") for end in interval)
    return f"; {low} to {high}"


def _rows(lines: Lines, windows: Sequence[int]) -> list[list[str | Entry]]:
    """Perplexity with its interval; bold: lowest of a column, unless all or only one are shown."""
    rows: list[list[str | Entry]] = [[line_label(key)] for key, line in lines.items()]
    for window in windows:
        found = [_at(line, window) for line in lines.values()]
        competing = [c for c in found if c is not None and c["scaling"] != "attend-last"]
        # As shown: a difference that is not shown is none.
        shown = {_shown(cell): _value(cell) for cell in competing}
        best = min(shown, key=lambda text: shown[text]) if len(shown) > 1 else None
        for cell, row in zip(found, rows, strict=True):
            if cell is None:
                row.append("–")
                continue
            interval = " to ".join(map(_number, cell.get("ci95") or ()))
            bold = cell["scaling"] != "attend-last" and _shown(cell) == best
            row.append(Entry(_shown(cell), interval, bold))
    return rows


def _shown(cell: Cell) -> str:
    return _number(_value(cell))


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "inf"
    return f"{value:.2f}" if value < 100 else f"{value:,.1f}" if value < 10000 else f"{value:.3g}"


def _facts(cells: Sequence[Cell]) -> list[str]:
    """Stride, targets, tokens and documents: a value where all cells agree, else the range."""
    facts = []
    plain = [cell for cell in cells if cell["scaling"] != "attend-last"]
    for name, words in (
        ("targets", "Targets: {}"),
        ("stride", "stride: {} tokens"),
        ("tokens", "tokens scored at every window: {:,}"),
    ):
        values = list(dict.fromkeys(cell[name] for cell in plain))
        if len(values) == 1:
            facts.append(words.format(values[0]))
        elif name == "targets":
            facts.append(f"Targets: {' and '.join(values)}")
        elif values:
            facts.append(f"{name}: {min(values):,} to {max(values):,}")
    counts = {len(cell["documents"]) for cell in cells}
    if len(counts) == 1:
        names = [str(document["id"]) for document in cells[0]["documents"]]
        first = ", ".join([*names[:3], *(["…"] if len(names) > 3 else [])])
        named = "" if names[0].isdigit() else f" ({first})"
        facts.append(f"documents: {counts.pop()}{named}")
    return facts


def _figure(lines: Lines, training_length: int | None) -> dict[str, str]:
    """Perplexity against the tokens read at once (the paper's Figure 1), with 95 % bands."""
    windows = _windows(lines)
    looks = turns(model for model, _, _ in lines)

    def plot(axes: Axes) -> None:
        for key, line in lines.items():
            model, kind, _ = key
            colour, turn = looks[model]
            style: dict[str, Any] = {"color": colour, "ls": DASHES[kind]}
            style["label"] = line_label(key)
            values = [_value(cell) for cell in line.values()]
            if kind == "attend-last":
                axes.plot([windows[0], windows[-1]], 2 * values, lw=1.2, **style)
                continue
            marker = MARKERS[turn % len(MARKERS)]
            axes.plot(list(line), values, marker=marker, ms=4, lw=1.8, **style)
            intervals = [cell.get("ci95") for cell in line.values()]
            if kind == "none" and all(intervals):
                low, high = zip(*intervals, strict=True)
                axes.fill_between(list(line), low, high, color=colour, alpha=0.08, lw=0)
        if training_length is not None:
            axes.axvline(training_length, color=INK, lw=1, ls=(0, (1, 2)))
            axes.annotate(
                "training length",
                (training_length, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(4, -4),
                textcoords="offset points",
                va="top",
                fontsize=8,
                color=INK,
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
