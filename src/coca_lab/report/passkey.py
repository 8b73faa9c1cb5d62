"""Passkey retrieval in the report, in the layouts of the paper."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from coca_lab.intervals import wilson_interval
from coca_lab.report.lines import (
    Cell,
    Lines,
    by_line,
    enumeration,
    length_table,
    line_label,
    share_figure,
    strict_minus_slack,
    times_trained,
)
from coca_lab.report.section import Entry, Section, Table

LABEL = "share of passkeys found"


def passkey_sections(cells: Sequence[Cell]) -> list[Section]:
    """Accuracy by prompt length, distance and depth, in the layouts of the paper."""
    lines = by_line(cells)
    header, rows = length_table(lines, _accuracy)
    sections = [
        Section(
            "Passkeys found, by prompt length",
            figure=share_figure(
                "passkey",
                {
                    key: {n: (cell["accuracy"], cell["wilson95"]) for n, cell in line.items()}
                    for key, line in lines.items()
                },
                LABEL,
            ),
            header=["prompt length in tokens", *header],
            rows=rows,
            note="Small: passkeys found of all prompts, and Wilson’s 95 % interval of the share. "
            "Shaded: the same interval, for the lines without scaling.",
        ),
    ]
    trained = {cell["training_length"] for line in lines.values() for cell in line.values()}
    if len(trained) == 1 and (length := trained.pop()):
        sections += _distance_sections(lines, length)
    sections.append(_depth_section(lines))
    return sections + strict_minus_slack(
        cells, "accuracy", "length", "Strict minus slack: passkeys found"
    )


def passkey_tables(cells: Sequence[Cell]) -> list[Table]:
    """Accuracy by prompt length, for the terminal."""
    header, rows = length_table(by_line(cells), _accuracy)
    return [(["passkeys found at", *header], rows)]


def passkey_findings(cells: Sequence[Cell]) -> list[str]:
    """Who finds most, then the others: at the shortest length, and at the longest with a find."""
    lines = by_line(cells)
    lengths = sorted({length for line in lines.values() for length in line})
    found = [n for n in lengths if any(line[n]["accuracy"] for line in lines.values() if n in line)]
    if not found:
        return ["No passkey was found at any length."]
    sentences = [_ranking(lines, n) for n in dict.fromkeys((lengths[0], found[-1]))]
    if found[-1] < lengths[-1]:
        sentences.append(
            f"At more than {found[-1]:,} tokens, up to {lengths[-1]:,}, none is found."
        )
    return sentences


def _ranking(lines: Lines, length: int) -> str:
    """The best line of every model at a length, those with most passkeys first."""
    best: dict[str, tuple[str, Cell]] = {}
    for key, line in lines.items():
        if length in line and (
            key[0] not in best or line[length]["accuracy"] > best[key[0]][1]["accuracy"]
        ):
            best[key[0]] = line_label(key), line[length]
    shares: dict[float, list[str]] = {}
    for label, cell in best.values():
        shares.setdefault(cell["accuracy"], []).append(label)
    ranked = sorted(shares.items(), reverse=True)
    parts = [f"{enumeration(labels)} {share:.2f}" for share, labels in ranked]
    low, high = next(c for _, c in best.values() if c["accuracy"] == ranked[0][0])["wilson95"]
    where = f"At {length:,} tokens{times_trained(lines, length)}"
    first = f"{where}, share of passkeys found: {parts[0]} (95 % interval {low:.2f} to {high:.2f})"
    return f"{'; '.join([first, *parts[1:]])}."


def _accuracy(cell: Cell) -> Entry:
    hits, trials = sum(record["hit"] for record in cell["samples"]), len(cell["samples"])
    low, high = cell["wilson95"]
    return Entry(f"{cell['accuracy']:.2f}", f"{hits} of {trials}; {low:.2f}–{high:.2f}")


def _distance_sections(lines: Lines, trained: int) -> list[Section]:
    """The layouts of the paper's Figures 4 and 5."""
    sections = []
    for name, title, keep in (
        (
            "near",
            f"Passkeys at most {trained:,} tokens from the end",
            lambda r: r["distance"] <= trained,
        ),
        (
            "far",
            f"Passkeys more than {trained:,} tokens from the end",
            lambda r: r["distance"] > trained,
        ),
    ):
        shares = {
            key: {n: s for n, cell in line.items() if (s := _share(cell["samples"], keep))}
            for key, line in lines.items()
        }
        if not any(hits for line in shares.values() for hits in line.values()):
            continue
        lengths = sorted({n for line in shares.values() for n in line})
        sections.append(
            Section(
                title,
                text="The layout of the paper’s Figure 4: keys within and beyond the training "
                "length, counted from the end of the prompt.",
                figure=share_figure(
                    f"passkey-{name}",
                    {
                        key: {n: (h / t, wilson_interval(h, t)) for n, (h, t) in line.items()}
                        for key, line in shares.items()
                    },
                    LABEL,
                ),
                header=["prompt length in tokens", *(f"{n:,}" for n in lengths)],
                rows=[
                    [line_label(key), *(_share_text(line.get(n)) for n in lengths)]
                    for key, line in shares.items()
                ],
            )
        )
    edges = distance_edges(lines, trained)
    ranges = list(pairwise(edges))
    header = [f"{low + 1:,} to {high:,}" for low, high in ranges]
    sections.append(
        Section(
            "Passkeys found, by distance",
            text="The layout of the paper’s Figure 5: all prompt lengths together, by the "
            "number of tokens between the key and the end of the prompt.",
            header=["distance in tokens", *header],
            rows=_share_rows(
                lines, [lambda r, a=a, b=b: a < r["distance"] <= b for a, b in ranges]
            ),
            note="Hits out of trials in each range, with Wilson’s 95 % interval.",
        )
    )
    return sections


def distance_edges(lines: Lines, trained: int) -> list[int]:
    """Edges of four ranges: up to the training length, then three with equal ratios."""
    longest = max(
        record["distance"]
        for line in lines.values()
        for cell in line.values()
        for record in cell["samples"]
    )
    if longest <= trained:
        return [0, longest]
    ratio = (longest / trained) ** (1 / 3)
    inner = [round(trained * ratio**i) for i in (1, 2)]
    return sorted({0, trained, *inner, longest})


def _depth_section(lines: Lines) -> Section:
    quarters = ["first quarter", "second", "third", "last quarter"]
    return Section(
        "Passkeys found, by depth",
        header=["depth in the prompt", *quarters],
        rows=_share_rows(
            lines, [lambda r, q=q: min(int(4 * r["depth"]), 3) == q for q in range(4)]
        ),
        note="All prompt lengths together.",
    )


def _share_rows(lines: Lines, keeps: Sequence[Callable[[Cell], bool]]) -> list[list[str]]:
    """One row per line, one column per condition, from the samples of all prompt lengths."""
    rows = []
    for key, line in lines.items():
        records = [record for cell in line.values() for record in cell["samples"]]
        rows.append([line_label(key), *(_share_text(_share(records, keep)) for keep in keeps)])
    return rows


def _share(records: Sequence[Cell], keep: Callable[[Cell], bool]) -> tuple[int, int] | None:
    """Hits and trials of the samples that satisfy a condition; None without any."""
    hits = [record["hit"] for record in records if keep(record)]
    return (sum(hits), len(hits)) if hits else None


def _share_text(share: tuple[int, int] | None) -> str:
    if share is None:
        return "–"
    hits, trials = share
    low, high = wilson_interval(hits, trials) or (math.nan, math.nan)
    return f"{hits / trials:.2f} ({hits}/{trials}; {low:.2f}–{high:.2f})"
