"""The tables of results/smollm2/README.md, from the files beside it.

PYTHONPATH=src:. python -m studies.smollm2.table
"""

import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from coca_lab.data.ruler import RULER_TASKS
from coca_lab.evaluation.needles import scores_of
from coca_lab.evaluation.task import Cell
from coca_lab.files import read_json
from coca_lab.intervals import DocumentScore, differences, mean_nats, nats_interval
from studies.pages import markdown, mean_and_interval, write_tables

RESULTS = Path("results/smollm2")
REFERENCE = "rerope"
STRING = {"shifted": "STRING without its factor"}
"""What the files call `shifted`, which is another method today."""
ORDER = [
    "base", "dynamic", "yarn", "self-extend-4096", "self-extend-1024", "leaky", "rerope", "limited",
    "rerope-4096", "rerope-2048", "drope",
]  # fmt: skip


def perplexities(folder: Path) -> Iterator[list[str]]:
    """Perplexity, its ratio to the reference on the same books, and time, by length and method."""
    lines = pd.read_json(folder / "perplexity.jsonl", lines=True)
    yield ["tokens", "method", "books", "perplexity", "beside limited distances", "CPU seconds"]
    for length, read in lines.groupby("length"):
        nats = read.pivot_table(index="text", columns="method", values="nats")
        for method in [name for name in ORDER if name in nats]:
            own = nats[method].dropna()
            ratio = ""
            if REFERENCE in nats and method != REFERENCE:
                differences = (nats[method] - nats[REFERENCE]).dropna().tolist()
                ratio = mean_and_interval(differences, lambda nats: f"{math.exp(nats):.3f}")
            seconds = f"{read[read.method == method].cpu_seconds.median():.0f}"
            figures = [str(len(own)), f"{math.exp(own.mean()):.2f}", ratio, seconds]
            yield [f"{length:,}", method, *figures]


def scores() -> Iterator[list[str]]:
    """RULER's scores in percent by length and method, and their mean over the tasks."""
    lines = pd.read_json(RESULTS / "ruler.jsonl", lines=True)
    tasks = [task for task in RULER_TASKS if task in set(lines.text)]
    yield ["tokens", "method", "prompts", *tasks, "mean", "minus limited distances"]
    for (length, dtype), asked in lines.groupby(["length", "dtype"], sort=False):
        # By method a table of tasks and prompts; methods answer the same prompts.
        found = {
            method: 100 * pd.DataFrame([*read.scores], read.text)
            for method, read in asked.groupby("method")
        }
        for method in [name for name in ORDER if name in found]:
            table = found[method]
            difference = ""
            # Prompts of different tasks are independent, so the i-th of all tasks are one draw.
            mean = mean_and_interval(table.mean().tolist(), "{:.0f}".format)
            if REFERENCE in found and method != REFERENCE:
                paired = (table - found[REFERENCE]).dropna(axis=1)
                difference = mean_and_interval(paired.mean().tolist(), "{:+.0f}".format)
            by_task = dict(zip(table.index, map("{:.0f}".format, table.mean(axis=1)), strict=True))
            figures = [*(by_task.get(task, "") for task in tasks), mean, difference]
            yield [f"{length:,} ({dtype})", method, str(table.shape[1]), *figures]


def needles(file: Path) -> Iterator[list[str]]:
    """Nats a digit of the numbers up to L back and farther back, by method, the best beyond first.

    Differences are from the best, paired over books.
    """
    cells: list[Cell] = read_json(file)["results"]
    cells = [cell for cell in cells if cell["length"] > cell["near"]]
    cells.sort(key=lambda cell: cell["ranges"]["beyond"]["nats"])
    yield [
        "method", "nats a digit, up to L back", "farther back", "minus the first's",
        "found, up to L back", "farther back",
    ]  # fmt: skip
    best = scores_of(cells[0]["documents"], cells[0]["near"], beyond=True)
    for cell in cells:
        row = [STRING.get(cell["scaling"], cell["scaling"])]
        for figures in cell["ranges"].values():
            low, high = figures["ci95"]
            row.append(f"{figures['nats']:.2f} ({low:.2f} to {high:.2f})")
        pairs = differences(scores_of(cell["documents"], cell["near"], beyond=True), best)
        low, high = nats_interval(pairs) or (0.0, 0.0)
        row.append(
            "" if cell is cells[0] else f"{mean_nats(pairs):+.2f} ({low:+.2f} to {high:+.2f})"
        )
        row += [f"{each['found']} of {each['needles']}" for each in cell["ranges"].values()]
        yield row


def texts(file: Path) -> Iterator[list[str]]:
    """Perplexity by method and tokens read, and its ratio to a control on the same books.

    The control within L is the model as it is, and beyond L what one has without a method: the
    last L tokens alone.
    """
    cells: list[Cell] = read_json(file)["results"]
    read = {
        (cell["scaling"], cell["window"]): [DocumentScore.of(each) for each in cell["documents"]]
        for cell in cells
    }
    lengths = sorted({window for _, window in read})
    yield [
        "method", *(f"{length:,} tokens, beside as it is" for length in lengths[:-1]),
        f"{lengths[-1]:,} tokens, beside the last {lengths[-2]:,} alone",
    ]  # fmt: skip
    for method in dict.fromkeys(cell["scaling"] for cell in cells):
        row = [STRING.get(method, method)]
        for length in lengths:
            control = ("none", length) if length < lengths[-1] else ("attend-last", lengths[-2])
            scores = read.get((method, length))
            if scores is None:
                row.append("")
                continue
            figures = f"{math.exp(mean_nats(scores)):.2f}"
            if (method, length) != control:
                pairs = differences(scores, read[control])
                low, high = (math.exp(nats) for nats in nats_interval(pairs) or (0.0, 0.0))
                figures += f", {math.exp(mean_nats(pairs)):.3f} ({low:.3f} to {high:.3f})"
            row.append(figures)
        yield row


if __name__ == "__main__":
    tables = {"perplexity": perplexities(RESULTS), "ruler": scores()}
    tables["needles"] = needles(RESULTS / "needles/results.json")
    tables["texts"] = texts(RESULTS / "texts/results.json")
    tables["gemma"] = perplexities(RESULTS / "gemma3")
    for name, rows in tables.items():
        marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
        write_tables(RESULTS / "README.md", markdown(rows), *marks)
