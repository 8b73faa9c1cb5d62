"""Trials of the project's own studies as cells: verdict, native, retrieval and SmolLM2.

A folder has a file for every trial in ``trials/``, or a line for every trial in ``*.jsonl``.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from coca_lab.intervals import DocumentScore, perplexity, perplexity_interval

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
    "strict": "CoCA-Strict",
    "magnitude": "CoCA-Magnitude",
    "pope": "PoPE",
    "thin": "thin keys",
    "roles-decay": "roles, decay",
    "decay": "roles, decay",
    "temperature": "roles, temperature",
    "no-sinks": "native, no sinks",
    "low-sinks": "native, low sinks",
    "random-context": "native, random N",
    "embedding-12": "native × 12",
    "decay-12": "roles, decay × 12",
    "neox-no-sinks": "roles, NeoX, bare",
    "neox-temperature": "roles, NeoX, temp.",
    "neox-decay": "roles, NeoX, decay",
    "dynamic": "dynamic NTK",
    "yarn": "YaRN",
    "rerope": "limited distances",
    "limited": "limited distances with a decay",
    "self-extend-4096": "Self-Extend",
}


def trial_files(path: Path) -> list[Path]:
    """The files with trials in a folder, or the file itself; none if there are none."""
    if path.suffix == ".jsonl" and path.is_file():
        return [path]
    return sorted([*path.glob("trials/*.json"), *path.glob("*.jsonl")])


def read_trials(files: Sequence[Path]) -> dict[str, Any]:
    """The content of a result file, from all trials that are no part of a search."""
    cells: list[dict[str, Any]] = []
    books: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for file in files:
        text = file.read_text(encoding="utf-8")
        lines = text.splitlines() if file.suffix == ".jsonl" else [text]
        for trial in map(json.loads, lines):
            if "nats" in trial:
                books.setdefault((trial["method"], trial["length"]), []).append(trial)
            elif trial.get("seed") != TUNING and not file.stem.endswith("x"):
                cells += _cells(trial)
    most = max(map(len, books.values()), default=0)
    cells += [_of_books(*about, of) for about, of in books.items() if len(of) == most]
    # The first of a method is drawn first.
    cells.sort(key=lambda c: (c["model"] != "native", not c["model"].startswith("roles")))
    return {"results": cells}


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
    name = trial.get("arm", trial.get("method", ""))
    about = {
        "model": WORDS.get(name, name),
        "scaling": "none",
        "training_seed": trial.get("seed", trial.get("text", 0)),
        "size": "",
        "training_length": 256,
    }
    measured = trial.get("measured", {})
    yield from (about | cell for cell in trial.get("cells", []))
    whole = measured.get("as trained", measured) if isinstance(measured, dict) else {}
    own = trial.get("text")
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
