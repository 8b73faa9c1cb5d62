"""What the pages of studies are made of: tables in Markdown between two marks, and trials.

The tables of single studies are in files of their own: retrieval.py, native.py, extension.py, …
Their trials, in formats of their own, become a result file that ``coca report`` reads:

    PYTHONPATH=src:. python -m studies.pages results/verdict
    coca report runs/trials/verdict.json
"""

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coca_attention.errors import UserError
from coca_lab.files import write_json, write_text
from coca_lab.intervals import DocumentScore, mean_interval, perplexity, perplexity_interval
from coca_lab.report import read_results

BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
FOUND = 0.95
"""Share of passkeys from which on a model has learned to find them."""

TUNING = 100
"""Seed of the runs that chose a learning rate."""
SCORED = 1024
"""Tokens scored at the end of each of SmolLM2's books."""
WORDS = {  # of the letters and names of arms
    "a": "rotary",
    "b": "CoCA-Strict",
    "b1": "CoCA-Strict, signed",
    "b2": "CoCA-Magnitude, signed",
    "c": "thin keys",
    "d": "PoPE",
    "e": "roles",
    "f": "roles, thin keys",
    "g": "roles, strict keys",
    "g1": "roles, signed keys",
    "h": "mixed pairs",
    "decay": "roles, decay",
    "temperature": "roles, temperature",
    "no-sinks": "native, no sinks",
    "low-sinks": "native, low sinks",
    "random-context": "native, random N",
    "embedding-12": "native × 12",
    "decay-12": "roles, decay × 12",
    "neox-no-sinks": "roles, NeoX, bare",
    "neox-decay": "roles, NeoX, decay",
    "dynamic": "dynamic NTK",
    "yarn": "YaRN",
    "rerope": "limited distances",
    "limited": "limited distances with a decay",
    "self-extend-4096": "Self-Extend",
    "leaky": "leaky distances",
}


FACTS = (
    "task", "model", "scaling", "factor", "training_length", "training_seed", "size", "parameters",
    "window", "stride", "targets", "text", "tokens", "perplexity", "ci95",
    "length", "accuracy", "wilson95",
)  # fmt: skip
"""Of the cells that trials have already, what the report reads."""


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


# Trials as results


def cells_of(folder: Path) -> list[dict[str, Any]]:
    """The cells of all trials in a folder that are no part of a search."""
    cells: list[dict[str, Any]] = []
    books: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for file in sorted([*folder.glob("trials/*.json"), *folder.glob("*.jsonl")]):
        for trial in read_trials(file):
            if "nats" in trial:
                books.setdefault((trial["method"], trial["length"]), []).append(trial)
            elif trial.get("seed") != TUNING and not file.stem.endswith("x"):
                cells += _cells(trial)
    most = max(map(len, books.values()), default=0)
    cells += [_of_books(*about, of) for about, of in books.items() if len(of) == most]
    # The first of a method is drawn first.
    return sorted(cells, key=lambda c: (c["model"] != "native", not c["model"].startswith("roles")))


def _of_books(method: str, length: int, trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Perplexity of the last tokens of the same books."""
    documents = [
        {"id": str(trial["text"]), "nats": SCORED * trial["nats"], "tokens": SCORED}
        for trial in sorted(trials, key=lambda trial: trial["text"])
    ]
    scores = [DocumentScore.of(document) for document in documents]
    return {
        "task": "perplexity", "model": WORDS.get(method, method), "scaling": "none",
        "training_length": 8192, "window": length, "stride": SCORED, "targets": "last",
        "tokens": SCORED * len(documents), "documents": documents,
        "perplexity": perplexity(scores), "ci95": perplexity_interval(scores),
    }  # fmt: skip


def _cells(trial: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The cells of a trial: its perplexities or passkeys."""
    name = trial.get("arm", "")
    about = {
        "model": WORDS.get(name, name),
        "scaling": "none",
        "training_seed": trial.get("seed", 0),
        "size": "",
        "training_length": 256,
    }
    for cell in trial.get("cells", []):
        yield about | {fact: cell[fact] for fact in FACTS if fact in cell}
    whole = trial.get("measured", {}).get("as trained", {})
    own = trial.get("text")  # of a book its number
    texts = own if isinstance(own, list) else whole.get("text", [])
    longest = min((text["longest"] for text in texts), default=0)
    for text in texts:
        if text["longest"] == longest:
            nats = sum(text["nats"]) / sum(text["tokens"])
            limited = ", limited distances" * ("max_distance" in text)
            yield about | {
                "model": about["model"] + limited,
                "task": "perplexity", "window": text["window"], "perplexity": math.exp(nats)
            }  # fmt: skip
    for length, hits in whole.get("passkeys", {}).items():
        share = sum(hits) / len(hits)
        yield about | {"task": "passkey", "length": int(length), "accuracy": share}


def published(folder: Path) -> list[dict[str, Any]]:
    """The contents of a folder's result files; where it has trials alone, one of them."""
    if any(folder.glob("*.json")):
        return read_results([folder])
    title, _, _ = (folder / "README.md").read_text(encoding="utf-8").partition("\n")
    return [{"study": {"title": title.lstrip("# ")}, "results": cells_of(folder)}]


def main() -> None:
    """Write the result files of the folders that are named."""
    for word in sys.argv[1:]:
        folder = Path(word).resolve()
        (content,) = published(folder)
        write_json(Path("runs", "trials", f"{folder.name}.json"), content)


if __name__ == "__main__":
    main()
