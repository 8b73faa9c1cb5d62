"""The tables of results/smollm2/README.md, from the lines of its files.

PYTHONPATH=src:. python -m studies.smollm2.table
"""

import math
from pathlib import Path

import pandas as pd

from studies.pages import mean_and_interval, write_tables

RESULTS = Path("results/smollm2")
REFERENCE = "rerope"
ORDER = [
    "base", "dynamic", "yarn", "self-extend-4096", "self-extend-1024", "rerope", "limited",
    "rerope-4096", "rerope-2048", "drope",
]  # fmt: skip
FAR = 4096
"""Tokens from which on a number is far."""


def perplexities() -> str:
    """Perplexity, its ratio to the reference on the same books, and time, by length and method."""
    lines = pd.read_json(RESULTS / "perplexity.jsonl", lines=True)
    header = "| tokens | method | books | perplexity | beside limited distances | CPU seconds |"
    rows = [header, "|---|---|---|---|---|---|"]
    for length, read in lines.groupby("length"):
        nats = read.pivot_table(index="text", columns="method", values="nats")
        for method in [name for name in ORDER if name in nats]:
            own = nats[method].dropna()
            seconds = read[read.method == method].cpu_seconds.median()
            ratio = _ratio(nats, method) if REFERENCE in nats and method != REFERENCE else ""
            rows.append(
                f"| {length:,} | {method} | {len(own)} | {math.exp(own.mean()):.2f} | {ratio} "
                f"| {seconds:.0f} |"
            )
    return "\n".join(rows)


def _ratio(nats: pd.DataFrame, method: str) -> str:
    """Ratio of perplexities over the books that both have, and its 95 % interval."""
    differences = (nats[method] - nats[REFERENCE]).dropna().tolist()
    if not differences:
        return ""
    return mean_and_interval(differences, lambda nats: f"{math.exp(nats):.3f}")


def numbers() -> str:
    """Numbers found of those asked for, by method: near, and farther back than `FAR`."""
    lines = pd.read_json(RESULTS / "numbers.jsonl", lines=True)
    asked = lines.explode(["found", "distances"])
    asked["far"] = asked.distances > FAR
    rows = [f"| tokens | method | within {FAR:,} | farther |", "|---|---|---|---|"]
    for length, read in asked.groupby("length"):
        for method in [name for name in ORDER if name in set(read.method)]:
            cells = [
                read[(read.method == method) & (read.far == far)].found for far in (False, True)
            ]
            shares = " | ".join(
                f"{sum(cell)} of {len(cell)}" if len(cell) else "" for cell in cells
            )
            rows.append(f"| {length:,} | {method} | {shares} |")
    return "\n".join(rows)


def main() -> None:
    """Write both tables between their marks."""
    for name, table in (("perplexity", perplexities()), ("numbers", numbers())):
        marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
        write_tables(RESULTS / "README.md", table, *marks)


if __name__ == "__main__":
    main()
