"""Perplexity in the report: by window, by position, and of what is copied from far back."""

import math
from collections.abc import Callable, Sequence
from typing import Any

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
    strict_minus_slack,
    without_short,
)
from coca_lab.report.results import Cell
from coca_lab.report.section import Entry, Section, enumeration, number, signed


def perplexity_sections(cells: Sequence[Cell]) -> list[Section]:
    """By window, paired differences, positions, copies, and the forms."""
    frame = by_length(cells, "window", "perplexity", "ci95")
    short = frame["line"][frame["scaling"] == SHORT].unique()
    plain = without_short(frame)
    header, rows = length_table(_with_lowest(frame), "perplexity at", _entry)
    sections = [
        Section(
            "Perplexity against the length read at once",
            lead=_lead(plain, lengths_of(plain)[-1]) if len(plain) else "",
            text=" ".join(perplexity_findings(frame)),
            # Without bars: paired differences have far narrower intervals.
            chart=length_chart(
                frame,
                f"window: tokens read at once{' (dotted: the last ones only)' * bool(len(short))}",
                "perplexity (lower is better)",
                bars=False,
            ),
            header=header,
            rows=rows,
            muted=[i for i, row in enumerate(rows) if row[0] in set(short)],
            note=_note(cells, several=len(rows) > 1),
        ),
        *_differences(plain),
        *_position_sections([cell for cell in cells if cell.get("by_position")]),
        *_repeat_sections(cells),
    ]
    title = "Strict minus slack: perplexity"
    return sections + strict_minus_slack(frame, title, "tokens read at once")


def perplexity_facts(cell: Cell) -> dict[str, Any]:
    """What a perplexity depends on: the documents, the tokens scored of each, the stride."""
    facts = {name: cell[name] for name in ("targets", "text") if cell.get(name) is not None}
    facts["documents"] = [(d["id"], d["tokens"]) for d in cell.get("documents", [])]
    if cell.get("scaling") != SHORT:  # has a stride of its own
        facts["stride"] = cell.get("stride")
    return facts


def perplexity_findings(frame: Frame) -> list[str]:
    """Who is lowest in short and long windows, and which models gain from the longest one."""
    plain, short = without_short(frame), frame[frame["scaling"] == SHORT]
    if plain.empty:
        return []
    lengths = lengths_of(plain)
    longest, leads = (
        lengths[-1],
        [_lead(plain, n) for n in dict.fromkeys((lengths[0], lengths[-1]))],
    )
    if short.empty:
        return leads
    improved = []
    for last in short[short["x"] == longest].itertuples():
        rows = plain[(plain["model"] == last.model) & (plain["x"] == longest)]
        better = rows["line"][rows["y"] < last.y].tolist()
        if better:
            improved.append(
                f"At {longest:,} tokens the perplexity of {enumeration(better)} is lower than "
                f"with the last {last.cell['window']} tokens only."
            )
    none = (
        f"At {longest:,} tokens no model has a lower perplexity than with its last tokens only: "
        "none of them benefits from the longest window yet."
    )
    return leads + (improved or [none])


def _lead(plain: Frame, window: int) -> str:
    """Who is lowest at a window, in one sentence."""
    best = best_of_models(plain, window, 1)
    first, where = best.iloc[0], at_tokens(plain, window)
    if not math.isfinite(first["y"]):
        return f"{where} no model has a finite perplexity."
    if len(best) == 1:
        return f"{where} {first['line']} has a perplexity of {number(first['y'])}."
    return f"{where} {first['line']} has the lowest perplexity, {number(first['y'])}."


def _with_lowest(frame: Frame) -> Frame:
    """With the column ``bold``: the lowest of a length as shown, unless there is one line alone."""
    lowest = frame.groupby("x")["y"].transform("min").map(number)
    return frame.assign(bold=(frame["y"].map(number) == lowest) & (frame["line"].nunique() > 1))


def _entry(row: Any) -> Entry:
    interval = " to ".join(map(number, row.cell.get("ci95") or ()))
    return Entry(number(row.y), interval, row.bold)


def _note(cells: Sequence[Cell], *, several: bool) -> str:
    """How to read the table, and what was scored."""
    plain = [cell for cell in cells if cell["scaling"] != SHORT]
    targets, strides, tokens = (
        sorted({cell[name] for cell in plain}) for name in ("targets", "stride", "tokens")
    )
    ids = [str(document["id"]) for document in cells[0]["documents"]]
    named = "" if ids[0].isdigit() else f" ({', '.join(ids[:3])}{', …' if len(ids) > 3 else ''})"
    sentences = [
        "Bold: the lowest of a column." if several else "",
        f"Below each figure its 95 % interval over documents. Targets: {enumeration(targets)}; "
        f"stride: {_span(strides)} tokens; tokens scored at every window: {_span(tokens)}; "
        f"documents: {len(ids)}{named}.",
    ]
    if targets == ["shared"] and len(strides) == 1:
        stride, window = strides[0], min(cell["window"] for cell in plain)
        sentences.append(
            f"Windows move by {stride:,} tokens: a target in column W has W − {stride - 1:,} to W "
            f"tokens before it, at {window:,} tokens {window - stride + 1:,} to {window:,}."
        )
    if len(plain) < len(cells):
        sentences.append(
            "A row “last n tokens only” shows the perplexity of the model without any text before "
            "these: long windows are useful only if they improve on it."
        )
    count = min(len(cell["documents"]) for cell in cells)
    if count < FEW_DOCUMENTS:
        sentences.append(
            f"{count} document{'s' * (count > 1)}: intervals are rough below {FEW_DOCUMENTS}, "
            "where one unusual document counts for much."
        )
    return " ".join(filter(None, sentences))


def _span(values: Sequence[int]) -> str:
    return " to ".join(dict.fromkeys(f"{value:,}" for value in (values[0], values[-1])))


def _differences(plain: Frame) -> list[Section]:
    """Every line against the lowest at the longest window, over paired documents."""
    if plain["line"].nunique() < 2:
        return []
    name = best_of_models(plain, lengths_of(plain)[-1], 1)["line"].iloc[0]
    base = plain[plain["line"] == name].set_index("x")["cell"]
    others = plain[(plain["line"] != name) & plain["x"].isin(base.index)]
    pairs = [(_documents(row.cell), _documents(base[row.x])) for row in others.itertuples()]
    ratios = [_ratio(*pair) for pair in pairs]
    others = others.assign(
        y=[ratio for ratio, *_ in ratios],
        low=[low for _, low, _ in ratios],
        high=[high for _, _, high in ratios],
    )
    if not others["y"].map(math.isfinite).any():
        return []
    chart = LineChart(
        others,
        "window: tokens read at once",
        f"perplexity, as a multiple of that of {name}",
        ticks=lengths_of(others),
        log_y=True,
        level=1.0,
    )
    text = (
        f"Each perplexity against that of {name}, with the 95 % interval of the ratio over the "
        "same documents. What makes a document hard for every model cancels, so these intervals, "
        "and not those of the perplexities, say which differences are real."
    )
    longest = lengths_of(others)[-1]
    last = others[others["x"] == longest]
    ends = " to ".join(dict.fromkeys(f"{y:.2f}" for y in (last["y"].min(), last["y"].max())))
    who = f"{last['line'].iloc[0]} has" if len(last) == 1 else "the others have"
    lead = f"{at_tokens(others, longest)} {who} {ends} × the perplexity of {name}."
    header, rows = length_table(
        others, f"against {name} at", lambda row: _change(row.y, row.low, row.high)
    )
    title = "Perplexity: paired differences"
    return [Section(title, lead, text, chart, header, rows, printed=False)]


def _ratio(
    mine: Sequence[DocumentScore], theirs: Sequence[DocumentScore]
) -> tuple[float, float, float]:
    """The ratio of two perplexities and the ends of its interval, NaN where it has none."""
    ratio = perplexity(mine) / perplexity(theirs)
    return ratio, *(paired_ratio_interval(mine, theirs) or (math.nan, math.nan))


def _change(ratio: float, low: float, high: float) -> str:
    """``+3.8% (+1.0% to +6.7%)``."""
    if not math.isfinite(ratio):
        return "–"
    change, *ends = (signed(value - 1, ".1%") for value in (ratio, low, high))
    return f"{change} ({' to '.join(ends)})" if math.isfinite(low) else change


def _documents(cell: Cell) -> list[DocumentScore]:
    return [DocumentScore(d["id"], _nats(d), d["tokens"]) for d in cell["documents"]]


def _position_sections(cells: Sequence[Cell]) -> list[Section]:
    """Perplexity by the tokens read before: a table for every window and its ranges."""
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        ranges = tuple((each["first"], each["last"]) for each in cell["by_position"])
        groups.setdefault((cell["window"], ranges), []).append(cell)
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
    return f"{perplexity([DocumentScore('', scored['nats'], scored['tokens'])]):.1f}"


def _repeat_sections(cells: Sequence[Cell]) -> list[Section]:
    """What a longer window changes for targets that can be copied from far back, and for others."""
    groups: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        if cell.get("repeats"):
            about = cell["repeats"]["n"], cell["repeats"]["beyond"]
            groups.setdefault(about, []).append(cell)
    text = (
        "Targets that end an n-gram which stands earlier in the document, but only farther back "
        "than the short context, and all others."
    )
    title = "Copied from far back, and the rest"
    return [Section(title, "", text, None, *_repeats(*key, of)) for key, of in groups.items()]


def _repeats(n: int, beyond: int, cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    frame = by_length(cells, "window", "perplexity")
    plain = without_short(frame)
    far = sum(each["tokens"] for each in cells[0]["repeats"]["documents"])
    parts: dict[str, Callable[[Cell], list[DocumentScore]]] = {
        f"these {far / cells[0]['tokens']:.1%}": _repeated,
        "all others": _not_repeated,
    }
    rows = []
    for line, of_line in plain.groupby("line", sort=False):
        # Against the model's last tokens alone, or else its smallest window.
        short = frame[(frame["model"] == of_line["model"].iloc[0]) & (frame["scaling"] == SHORT)]
        base = (short if len(short) else of_line)["cell"].iloc[0]
        by_window = of_line.set_index("x")["cell"].to_dict()
        for label, part in parts.items():
            changes = (_repeat_change(by_window.get(n), base, part) for n in lengths_of(plain))
            rows.append([f"{line}, {label}", *changes])
    title = f"{n}-gram only farther back than {beyond} tokens: change against that context"
    return [title, *(f"{window:,}" for window in lengths_of(plain))], rows


def _repeat_change(
    cell: Cell | None, base: Cell, part: Callable[[Cell], list[DocumentScore]]
) -> str:
    if cell is None or cell is base or not sum(score.tokens for score in part(cell)):
        return "–"
    return _change(*_ratio(part(cell), part(base)))


def _repeated(cell: Cell) -> list[DocumentScore]:
    """Every document's score, of the targets repeated from far back."""
    pairs = zip(cell["documents"], cell["repeats"]["documents"], strict=True)
    return [DocumentScore(whole["id"], _nats(part), part["tokens"]) for whole, part in pairs]


def _not_repeated(cell: Cell) -> list[DocumentScore]:
    return [
        DocumentScore(whole.id, whole.nats - part.nats, whole.tokens - part.tokens)
        for whole, part in zip(_documents(cell), _repeated(cell), strict=True)
    ]


def _nats(score: dict[str, Any]) -> float:
    return math.inf if score["nats"] is None else score["nats"]
