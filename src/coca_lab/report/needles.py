"""Needles by log probability in the report: near and far apart, nats a digit and how many found."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from coca_lab.report.cells import NeedleFigures, Needles, ScoredDocument
from coca_lab.report.lengths import Charted, by_kind, frame_of, line_label
from coca_lab.report.section import Section, span

NEEDLES = Charted(
    "Needles by log probability", "nats a digit", "{:.2f}".format, x="tokens of the text"
)


def needle_sections(cells: Sequence[Needles]) -> list[Section]:
    """Nats a digit near and far, and a table of the numbers found."""
    parts = [part for cell in cells for part in _parts(cell)]
    documents = {len(cell.documents) for cell in cells}
    note = f"Small: 95 % intervals over {span(documents)} documents."
    sections = [replace(section, note=note) for section in by_kind(frame_of(parts), NEEDLES)]
    return [*sections, _found(parts)]


def _parts(cell: Needles) -> list[Needles]:
    """The cell of its near needles and that of its far ones; where nothing parts them, of all."""
    if cell.near is None:
        figures = NeedleFigures(
            nats=cell.value, ci95=cell.interval, found=cell.found, needles=cell.needles
        )
        return [_part(cell, "", figures, 0, sys.maxsize)]
    near, beyond = (cell.ranges[name] for name in ("near", "beyond"))
    parts = [
        _part(cell, f"up to {cell.near:,} tokens back", near, 0, cell.near),
        _part(cell, f"farther back than {cell.near:,} tokens", beyond, cell.near + 1, sys.maxsize),
    ]
    return [part for part in parts if part.needles]


def _part(cell: Needles, kind: str, figures: NeedleFigures, nearest: int, farthest: int) -> Needles:
    """The cell of the needles at some distances, whose documents have a score each."""
    scores = []
    for document in cell.documents:
        chosen = [each for each in document.needles if nearest <= each.distance <= farthest]
        nats = [math.inf if each.nats is None else each.nats for each in chosen]
        scores.append(
            ScoredDocument(
                id=document.id,
                nats=sum(nats) if math.isfinite(sum(nats)) else None,
                tokens=cell.digits * len(chosen),
            )
        )
    changes = {
        "kind": kind,
        "value": figures.nats,
        "interval": figures.ci95,
        "found": figures.found,
        "needles": figures.needles,
        "documents": scores,
    }
    return cell.model_copy(update=changes)


def _found(parts: Sequence[Needles]) -> Section:
    """A row for every line and kind, a column for every length."""
    lengths = sorted({part.length for part in parts})
    rows: dict[tuple[str, str, int | None], dict[int, str]] = {}
    for part in parts:
        name = (line_label(part), part.kind, part.training_seed)
        shown = f"{part.found} of {part.needles}"
        rows.setdefault(name, {})[part.length] = shown
    several = len({seed for _, _, seed in rows}) > 1
    return Section(
        "Needles found: every digit is the likeliest",
        header=["model", "needles", *(f"{length:,}" for length in lengths)],
        rows=[
            [
                f"{line}, seed {seed}" if several else line,
                kind,
                *(by_length.get(length, "–") for length in lengths),
            ]
            for (line, kind, seed), by_length in rows.items()
        ],
    )
