"""The table of results/smollm2/README.md, from the lines of perplexity.jsonl.

PYTHONPATH=src:. python -m studies.smollm2.table
"""

import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from studies.pages import markdown, mean_and_interval, write_tables

RESULTS = Path("results/smollm2")
REFERENCE = "rerope"
ORDER = [
    "base", "dynamic", "yarn", "self-extend-4096", "self-extend-1024", "rerope", "limited",
    "rerope-4096", "rerope-2048", "drope",
]  # fmt: skip


def perplexities() -> Iterator[list[str]]:
    """Perplexity, its ratio to the reference on the same books, and time, by length and method."""
    lines = pd.read_json(RESULTS / "perplexity.jsonl", lines=True)
    yield ["tokens", "method", "books", "perplexity", "beside limited distances", "CPU seconds"]
    for length, read in lines.groupby("length"):
        nats = read.pivot_table(index="text", columns="method", values="nats")
        for method in [name for name in ORDER if name in nats]:
            own, ratio = nats[method].dropna(), ""
            if REFERENCE in nats and method != REFERENCE:
                differences = (nats[method] - nats[REFERENCE]).dropna().tolist()
                ratio = mean_and_interval(differences, lambda nats: f"{math.exp(nats):.3f}")
            seconds = f"{read[read.method == method].cpu_seconds.median():.0f}"
            figures = [str(len(own)), f"{math.exp(own.mean()):.2f}", ratio, seconds]
            yield [f"{length:,}", method, *figures]


if __name__ == "__main__":
    marks = "<!-- perplexity -->", "<!-- end of perplexity -->"
    write_tables(RESULTS / "README.md", markdown(perplexities()), *marks)
