"""Passkeys and needles in the report, passkeys in the layouts of the paper."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from coca_lab.intervals import wilson_interval
from coca_lab.report.charts import Frame
from coca_lab.report.lengths import (
    at_tokens,
    best_of_models,
    by_length,
    length_chart,
    length_table,
    lengths_of,
    strict_minus_slack,
    training_length,
)
from coca_lab.report.results import Cell, grouped
from coca_lab.report.section import Entry, Section, enumeration, span

LENGTH = "prompt length in tokens"
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
    frame = by_length(cells, "length", "accuracy", "wilson95")
    lead, last = _finding(frame, "of the passkeys")
    longest = lengths_of(frame)[-1]
    section = Section(
        "Passkeys found, by prompt length",
        lead or "No passkey was found at any length.",
        f"At more than {last:,} tokens, up to {longest:,}, none is found."
        if 0 < last < longest
        else "",
        length_chart(frame, LENGTH, "share of passkeys found", top=1.0) if last else None,
        *length_table(frame, "passkeys found at", _accuracy),
        "Small: passkeys found of all prompts, and Wilson’s 95 % interval of the share.",
    )
    if not last:
        return [section]
    title = "Strict minus slack: passkeys found"
    return [section, *_sample_sections(frame), *strict_minus_slack(frame, title, LENGTH)]


def needle_sections(cells: Sequence[Cell]) -> list[Section]:
    """A chart and a table for every kind of needle; a sentence where none was found."""
    sections, metric = [], cells[0]["metric"]
    for kind, of_kind in grouped(cells, lambda cell: cell["kind"]).items():
        frame = by_length(of_kind, "length", "recall")
        lead, last = _finding(frame, f"of the facts ({kind})")
        prompts = span((len(cell["samples"]) for cell in frame["cell"]), "")
        sections.append(
            Section(
                f"Needles: {kind}",
                lead or f"Needles, {kind}: nothing was found at any length.",
                "",
                length_chart(frame, LENGTH, f"mean {metric}", top=1.0) if last else None,
                *length_table(frame, f"{kind}: {metric} at", lambda row: f"{row.y:.2f}"),
                f"{METRICS[metric]}, {prompts} prompts each.",
            )
        )
    return sections


def distance_edges(longest: int, trained: int) -> list[int]:
    """Edges of four ranges: up to the training length, then three with equal ratios."""
    if longest <= trained:
        return [0, longest]
    return [0, *np.unique(np.geomspace(trained, longest, 4).round().astype(int)).tolist()]


def _finding(frame: Frame, what: str) -> tuple[str, int]:
    """Who finds most in the longest prompts in which something was found, and their length or 0."""
    last = max(frame["x"][frame["y"] > 0].tolist(), default=0)
    if not last:
        return "", 0
    best = best_of_models(frame, last, -1)
    names = best["line"][best["shown"] == best["shown"].iloc[0]].tolist()
    finds = "find" if len(names) > 1 else "finds"
    most = ", the most" if frame["line"].nunique() > 1 else ""
    share = f"{best['y'].iloc[0]:.0%}"
    return f"{at_tokens(frame, last)} {enumeration(names)} {finds} {share} {what}{most}.", last


def _accuracy(row: Any) -> Entry:
    hits, trials = sum(record["hit"] for record in row.cell["samples"]), len(row.cell["samples"])
    return Entry(f"{row.y:.2f}", f"{hits} of {trials}; {row.low:.2f}–{row.high:.2f}")


def _sample_sections(frame: Frame) -> list[Section]:
    """The layout of the paper's Figure 5."""
    trained = training_length(frame)
    if not trained:
        return []
    samples: Frame = pd.DataFrame(
        {"line": row.line, **record}
        for row in frame[["line", "cell"]].itertuples()
        for record in row.cell["samples"]
    )
    edges = distance_edges(samples["distance"].max(), trained)
    names = [f"{low + 1:,} to {high:,}" for low, high in pairwise(edges)]
    ranges = pd.cut(samples["distance"], edges, labels=names)
    text = (
        "The layout of the paper’s Figure 5: all prompt lengths together, by the number of tokens "
        "between the key and the end of the prompt."
    )
    title = "Passkeys found, by distance"
    return [_shares(title, text, samples, ranges, "distance in tokens")]


def _shares(title: str, text: str, samples: Frame, columns: Any, of: str) -> Section:
    """Share of hits with its interval: a row for every line, a column for every category."""
    table = samples.assign(column=columns).pivot_table(
        "hit", "line", "column", aggfunc=_share_text, sort=False, observed=True
    )
    names = [name for name in columns.cat.categories if name in table]
    rows = [[line, *row] for line, *row in table[names].fillna("–").itertuples()]
    note = "Hits out of trials, with Wilson’s 95 % interval."
    return Section(title, "", text, None, [of, *names], rows, note, printed=False)


def _share_text(hits: Any) -> str:
    hit, trials = int(hits.sum()), len(hits)
    low, high = wilson_interval(hit, trials) or (math.nan, math.nan)
    return f"{hit / trials:.2f} ({hit}/{trials}; {low:.2f}–{high:.2f})"
