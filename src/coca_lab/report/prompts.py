"""Passkeys and needles in the report, passkeys in the layouts of the paper."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pandas as pd

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
    sections = [
        Section(
            title,
            _lead(lines, "accuracy", "of the passkeys"),
            " ".join(found),
            chart,
            header,
            rows,
            note,
        )
    ]
    sections += _sample_sections(_samples(lines), training_length(lines))
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
    last = _longest_found(lines, "accuracy")
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
        lead, chart = f"Needles, {kind}: nothing was found at any length.", None
        if _longest_found(lines, "recall"):
            lead = _lead(lines, "recall", f"of the facts ({kind})")
            chart = _share_chart(lines, "recall", f"mean {metric}")
        sections.append(
            Section(
                f"Needles: {kind}",
                lead=lead,
                chart=chart,
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


def distance_edges(longest: int, trained: int) -> list[int]:
    """Edges of four ranges: up to the training length, then three with equal ratios."""
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


def _longest_found(lines: Lines, value: str) -> int | None:
    """The longest prompts in which something was found."""
    found = {n for line in lines.values() for n, cell in line.items() if cell[value]}
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


def _ranked(lines: Lines, length: int, value: str) -> list[tuple[Cell, list[str]]]:
    """The best line of every model at a length, those that find most first."""
    best: dict[str, tuple[str, Cell]] = {}
    for key, line in lines.items():
        if length in line and (key[0] not in best or line[length][value] > best[key[0]][1][value]):
            best[key[0]] = line_label(key), line[length]
    shares: dict[float, tuple[Cell, list[str]]] = {}
    for label, cell in best.values():
        shares.setdefault(cell[value], (cell, []))[1].append(label)
    return [shares[share] for share in sorted(shares, reverse=True)]


def _lead(lines: Lines, value: str, what: str) -> str:
    """Who finds most in the longest prompts in which something was found."""
    last = _longest_found(lines, value) or 0
    cell, labels = _ranked(lines, last, value)[0]
    finds = "find" if len(labels) > 1 else "finds"
    where = f"At {last:,} tokens{times_trained(lines, last)}"
    most = ", the most" if len(lines) > 1 else ""
    return f"{where} {enumeration(labels)} {finds} {cell[value]:.0%} {what}{most}."


def _ranking(lines: Lines, length: int) -> str:
    ranked = _ranked(lines, length, "accuracy")
    parts = [f"{enumeration(labels)} {cell['accuracy']:.2f}" for cell, labels in ranked]
    low, high = ranked[0][0]["wilson95"]
    where = f"At {length:,} tokens{times_trained(lines, length)}"
    first = f"{where}, share of passkeys found: {parts[0]} (95 % interval {low:.2f} to {high:.2f})"
    return f"{'; '.join([first, *parts[1:]])}."


def _accuracy(cell: Cell) -> Entry:
    hits, trials = sum(record["hit"] for record in cell["samples"]), len(cell["samples"])
    low, high = cell["wilson95"]
    return Entry(f"{cell['accuracy']:.2f}", f"{hits} of {trials}; {low:.2f}–{high:.2f}")


def _samples(lines: Lines) -> pd.DataFrame:
    """A row for every prompt, with the label of its line and its length."""
    return pd.DataFrame(
        [
            {"line": line_label(key), "length": length, **record}
            for key, line in lines.items()
            for length, cell in line.items()
            for record in cell["samples"]
        ]
    )


def _sample_sections(samples: Any, trained: int | None) -> list[Section]:
    """The layouts of the paper's Figures 4 and 5, and the depth in the prompt."""
    sections, note = [], "Hits out of trials, with Wilson’s 95 % interval."
    if trained:
        text = (
            "The layout of the paper’s Figure 4: keys within and beyond the training length, "
            "counted from the end of the prompt."
        )
        near = samples["distance"] <= trained
        for where, some in (("at most", samples[near]), ("more than", samples[~near])):
            if len(some):
                lengths = some["length"].astype("category").cat.rename_categories("{:,}".format)
                header, rows = _shares(some, lengths, "prompt length in tokens")
                title = f"Passkeys {where} {trained:,} tokens from the end"
                sections.append(Section(title, "", text, None, header, rows, note))
        text = (
            "The layout of the paper’s Figure 5: all prompt lengths together, by the number of "
            "tokens between the key and the end of the prompt."
        )
        edges = distance_edges(samples["distance"].max(), trained)
        names = [f"{low + 1:,} to {high:,}" for low, high in pairwise(edges)]
        ranges = pd.cut(samples["distance"], edges, labels=names)
        header, rows = _shares(samples, ranges, "distance in tokens")
        sections.append(Section("Passkeys found, by distance", "", text, None, header, rows, note))
    quarters = ["first quarter", "second", "third", "last quarter"]
    edges = [0, 0.25, 0.5, 0.75, math.inf]
    depths = pd.cut(samples["depth"], edges, right=False, labels=quarters)
    header, rows = _shares(samples, depths, "depth in the prompt")
    title, text = "Passkeys found, by depth", "All prompt lengths together."
    return [*sections, Section(title, "", text, None, header, rows, note)]


def _shares(samples: pd.DataFrame, columns: Any, title: str) -> Table:
    """Share of hits with its interval: a row for every line, a column for every category."""
    table = samples.assign(column=columns).pivot_table(
        "hit", "line", "column", aggfunc=_share_text, sort=False, observed=True
    )
    names = [name for name in columns.cat.categories if name in table]
    rows = [[line, *row] for line, *row in table[names].fillna("–").itertuples()]
    return [title, *names], rows


def _share_text(hits: pd.Series) -> str:
    found, trials = int(hits.sum()), len(hits)
    low, high = wilson_interval(found, trials) or (math.nan, math.nan)
    return f"{found / trials:.2f} ({found}/{trials}; {low:.2f}–{high:.2f})"
