"""Perplexity in the report: by window, by position, and of what is copied from far back."""

import math
from collections.abc import Sequence
from typing import Any

from coca_lab.intervals import FEW_DOCUMENTS, DocumentScore, paired_ratio_interval, perplexity
from coca_lab.report.charts import Ends, Line, LineChart
from coca_lab.report.lines import (
    DASHES,
    Lines,
    by_line,
    curves,
    line_key,
    line_label,
    strict_minus_slack,
    times_trained,
    training_length,
)
from coca_lab.report.results import Cell
from coca_lab.report.section import Entry, Section, Table, enumeration, number, signed

NAMED = 8
"""Models named after the first in a sentence."""


def perplexity_sections(cells: Sequence[Cell]) -> list[Section]:
    """By window, paired differences, positions, copies, and the forms."""
    lines = by_line(cells, "window")
    trained, windows = training_length(lines), _windows(lines)
    columns = [Entry(f"{w:,}", f"{w / trained:g} ×" if trained else "") for w in windows]
    short = any(key[1] == "attend-last" for key in lines)
    chart = LineChart(
        _curves(lines, windows),
        f"window: tokens read at once{' (dotted: the last ones only)' if short else ''}",
        "perplexity (lower is better)",
        ticks=windows,
        log_y=True,
        mark=(trained, "training length") if trained else None,
        bars=False,  # paired differences have far narrower intervals
    )
    sections = [
        Section(
            "Perplexity against the length read at once",
            lead=_lead(_plain(lines)),
            text=" ".join(perplexity_findings(cells)),
            chart=chart,
            header=["Tokens read at once", *columns],
            rows=_rows(lines, windows),
            muted=[i for i, key in enumerate(lines) if key[1] == "attend-last"],
            note=_note(cells, several=len(lines) > 1, short=short),
        ),
        *_differences(lines),
    ]
    for alike in _by_ranges([cell for cell in cells if cell.get("by_position")]):
        header, rows = _position_table(alike)
        title = f"Perplexity by position, window {alike[0]['window']:,}"
        sections.append(Section(title, header=header, rows=rows))
    text = (
        "Targets that end an n-gram which stands earlier in the document, but only farther back "
        "than the short context, and all others."
    )
    title = "Copied from far back, and the rest"
    sections += [Section(title, "", text, None, *table) for table in repeat_tables(cells)]
    title = "Strict minus slack: perplexity"
    return sections + strict_minus_slack(cells, "perplexity", "window", title)


def perplexity_facts(cell: Cell) -> dict[str, Any]:
    """What a perplexity depends on: the documents, the tokens scored of each, the stride."""
    facts = {name: cell[name] for name in ("targets", "text") if cell.get(name) is not None}
    facts["documents"] = [(d["id"], d["tokens"]) for d in cell.get("documents", [])]
    if cell.get("scaling") != "attend-last":  # has a stride of its own
        facts["stride"] = cell.get("stride")
    return facts


def perplexity_tables(cells: Sequence[Cell]) -> list[Table]:
    """Perplexity by window, for the terminal."""
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
    tables += repeat_tables(cells)
    few = _about_few(cells)
    return [*tables, ([few], [])] if few else tables


def perplexity_findings(cells: Sequence[Cell]) -> list[str]:
    """Who is lowest, then the others; and long windows against the last tokens alone."""
    lines = by_line(cells, "window")
    plain = _plain(lines)
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
            for key, other in plain.items()
            if key[0] == model and longest in other and _value(other[longest]) < _value(cell)
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


def repeat_tables(cells: Sequence[Cell]) -> list[Table]:
    """What a longer window changes for targets that can be copied from far back, and for others.

    A table for every length of n-gram and short context; its rows are models.
    """
    groups: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        if cell.get("repeats"):
            about = cell["repeats"]["n"], cell["repeats"]["beyond"]
            groups.setdefault(about, []).append(cell)
    return [_repeat_table(n, beyond, group) for (n, beyond), group in groups.items()]


def _plain(lines: Lines) -> Lines:
    return {key: line for key, line in lines.items() if key[1] != "attend-last"}


def _curves(lines: Lines, windows: Sequence[int]) -> list[Line]:
    found = curves(_plain(lines), _value, lambda cell: cell.get("ci95"))
    ends = [windows[0], windows[-1]]
    return found + [
        Line(line_label(key), ends, 2 * [_value(cell)], None, key[0], (2, 3), named=False)
        for key, line in lines.items()
        if key[1] == "attend-last"
        for cell in line.values()
    ]


def _differences(lines: Lines) -> list[Section]:
    """Every line against the lowest at the longest window, over paired documents."""
    plain = _plain(lines)
    windows = _windows(lines)
    ends = [(key, line) for key, line in plain.items() if windows[-1] in line]
    if not ends:
        return []
    best, base = min(ends, key=lambda found: _value(found[1][windows[-1]]))
    drawn = []
    for key, line in plain.items():
        found = {w: _paired(cell, base[w]) for w, cell in line.items() if w in base}
        found = {w: pair for w, pair in found.items() if pair}
        if key != best and found:
            ratios = [_value(line[w]) / _value(base[w]) for w in found]
            dash = DASHES.get(key[1], (6, 3))
            drawn.append(
                Line(line_label(key), list(found), ratios, list(found.values()), key[0], dash)
            )
    if not drawn:
        return []
    name = line_label(best)
    chart = LineChart(
        drawn,
        "window: tokens read at once",
        f"perplexity, as a multiple of that of {name}",
        ticks=[window for window in windows if window in base],
        log_y=True,
        level=1.0,
    )
    text = (
        f"Each perplexity divided by that of {name}, with the 95 % interval of the ratio over the "
        "same documents. What makes a document hard for every model cancels, so these intervals, "
        "and not those of the perplexities, say which differences are real."
    )
    lead = f"Differences from {name} on the same documents, with their 95 % intervals."
    return [Section("Perplexity: paired differences", lead, text, chart)]


def _note(cells: Sequence[Cell], *, several: bool, short: bool) -> str:
    """How to read the table, and what was scored."""
    plain = [cell for cell in cells if cell["scaling"] != "attend-last"]
    targets, strides, tokens = (
        sorted({cell[name] for cell in plain}) for name in ("targets", "stride", "tokens")
    )
    ids = [str(document["id"]) for document in cells[0]["documents"]]
    named = "" if ids[0].isdigit() else f" ({', '.join(ids[:3])}{', …' if len(ids) > 3 else ''})"
    facts = [
        f"Targets: {enumeration(targets)}",
        f"stride: {_span(strides)} tokens",
        f"tokens scored at every window: {_span(tokens)}",
        f"documents: {len(ids)}{named}",
    ]
    sentences = [
        "Bold: the lowest of a column." if several else "",
        f"Below each figure its 95 % interval over documents. {'; '.join(facts)}.",
    ]
    if targets == ["shared"] and len(strides) == 1:
        stride, window = strides[0], min(cell["window"] for cell in plain)
        sentences.append(
            f"Windows move by {stride:,} tokens: a target in column W has W − {stride - 1:,} to W "
            f"tokens before it, at {window:,} tokens {window - stride + 1:,} to {window:,}."
        )
    if short:
        sentences.append(
            "A row “last n tokens only” shows the perplexity of the model without any text before "
            "these: long windows are useful only if they improve on it."
        )
    return " ".join(filter(None, [*sentences, _about_few(cells)]))


def _span(values: Sequence[int]) -> str:
    return " to ".join(dict.fromkeys(f"{value:,}" for value in (values[0], values[-1])))


def _about_few(cells: Sequence[Cell]) -> str:
    """A note where intervals are over few documents; else empty."""
    count = min(len(cell["documents"]) for cell in cells)
    if count >= FEW_DOCUMENTS:
        return ""
    plural = "" if count == 1 else "s"
    return (
        f"{count} document{plural}: intervals are rough below {FEW_DOCUMENTS}, where one unusual "
        "document counts for much."
    )


def _by_ranges(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells of one window and the same ranges of positions each, the smallest window first."""
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        ranges = tuple((each["first"], each["last"]) for each in cell["by_position"])
        groups.setdefault((cell["window"], ranges), []).append(cell)
    return [groups[key] for key in sorted(groups)]


def _position_table(cells: Sequence[Cell]) -> Table:
    """Perplexity by the number of tokens read before, for cells of one window."""
    rows = []
    for cell in cells:
        known = [b["nats"] is not None and b["tokens"] for b in cell["by_position"]]
        ranges = zip(cell["by_position"], known, strict=True)
        entries = [f"{_of_range(b):.1f}" if is_known else "–" for b, is_known in ranges]
        rows.append([line_label(line_key(cell)), *entries])
    names = [f"{b['first']:,} to {b['last']:,}" for b in cells[0]["by_position"]]
    return ["tokens read before", *names], rows


def _of_range(found: dict[str, Any]) -> float:
    return perplexity([DocumentScore("", found["nats"], found["tokens"])])


def _windows(lines: Lines) -> list[int]:
    """Window sizes of the table's columns."""
    return sorted({w for line in _plain(lines).values() for w in line})


def _at(line: dict[int, Cell], window: int) -> Cell | None:
    """The cell of a window; the one of attend-last applies to every window."""
    only = next(iter(line.values()))
    return only if only["scaling"] == "attend-last" else line.get(window)


def _value(cell: Cell) -> float:
    return math.inf if cell["perplexity"] is None else cell["perplexity"]


def _shown(cell: Cell) -> str:
    return number(_value(cell))


def _best(lines: Lines, window: int) -> list[tuple[str, Cell]]:
    """The best line of every model at a window, the lowest first."""
    best: dict[str, tuple[str, Cell]] = {}
    for key, line in lines.items():
        if window not in line:
            continue
        _, cell = best.setdefault(key[0], (line_label(key), line[window]))
        # As shown: at its training length, scaling does not make a model better.
        if _value(line[window]) < _value(cell) and _shown(line[window]) != _shown(cell):
            best[key[0]] = line_label(key), line[window]
    return sorted(best.values(), key=lambda found: _value(found[1]))


def _lead(lines: Lines) -> str:
    """Who is lowest at the longest window, in one sentence."""
    if not lines:
        return ""
    window = _windows(lines)[-1]
    (name, first), *others = _best(lines, window)
    where = f"At {window:,} tokens{times_trained(lines, window)}"
    if not math.isfinite(_value(first)):
        return f"{where} no model has a finite perplexity."
    if not others:
        return f"{where} {name} has a perplexity of {_shown(first)}."
    return f"{where} {name} has the lowest perplexity, {_shown(first)}."


def _ranking(lines: Lines, window: int) -> str:
    """The lowest at a window, and how far the others are above it."""
    sentence = _lead({key: {window: line[window]} for key, line in lines.items() if window in line})
    (_, first), *others = _best(lines, window)
    if not others or not math.isfinite(_value(first)):
        return sentence
    changes = [_change(cell, first) for _, cell in others]
    rest = [
        f"{label} {_shown(cell)}{change}"
        for (label, cell), change in zip(others, changes, strict=True)
    ]
    if len(rest) > NAMED:
        rest[NAMED:] = [f"{len(rest) - NAMED} more up to {_shown(others[-1][1])}"]
    intervals = ", with 95 % intervals of the difference" if ";" in changes[0] else ""
    return f"{sentence} The others{intervals}: {'; '.join(rest)}."


def _change(mine: Cell, best: Cell) -> str:
    a, b = _value(mine), _value(best)
    if not math.isfinite(a):
        return ""
    interval = _paired(mine, best)
    ends = [signed(end - 1, ".1%") for end in interval or ()]
    return f" ({'; '.join(filter(None, [signed(a / b - 1, '.1%'), ' to '.join(ends)]))})"


def _paired(mine: Cell, theirs: Cell) -> Ends | None:
    """The 95 % interval of a ratio over paired documents; None if the documents differ."""
    first, second = (
        [DocumentScore(d["id"], _nats(d), d["tokens"]) for d in cell["documents"]]
        for cell in (mine, theirs)
    )
    try:
        return paired_ratio_interval(first, second)
    except ValueError:
        return None


def _rows(lines: Lines, windows: Sequence[int]) -> list[list[str | Entry]]:
    """Perplexity with its interval; bold: the lowest of a column, unless there is one row alone."""
    rows: list[list[str | Entry]] = [[line_label(key)] for key in lines]
    for window in windows:
        found = [_at(line, window) for line in lines.values()]
        # As shown: a difference that is not shown is none.
        shown = {_shown(cell): _value(cell) for cell in found if cell is not None}
        best = min(shown, key=lambda text: shown[text]) if len(lines) > 1 else None
        for cell, row in zip(found, rows, strict=True):
            if cell is None:
                row.append("–")
                continue
            interval = " to ".join(map(number, cell.get("ci95") or ()))
            row.append(Entry(_shown(cell), interval, _shown(cell) == best))
    return rows


def _repeat_table(n: int, beyond: int, cells: Sequence[Cell]) -> Table:
    lines = by_line(cells, "window")
    plain, windows = _plain(lines), _windows(lines)
    far = sum(each["tokens"] for each in cells[0]["repeats"]["documents"])
    share = far / cells[0]["tokens"]
    rows = [
        [
            f"{line_label(key)}, {label}",
            *(_repeat_entry(line.get(w), base, is_far) for w in windows),
        ]
        for key, line in plain.items()
        if (base := _short(lines, key[0], line))
        for label, is_far in ((f"these {share:.1%}", True), ("all others", False))
    ]
    title = f"{n}-gram only farther back than {beyond} tokens: change against that context"
    return [title, *(f"{window:,}" for window in windows)], rows


def _short(lines: Lines, model: str, line: dict[int, Cell]) -> Cell:
    """The cell of the short context: the model's last tokens, or else its smallest window."""
    for (name, kind, _), other in lines.items():
        if (name, kind) == (model, "attend-last"):
            return next(iter(other.values()))
    return line[min(line)]


def _repeat_entry(cell: Cell | None, base: Cell, is_far: bool) -> str:
    """Change of the perplexity and its interval over paired documents."""
    if cell is None or cell is base:
        return "–"
    first, second = _scores(cell, is_far), _scores(base, is_far)
    if not sum(score.tokens for score in first):
        return "–"
    change = signed(perplexity(first) / perplexity(second) - 1, ".1%")
    interval = paired_ratio_interval(first, second)
    if interval is None:
        return change
    return f"{change} ({' to '.join(signed(end - 1, '.1%') for end in interval)})"


def _scores(cell: Cell, is_far: bool) -> list[DocumentScore]:
    """Every document's score, of the targets repeated from far back or of the others."""
    scores = []
    for whole, part in zip(cell["documents"], cell["repeats"]["documents"], strict=True):
        nats, tokens = _nats(part), part["tokens"]
        if not is_far:
            nats, tokens = _nats(whole) - nats, whole["tokens"] - tokens
        scores.append(DocumentScore(whole["id"], nats, tokens))
    return scores


def _nats(score: dict[str, Any]) -> float:
    return math.inf if score["nats"] is None else score["nats"]
