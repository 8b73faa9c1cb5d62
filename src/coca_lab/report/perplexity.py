"""Perplexity in the report: by window, by position, and of what is copied from far back."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from coca_lab.intervals import FEW_DOCUMENTS, DocumentScore, paired_ratio_interval, perplexity
from coca_lab.report.charts import Frame, LineChart
from coca_lab.report.lengths import (
    SHORT,
    at_tokens,
    best_of_models,
    by_length,
    length_chart,
    length_table,
    lengths_of,
    line_label,
    short_rows,
    strict_minus_slack,
    without_short,
)
from coca_lab.report.results import Cell, grouped
from coca_lab.report.section import Entry, Section, enumeration, number, signed, span

Scores = Sequence[DocumentScore]


def perplexity_sections(cells: Sequence[Cell]) -> list[Section]:
    """By window, paired differences, positions, copies, and the forms."""
    frame = by_length(cells, "window", "perplexity", "ci95")
    plain, muted, several = without_short(frame), short_rows(frame), frame["line"].nunique() > 1
    lowest = frame.groupby("x")["y"].min().map(number)

    def entry(row: Any) -> Entry:
        bold = several and number(row.y) == lowest[row.x]
        return Entry(number(row.y), " to ".join(map(number, row.cell.get("ci95") or ())), bold)

    return [
        Section(
            "Perplexity against the length read at once",
            _lead(plain, lengths_of(plain)[-1]) if len(plain) else "",
            far_text_helps(frame),
            # Without bars: paired differences have far narrower intervals.
            length_chart(
                frame,
                "tokens read at once",
                "perplexity (lower is better)",
                bars=False,
            ),
            *length_table(frame, "perplexity at", entry),
            _note(cells),
            muted=muted,
        ),
        *_differences(plain),
        *_position_sections([cell for cell in cells if cell.get("by_position")]),
        *_repeat_sections([cell for cell in cells if cell.get("repeats")]),
        *strict_minus_slack(frame, "Strict minus slack: perplexity", "tokens read at once"),
    ]


def perplexity_facts(cell: Cell) -> dict[str, Any]:
    """What a perplexity depends on: the documents, the tokens scored of each, the stride."""
    facts = {name: cell[name] for name in ("targets", "text") if cell.get(name) is not None}
    facts["documents"] = [(d["id"], d["tokens"]) for d in cell.get("documents", [])]
    if cell.get("scaling") != SHORT:  # has a stride of its own
        facts["stride"] = cell.get("stride")
    return facts


def far_text_helps(frame: Frame) -> str:
    """Which models gain from the longest window, where the last tokens alone were read, too."""
    plain, short = without_short(frame), frame[frame["scaling"] == SHORT]
    if plain.empty or short.empty:
        return ""
    longest = lengths_of(plain)[-1]
    alone = short[short["x"] == longest].groupby("model")["y"].min()
    far = plain[plain["x"] == longest]
    names = far["line"][far["y"] < far["model"].map(alone)].tolist()
    who = enumeration(names or ["no model"])
    return (
        f"At {longest:,} tokens the perplexity of {who} is lower than with its last tokens alone."
    )


def _lead(plain: Frame, window: int) -> str:
    """Who is lowest at a window, in one sentence."""
    best, where = best_of_models(plain, window, 1), at_tokens(plain, window)
    line, lowest = best[["line", "y"]].iloc[0]
    if not math.isfinite(lowest):
        return f"{where} no model has a finite perplexity."
    if len(best) == 1:
        return f"{where} {line} has a perplexity of {number(lowest)}."
    return f"{where} {line} has the lowest perplexity, {number(lowest)}."


def _note(cells: Sequence[Cell]) -> str:
    """What was scored, and of how many documents the intervals are."""
    plain = [cell for cell in cells if cell["scaling"] != SHORT]
    targets, strides, tokens = (
        sorted({cell[name] for cell in plain}) for name in ("targets", "stride", "tokens")
    )
    count = min(len(cell["documents"]) for cell in cells)
    few = f", fewer than {FEW_DOCUMENTS}: intervals are rough" if count < FEW_DOCUMENTS else ""
    return (
        f"Small: 95 % intervals over documents ({count}{few}). Targets: {enumeration(targets)}; "
        f"stride: {span(strides, ',')} tokens; tokens scored at every window: {span(tokens, ',')}."
    )


def _differences(plain: Frame) -> list[Section]:
    """Every line against the lowest at the longest window, over paired documents."""
    if plain["line"].nunique() < 2:
        return []
    name = best_of_models(plain, lengths_of(plain)[-1], 1)["line"].iloc[0]
    base = plain[plain["line"] == name].set_index("x")["cell"].map(_scores)
    others = plain[(plain["line"] != name) & plain["x"].isin(base.index)]
    ratios = [_ratio(_scores(row.cell), base[row.x]) for row in others.itertuples()]
    others = others.assign(**pd.DataFrame(ratios, others.index, ["y", "low", "high"], float))
    if not np.isfinite(others["y"]).any():
        return []
    longest = lengths_of(others)[-1]
    last = others[others["x"] == longest]
    ends = span(last["y"], ".2f")
    who = f"{last['line'].iloc[0]} has" if len(last) == 1 else "the others have"
    return [
        Section(
            "Perplexity: paired differences",
            f"{at_tokens(others, longest)} {who} {ends} × the perplexity of {name}.",
            f"Each perplexity against that of {name}, with the 95 % interval of the ratio over the "
            "same documents. What makes a document hard for every model cancels, so these "
            "intervals, and not those of the perplexities, say which differences are real.",
            LineChart(
                others,
                "tokens read at once",
                f"perplexity, as a multiple of that of {name}",
                ticks=lengths_of(others),
                log_y=True,
                level=1.0,
            ),
            *length_table(
                others, f"against {name} at", lambda row: _change(row.y, row.low, row.high)
            ),
            printed=False,
        )
    ]


def _ratio(mine: Scores, theirs: Scores) -> tuple[float, float, float]:
    """The ratio of two perplexities and the ends of its interval, NaN where it has none."""
    ratio = perplexity(mine) / perplexity(theirs)
    return ratio, *(paired_ratio_interval(mine, theirs) or (math.nan, math.nan))


def _change(ratio: float, low: float, high: float) -> str:
    """``+3.8% (+1.0% to +6.7%)``."""
    if not math.isfinite(ratio):
        return "–"
    change, *ends = (signed(value - 1, ".1%") for value in (ratio, low, high))
    return f"{change} ({' to '.join(ends)})" if math.isfinite(low) else change


def _position_sections(cells: Sequence[Cell]) -> list[Section]:
    """Perplexity by the tokens read before: a table for every window and its ranges."""
    groups = grouped(
        cells,
        lambda cell: (cell["window"], tuple((r["first"], r["last"]) for r in cell["by_position"])),
    )
    sections = []
    for (window, ranges), alike in sorted(groups.items(), key=lambda item: item[0]):
        header = ["tokens read before", *(f"{first:,} to {last:,}" for first, last in ranges)]
        rows = [[line_label(cell), *map(_of_range, cell["by_position"])] for cell in alike]
        once = all(cell["targets"] == "one-pass" for cell in alike)
        title = f"Perplexity by position, window {window:,}"
        sections.append(Section(title, header=header, rows=rows, printed=once))
    return sections


def _of_range(scored: dict[str, Any]) -> str:
    if scored["nats"] is None or not scored["tokens"]:
        return "–"
    return f"{perplexity([DocumentScore.of(scored)]):.1f}"


def _repeat_sections(cells: Sequence[Cell]) -> list[Section]:
    """What a longer window changes for targets that can be copied from far back, and for others."""
    groups = grouped(cells, lambda cell: (cell["repeats"]["n"], cell["repeats"]["beyond"]))
    text = (
        "Targets that end an n-gram which stands earlier in the document, but only farther back "
        "than the short context, and all others."
    )
    title = "Copied from far back, and the rest"
    return [
        Section(title, "", text, None, *_repeats(n, beyond, of))
        for (n, beyond), of in groups.items()
    ]


def _repeats(n: int, beyond: int, cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    frame = by_length(cells, "window", "perplexity")
    plain, rows = without_short(frame), []
    far = sum(each["tokens"] for each in cells[0]["repeats"]["documents"])
    parts = {f"these {far / cells[0]['tokens']:.1%}": _repeated, "all others": _not_repeated}
    for line, of_line in plain.groupby("line", sort=False):
        # Against the model's last tokens alone, or else its smallest window.
        of_model = frame[frame["model"] == of_line["model"].iloc[0]]
        short = of_model["cell"][of_model["scaling"] == SHORT].tolist()
        base = [*short, *of_line["cell"]][0]
        by_window = of_line.set_index("x")["cell"].to_dict()
        for label, part in parts.items():
            changes = (_repeat_change(by_window.get(n), base, part) for n in lengths_of(plain))
            rows.append([f"{line}, {label}", *changes])
    title = f"{n}-gram only farther back than {beyond} tokens: change against that context"
    return [title, *(f"{window:,}" for window in lengths_of(plain))], rows


def _repeat_change(cell: Cell | None, base: Cell, part: Callable[[Cell], Scores]) -> str:
    if cell is None or cell is base or not sum(score.tokens for score in part(cell)):
        return "–"
    return _change(*_ratio(part(cell), part(base)))


def _scores(cell: Cell) -> Scores:
    return list(map(DocumentScore.of, cell["documents"]))


def _repeated(cell: Cell) -> Scores:
    """Every document's score, of the targets repeated from far back."""
    pairs = zip(cell["documents"], cell["repeats"]["documents"], strict=True)
    return [DocumentScore.of(whole | part) for whole, part in pairs]


def _not_repeated(cell: Cell) -> Scores:
    return [
        DocumentScore(whole.id, whole.nats - part.nats, whole.tokens - part.tokens)
        for whole, part in zip(_scores(cell), _repeated(cell), strict=True)
    ]
