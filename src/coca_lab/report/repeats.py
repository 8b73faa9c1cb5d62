"""What a longer window changes for targets that can be copied from far back, and for the others."""

import math
from collections.abc import Sequence

from coca_lab.intervals import DocumentScore, paired_ratio_interval, perplexity
from coca_lab.report.lines import Cell, Lines, by_line, line_label, signed
from coca_lab.report.section import Table


def repeat_tables(cells: Sequence[Cell]) -> list[Table]:
    """A table for every length of n-gram and short context; its rows are models."""
    groups: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        if cell.get("repeats"):
            about = cell["repeats"]["n"], cell["repeats"]["beyond"]
            groups.setdefault(about, []).append(cell)
    return [_table(n, beyond, group) for (n, beyond), group in groups.items()]


def _table(n: int, beyond: int, cells: Sequence[Cell]) -> Table:
    lines = by_line(cells, "window")
    plain = {key: line for key, line in lines.items() if key[1] != "attend-last"}
    windows = sorted({window for line in plain.values() for window in line})
    far = sum(each["tokens"] for each in cells[0]["repeats"]["documents"])
    share = far / cells[0]["tokens"]
    rows = [
        [f"{line_label(key)}, {label}", *(_entry(line.get(w), base, repeated) for w in windows)]
        for key, line in plain.items()
        if (base := _short(lines, key[0], line))
        for label, repeated in ((f"these {share:.1%}", True), ("all others", False))
    ]
    title = f"{n}-gram only farther back than {beyond} tokens: change against that context"
    return [title, *(f"{window:,}" for window in windows)], rows


def _short(lines: Lines, model: str, line: dict[int, Cell]) -> Cell:
    """The cell of the short context: the model's last tokens, or else its smallest window."""
    alone = [
        cell
        for (name, kind, _), other in lines.items()
        if (name, kind) == (model, "attend-last")
        for cell in other.values()
    ]
    return alone[0] if alone else line[min(line)]


def _entry(cell: Cell | None, base: Cell, repeated: bool) -> str:
    """Change of the perplexity and its interval over paired documents."""
    if cell is None or cell is base:
        return "–"
    first, second = _scores(cell, repeated), _scores(base, repeated)
    if not sum(score.tokens for score in first):
        return "–"
    change = signed(perplexity(first) / perplexity(second) - 1, ".1%")
    interval = paired_ratio_interval(first, second)
    if interval is None:
        return change
    return f"{change} ({' to '.join(signed(end - 1, '.1%') for end in interval)})"


def _scores(cell: Cell, repeated: bool) -> list[DocumentScore]:
    """Every document's score, of the repeated targets or of the others."""
    scores = []
    for whole, part in zip(cell["documents"], cell["repeats"]["documents"], strict=True):
        nats, tokens = _nats(part), part["tokens"]
        if not repeated:
            nats, tokens = _nats(whole) - nats, whole["tokens"] - tokens
        scores.append(DocumentScore(whole["id"], nats, tokens))
    return scores


def _nats(score: Cell) -> float:
    return math.inf if score["nats"] is None else score["nats"]
