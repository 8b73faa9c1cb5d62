"""Perplexity in the report: by window, paired, by position, and of what is copied from far back."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from coca_lab.intervals import DocumentScore, paired_ratio_interval, perplexity, perplexity_interval
from coca_lab.report.cells import Perplexity
from coca_lab.report.charts import Frame
from coca_lab.report.lengths import (
    PERPLEXITY,
    SHORT,
    Charted,
    at_tokens,
    by_kind,
    frame_of,
    length_section,
    lengths_of,
    without_short,
)
from coca_lab.report.section import Section, enumeration, span
from coca_lab.report.sizes import size_sections

Scores = Sequence[DocumentScore]


def perplexity_sections(cells: Sequence[Perplexity]) -> list[Section]:
    """By window, paired differences, positions and copies; of a study, by its sizes."""
    frame, short = frame_of(cells), replace(PERPLEXITY, title="Perplexity")
    if (frame["seeds"] > 1).any() or frame["size"].nunique() > 1:
        return [*size_sections(cells), *by_kind(frame, short)]
    sections = [
        # Without bars: paired differences have far narrower intervals.
        length_section(frame, PERPLEXITY, text=far_text_helps(frame), bars=False),
        *_differences(without_short(frame)),
    ]
    if positions := [part for cell in cells for part in _positions(cell)]:
        sections += by_kind(frame_of(positions), replace(short, x="tokens read before, up to"))
    if copies := [part for cell in cells for part in _copies(cell)]:
        # The last tokens alone are what a copy from far back is compared with.
        sections += by_kind(frame_of(copies).assign(first=True), short, bars=False)
    return sections


def far_text_helps(frame: Frame) -> str:
    """Which models gain from the longest window, where the last tokens alone were read, too."""
    plain, short = without_short(frame), frame[frame["scaling"] == SHORT]
    if plain.empty or short.empty:
        return ""
    longest = lengths_of(plain)[-1]
    alone = short[short["x"] == longest].groupby("model")["y"].min()
    far = plain[plain["x"] == longest]
    who = enumeration(far["line"][far["y"] < far["model"].map(alone)].tolist() or ["no model"])
    return (
        f"At {longest:,} tokens the perplexity of {who} is lower than with its last tokens alone."
    )


def _differences(plain: Frame) -> list[Section]:
    """Every line against the lowest at the longest window, over paired documents."""
    plain = plain[[bool(cell.documents) for cell in plain["cell"]]]
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
    lead = f"{at_tokens(others, longest)} {who} {span(last['y'], '{:.2f}'.format)} × the perplexity"
    measure = Charted(
        "Perplexity: paired differences",
        f"perplexity against that of {name}",
        lambda y: f"{y:.3f} ×" if math.isfinite(y) else "–",
        x=PERPLEXITY.x,
        level=1.0,
    )
    text = (
        "Ratios over the same documents: what makes a document hard for every model cancels, so "
        "their intervals say which differences are real."
    )
    section = length_section(others, measure, text=text)
    return [replace(section, lead=f"{lead} of {name}.", printed=False)]


def _ratio(mine: Scores, theirs: Scores) -> tuple[float, float, float]:
    """The ratio of two perplexities and the ends of its interval, NaN where it has none."""
    ratio = perplexity(mine) / perplexity(theirs)
    return ratio, *(paired_ratio_interval(mine, theirs) or (math.nan, math.nan))


def _scores(cell: Perplexity) -> Scores:
    return [document.score for document in cell.documents]


def _part(
    cell: Perplexity, kind: str, scores: Scores, length: int | None = None
) -> Iterator[Perplexity]:
    """The cell of some of its targets, if there are any."""
    if sum(score.tokens for score in scores) > 0:
        value = perplexity(scores)
        changes = {
            "kind": kind,
            "length": length or cell.length,
            "value": value if 1e-300 < value < math.inf else None,
            "interval": perplexity_interval(scores),
            "documents": [],
        }
        yield cell.model_copy(update=changes)


def _positions(cell: Perplexity) -> Iterator[Perplexity]:
    """Of the targets with so many tokens before them."""
    for place in cell.by_position or ():
        yield from _part(cell, f"by position, window {cell.length:,}", [place.score], place.last)


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
