"""Passkeys and needles in the report, passkeys in the layouts of the paper."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from coca_lab.intervals import wilson_interval
from coca_lab.report.charts import LineChart
from coca_lab.report.lines import (
    Lines,
    by_line,
    curves,
    length_table,
    line_label,
    strict_minus_slack,
    times_trained,
    training_length,
)
from coca_lab.report.results import Cell
from coca_lab.report.section import Entry, Section, Table, enumeration

METRICS = {
    "R-precision": "Mean share of the requested facts among as many that the answer gives first",
    "recall": "Mean share of the requested facts anywhere in the answer, among whatever others",
}
Keep = Callable[[dict[str, Any]], bool]


def prompt_facts(cell: Cell) -> dict[Any, Any]:
    """What the figures of prompts depend on; the tokenizer shows in the distances."""
    named = ("key", "expected", "depth", "depths", "distance", "distances")
    about = ("seed", "depths", "count", "max_new_tokens", "metric")
    facts = {name: cell[name] for name in about if name in cell}
    prompts = [[sample.get(name) for name in named] for sample in cell.get("samples", [])]
    return {**facts, (cell.get("kind"), cell.get("length")): prompts}


def passkey_sections(cells: Sequence[Cell]) -> list[Section]:
    """Accuracy by prompt length, distance and depth, in the layouts of the paper."""
    lines = by_line(cells)
    columns, rows = length_table(lines, _accuracy)
    found = passkey_findings(cells)
    header = ["prompt length in tokens", *columns]
    note = "Small: passkeys found of all prompts, and Wilson’s 95 % interval of the share."
    title = "Passkeys found, by prompt length"
    if not any(cell["accuracy"] for cell in cells):
        return [Section(title, found[0], header=header, rows=rows, note=note)]
    chart = _share_chart(lines, "accuracy", "share of passkeys found")
    sections = [Section(title, _lead(lines), " ".join(found), chart, header, rows, note)]
    if trained := training_length(lines):
        sections += _distance_sections(lines, trained)
    quarters = ["first quarter", "second", "third", "last quarter"]
    keeps = [lambda r, q=q: min(int(4 * r["depth"]), 3) == q for q in range(4)]
    sections.append(
        Section(
            "Passkeys found, by depth",
            header=["depth in the prompt", *quarters],
            rows=_share_rows(lines, keeps),
            note="All prompt lengths together.",
        )
    )
    title = "Strict minus slack: passkeys found"
    return sections + strict_minus_slack(cells, "accuracy", "length", title)


def passkey_tables(cells: Sequence[Cell]) -> list[Table]:
    """Accuracy by prompt length, for the terminal."""
    header, rows = length_table(by_line(cells), _accuracy)
    return [(["passkeys found at", *header], rows)]


def passkey_findings(cells: Sequence[Cell]) -> list[str]:
    """Who finds most, then the others: at the shortest length, and at the longest with a find."""
    lines = by_line(cells)
    lengths = _lengths(lines)
    last = _longest_found(lines)
    if last is None:
        return ["No passkey was found at any length."]
    sentences = [_ranking(lines, n) for n in dict.fromkeys((lengths[0], last))]
    if last < lengths[-1]:
        sentences.append(f"At more than {last:,} tokens, up to {lengths[-1]:,}, none is found.")
    return sentences


def needle_sections(cells: Sequence[Cell]) -> list[Section]:
    """A chart and a table for every kind of needle; a sentence where none was found."""
    sections, metric = [], cells[0]["metric"]
    for kind, lines in _kinds(cells).items():
        columns, rows = length_table(lines, lambda cell: f"{cell['recall']:.2f}")
        found = any(cell["recall"] for line in lines.values() for cell in line.values())
        sections.append(
            Section(
                f"Needles: {kind}",
                lead="" if found else f"Needles, {kind}: nothing was found at any length.",
                chart=_share_chart(lines, "recall", f"mean {metric}") if found else None,
                header=["prompt length in tokens", *columns],
                rows=rows,
                note=f"{METRICS[metric]}{_prompt_counts(lines)}.",
            )
        )
    return sections


def needle_tables(cells: Sequence[Cell]) -> list[Table]:
    """R-precision by prompt length for every kind, for the terminal."""
    tables: list[Table] = []
    for kind, lines in _kinds(cells).items():
        header, rows = length_table(lines, lambda cell: f"{cell['recall']:.2f}")
        tables.append(([f"{kind}: {cells[0]['metric']} at", *header], rows))
    return tables


def distance_edges(lines: Lines, trained: int) -> list[int]:
    """Edges of four ranges: up to the training length, then three with equal ratios."""
    longest = max(record["distance"] for line in lines.values() for record in _samples(line))
    if longest <= trained:
        return [0, longest]
    ratio = (longest / trained) ** (1 / 3)
    inner = [round(trained * ratio**i) for i in (1, 2)]
    return sorted({0, trained, *inner, longest})


def _kinds(cells: Sequence[Cell]) -> dict[str, Lines]:
    kinds = dict.fromkeys(cell["kind"] for cell in cells)
    return {kind: by_line(cell for cell in cells if cell["kind"] == kind) for kind in kinds}


def _prompt_counts(lines: Lines) -> str:
    """``, 50 prompts each``: how many prompts the cells of all lines have."""
    counts = {len(cell["samples"]) for line in lines.values() for cell in line.values()}
    return f", {' to '.join(map(str, sorted({min(counts), max(counts)})))} prompts each"


def _lengths(lines: Lines) -> list[int]:
    return sorted({length for line in lines.values() for length in line})


def _longest_found(lines: Lines) -> int | None:
    """The longest prompts in which a passkey was found."""
    found = {n for line in lines.values() for n, cell in line.items() if cell["accuracy"]}
    return max(found, default=None)


def _share_chart(lines: Lines, value: str, label: str) -> LineChart:
    """Shares against the prompt length; those of passkeys with their intervals."""
    drawn = curves(
        lines,
        lambda cell: cell[value],
        lambda cell: cell["wilson95"] if value == "accuracy" else None,
    )
    trained = training_length(lines)
    return LineChart(
        drawn,
        "prompt length in tokens",
        label,
        ticks=_lengths(lines),
        top=1.0,
        mark=(trained, "training length") if trained else None,
    )


def _ranked(lines: Lines, length: int) -> list[tuple[Cell, list[str]]]:
    """The best line of every model at a length, those with most passkeys first."""
    best: dict[str, tuple[str, Cell]] = {}
    for key, line in lines.items():
        if length in line and (
            key[0] not in best or line[length]["accuracy"] > best[key[0]][1]["accuracy"]
        ):
            best[key[0]] = line_label(key), line[length]
    shares: dict[float, tuple[Cell, list[str]]] = {}
    for label, cell in best.values():
        shares.setdefault(cell["accuracy"], (cell, []))[1].append(label)
    return [shares[share] for share in sorted(shares, reverse=True)]


def _lead(lines: Lines) -> str:
    last = _longest_found(lines)
    assert last is not None
    cell, labels = _ranked(lines, last)[0]
    finds = "find" if len(labels) > 1 else "finds"
    where = f"At {last:,} tokens{times_trained(lines, last)}"
    most = f" {finds} {cell['accuracy']:.0%} of the passkeys"
    return f"{where} {enumeration(labels)}{most}{', the most' if len(lines) > 1 else ''}."


def _ranking(lines: Lines, length: int) -> str:
    ranked = _ranked(lines, length)
    parts = [f"{enumeration(labels)} {cell['accuracy']:.2f}" for cell, labels in ranked]
    low, high = ranked[0][0]["wilson95"]
    where = f"At {length:,} tokens{times_trained(lines, length)}"
    first = f"{where}, share of passkeys found: {parts[0]} (95 % interval {low:.2f} to {high:.2f})"
    return f"{'; '.join([first, *parts[1:]])}."


def _accuracy(cell: Cell) -> Entry:
    hits, trials = sum(record["hit"] for record in cell["samples"]), len(cell["samples"])
    low, high = cell["wilson95"]
    return Entry(f"{cell['accuracy']:.2f}", f"{hits} of {trials}; {low:.2f}–{high:.2f}")


def _distance_sections(lines: Lines, trained: int) -> list[Section]:
    """The layouts of the paper's Figures 4 and 5."""
    conditions: dict[str, Keep] = {
        "at most": lambda r: r["distance"] <= trained,
        "more than": lambda r: r["distance"] > trained,
    }
    sections = []
    for where, keep in conditions.items():
        rows = {
            key: {n: s for n, cell in line.items() if (s := _share(cell["samples"], keep))}
            for key, line in lines.items()
        }
        lengths = sorted({n for line in rows.values() for n in line})
        if lengths:
            sections.append(
                Section(
                    f"Passkeys {where} {trained:,} tokens from the end",
                    text="The layout of the paper’s Figure 4: keys within and beyond the training "
                    "length, counted from the end of the prompt.",
                    header=["prompt length in tokens", *(f"{n:,}" for n in lengths)],
                    rows=[
                        [line_label(key), *(_share_text(line.get(n)) for n in lengths)]
                        for key, line in rows.items()
                    ],
                )
            )
    ranges = list(pairwise(distance_edges(lines, trained)))
    keeps = [lambda r, a=a, b=b: a < r["distance"] <= b for a, b in ranges]
    sections.append(
        Section(
            "Passkeys found, by distance",
            text="The layout of the paper’s Figure 5: all prompt lengths together, by the "
            "number of tokens between the key and the end of the prompt.",
            header=["distance in tokens", *(f"{low + 1:,} to {high:,}" for low, high in ranges)],
            rows=_share_rows(lines, keeps),
            note="Hits out of trials in each range, with Wilson’s 95 % interval.",
        )
    )
    return sections


def _samples(line: dict[int, Cell]) -> list[dict[str, Any]]:
    return [record for cell in line.values() for record in cell["samples"]]


def _share_rows(lines: Lines, keeps: Sequence[Keep]) -> list[list[str]]:
    """One row per line, one column per condition, from the samples of all prompt lengths."""
    return [
        [line_label(key), *(_share_text(_share(_samples(line), keep)) for keep in keeps)]
        for key, line in lines.items()
    ]


def _share(records: Sequence[dict[str, Any]], keep: Keep) -> tuple[int, int] | None:
    """Hits and trials of the samples that satisfy a condition; None without any."""
    hits = [record["hit"] for record in records if keep(record)]
    return (sum(hits), len(hits)) if hits else None


def _share_text(share: tuple[int, int] | None) -> str:
    if share is None:
        return "–"
    hits, trials = share
    low, high = wilson_interval(hits, trials) or (math.nan, math.nan)
    return f"{hits / trials:.2f} ({hits}/{trials}; {low:.2f}–{high:.2f})"
