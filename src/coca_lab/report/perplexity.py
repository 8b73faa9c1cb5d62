"""Perplexity in the report: by window, paired, by position, and of what is copied from far back."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from coca_lab.intervals import DocumentScore, paired_ratio_interval, perplexity, perplexity_interval
from coca_lab.report.cells import Perplexity
from coca_lab.report.charts import Frame, LineChart
from coca_lab.report.lengths import (
    PERPLEXITY,
    SHORT,
    at_tokens,
    by_kind,
    frame_of,
    length_section,
    length_table,
    lengths_of,
    without_short,
)
from coca_lab.report.section import Section, enumeration, signed, span
from coca_lab.report.sizes import size_sections

Scores = Sequence[DocumentScore]


def perplexity_sections(cells: Sequence[Perplexity]) -> list[Section]:
    """By window, paired differences, positions and copies; of a study, by its sizes."""
    frame = frame_of(cells)
    if (frame["seeds"] > 1).any() or frame["size"].nunique() > 1:
        return [*size_sections(cells), *by_kind(frame, replace(PERPLEXITY, title="Perplexity"))]
    sections = [
        # Without bars: paired differences have far narrower intervals.
        length_section(frame, PERPLEXITY, text=far_text_helps(frame), bars=False),
        *_differences(without_short(frame)),
    ]
    if positions := [part for cell in cells for part in _positions(cell)]:
        place = replace(PERPLEXITY, title="Perplexity", x="tokens read before, up to")
        sections += by_kind(frame_of(positions), place)
    if copies := [part for cell in cells for part in _copies(cell)]:
        # The last tokens alone are what a copy from far back is compared with.
        drawn = frame_of(copies).assign(first=True)
        sections += by_kind(drawn, replace(PERPLEXITY, title="Perplexity"), bars=False)
    return sections


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


def _differences(plain: Frame) -> list[Section]:
    """Every line against the lowest at the longest window, over paired documents."""
    plain = plain[[bool(_scores(cell)) for cell in plain["cell"]]]
    if plain["line"].nunique() < 2:
        return []
    far = plain[plain["x"] == lengths_of(plain)[-1]]
    name = far.loc[far["y"].idxmin(), "line"]
    base = plain[plain["line"] == name].set_index("x")["cell"].map(_scores)
    others = plain[(plain["line"] != name) & plain["x"].isin(base.index)]
    ratios = [_ratio(_scores(row.cell), base[row.x]) for row in others.itertuples()]
    others = others.assign(**pd.DataFrame(ratios, others.index, ["y", "low", "high"], float))
    if not np.isfinite(others["y"]).any():
        return []
    longest = lengths_of(others)[-1]
    last = others[others["x"] == longest]
    who = f"{last['line'].iloc[0]} has" if len(last) == 1 else "the others have"
    return [
        Section(
            "Perplexity: paired differences",
            f"{at_tokens(others, longest)} {who} {span(last['y'], '.2f')} × the perplexity of "
            f"{name}.",
            "With 95 % intervals of the ratios over the same documents: what makes a document hard "
            "for every model cancels, so these intervals say which differences are real.",
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


def _scores(cell: Perplexity) -> Scores:
    return [document.score for document in cell.documents]


def _part(cell: Perplexity, kind: str, scores: Scores, **changes: Any) -> Iterator[Perplexity]:
    """The cell of some of its targets, if there are any."""
    if sum(score.tokens for score in scores) < 1:
        return
    value = perplexity(scores)
    changes = {"value": value if 1e-300 < value < math.inf else None, "documents": [], **changes}
    yield cell.model_copy(update={"kind": kind, "interval": perplexity_interval(scores), **changes})


def _positions(cell: Perplexity) -> Iterator[Perplexity]:
    """Of the targets with so many tokens before them."""
    for place in cell.by_position or ():
        kind = f"by position, window {cell.length:,}"
        yield from _part(cell, kind, [place.score], length=place.last)


def _copies(cell: Perplexity) -> Iterator[Perplexity]:
    """Of the targets that can be copied from far back, and of all others."""
    if not cell.repeats:
        return
    whole, far = _scores(cell), [document.score for document in cell.repeats.documents]
    about = f"{cell.repeats.n}-grams that stand more than {cell.repeats.beyond} tokens before"
    rest = [
        DocumentScore(w.id, w.nats - f.nats, w.tokens - f.tokens)
        for w, f in zip(whole, far, strict=False)
    ]
    yield from _part(cell, f"ends of {about}", far)
    yield from _part(cell, f"all but the ends of {about}", rest)
