"""Passkeys, in the layouts of the paper, and RULER's tasks in the report."""

import math
from collections.abc import Sequence
from itertools import pairwise, takewhile
from statistics import fmean
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
    line_label,
    strict_minus_slack,
    training_length,
)
from coca_lab.report.results import Cell, grouped
from coca_lab.report.section import Entry, Section, enumeration

LENGTH = "prompt length in tokens"
KEPT = 0.85
"""The share of its score that a model keeps up to a length."""


def prompt_facts(cell: Cell) -> dict[Any, Any]:
    """What the figures of prompts depend on; the tokenizer shows in the distances."""
    named = ("key", "expected", "depth", "depths", "distance", "distances")
    about = ("seed", "depths", "max_new_tokens", "chat")
    facts = {name: cell[name] for name in about if name in cell}
    prompts = [[sample.get(name) for name in named] for sample in cell.get("samples", [])]
    return {**facts, (cell.get("kind"), cell.get("length")): [cell.get("filler"), *prompts]}


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


def ruler_sections(cells: Sequence[Cell]) -> list[Section]:
    """The mean score over the tasks that all have, against the length; and every task's."""
    groups = grouped(cells, lambda cell: (line_label(cell), cell["length"])).values()
    shared = set.intersection(*({cell["kind"] for cell in group} for group in groups))
    tasks = [kind for kind in dict.fromkeys(cell["kind"] for cell in cells) if kind in shared]
    if not tasks:
        return []
    means = []
    for group in groups:
        scores = [x["score"] for c in group if c["kind"] in shared for x in c["samples"]]
        interval = wilson_interval(sum(scores), len(scores))
        means.append({**group[0], "score": fmean(scores), "wilson95": interval})
    frame = by_length(means, "length", "score", "wilson95")
    lead, last = _finding(frame, "of what RULER’s tasks ask for")
    header, rows = length_table(
        frame, f"mean of {len(tasks)} task{'s' * (len(tasks) > 1)} at", _score
    )
    lines = [frame[frame["line"] == line] for line in frame["line"].unique()]
    header = [*header, f"keeps {KEPT:.0%} up to"]
    rows = [[*row, _kept(line)] for row, line in zip(rows, lines, strict=True)]
    for task in tasks:
        of_task = by_length([c for c in cells if c["kind"] == task], "length", "score", "wilson95")
        for name, *entries in length_table(of_task, "", _score)[1]:
            rows.append([f"{name}: {task}", *entries, ""])
    chat = "in the chat template" if cells[0]["chat"] else "as plain text"
    section = Section(
        "RULER",
        lead or "Nothing that RULER’s tasks ask for was found at any length.",
        "",
        length_chart(frame, "tokens of prompt and answer", "mean score", top=1.0) if last else None,
        header,
        rows,
        f"Mean share of the expected strings in the answers, prompts {chat}. Small: Wilson’s 95 % "
        f"interval over prompts. {KEPT:.0%} of the score at the training context, or if it was not "
        "measured at the longest length below it, else at the shortest.",
    )
    return [section]


def _score(row: Any) -> Entry:
    return Entry(f"{row.y:.2f}", f"{row.low:.2f}–{row.high:.2f}")


def _kept(line: Frame) -> str:
    """The longest length up to which a model keeps `KEPT` of its score at its training length."""
    scores, trained = dict(zip(line["x"], line["y"], strict=True)), training_length(line)
    lengths = sorted(scores)
    first = max([n for n in lengths if trained and n <= trained], default=lengths[0])
    least = KEPT * scores[first]
    beyond = takewhile(lambda n: scores[n] >= least, [n for n in lengths if n >= first])
    last = [*beyond][-1]
    return "–" if not least else f"≥ {last:,}" if last == lengths[-1] else f"{last:,}"


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
