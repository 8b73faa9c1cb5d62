"""What the pages of studies are made of: trials, tables in Markdown between two marks, differences.

Formats of single studies are in their own files: retrieval_tables.py, native.py, trials.py, …
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coca_attention.errors import UserError
from coca_lab.files import write_text
from coca_lab.intervals import mean_interval

BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
FOUND = 0.95
"""Share of passkeys from which on a model has learned to find them."""


def read_trials(file: Path) -> list[dict[str, Any]]:
    """The trials of a file, in their order: one in every line of .jsonl, else one in all."""
    text = file.read_text(encoding="utf-8")
    return [
        json.loads(trial) for trial in (text.splitlines() if file.suffix == ".jsonl" else [text])
    ]


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; the first row is its head, and without others there is none."""
    head, *body = rows
    if not body:
        return "Not run yet."
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])


def write_tables(page: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Put text between the marks of a page; UserError if it has none."""
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise UserError(f"{page} has no place for tables: write {begin} and {end} on two lines")
    write_text(page, f"{before}{begin}\n{text}\n{end}{after}")


def mean_and_interval(values: Sequence[float], show: Callable[[float], str]) -> str:
    """The mean over seeds with Student's 95 % interval: of differences by seed, a paired one."""
    if not values:
        return ""
    mean, *ends = map(show, (sum(values) / len(values), *(mean_interval(values) or ())))
    return f"{mean} ({' to '.join(ends)})" if ends else mean


def percent(nats: float) -> str:
    """A difference of log perplexities as one of perplexities, in percent."""
    return f"{100 * math.expm1(nats):+.1f}"


def begins(validation: Iterable[Mapping[str, Any]], length: int) -> str:
    """The first step from which on at least half of the passkeys of a length are always found."""
    first = None
    for entry in validation:
        found = entry["retrieval"][f"passkey_{length}"] >= 0.5
        first = (first or entry["step"]) if found else None
    return str(first or "never")
