"""The tables of results/native, from the files of its trials.

PYTHONPATH=src:. python -m studies.native
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coca_lab.files import read_json
from studies.pages import FOUND, begins, markdown, mean_and_interval, percent, write_tables

TRIALS = Path("results/native/trials")
ARMS = (
    "native", "no-sinks", "temperature", "decay", "random-context", "low-sinks", "neox-no-sinks",
    "neox-decay", "embedding-12", "decay-12",
)  # fmt: skip
LENGTH, TRAINED = 256, "as trained"
PASSKEYS = (256, 512, 1024, 4096, 16384)
TEXTS = [(4096, 256), (4096, 1024), (4096, 4096), (16384, 16384)]
"""Tokens that the documents are longer than, and the window."""
WITH_DECAY = {
    "decay": ("native", "no-sinks", "temperature", "random-context", "low-sinks"),
    "neox-decay": ("neox-no-sinks",),
    "decay-12": ("embedding-12",),
}
"""Arms without a decay, by the one with it in a like body."""
Trial = dict[str, Any]
"""What the file of a trial has."""
Trials = dict[str, list[Trial]]


def log_perplexity(measured: Trial, longest: int, window: int) -> float | None:
    """Nats per token in documents of some length; None where it was not measured."""
    for cell in measured["text"]:
        if (cell["longest"], cell["window"]) == (longest, window):
            return sum(cell["nats"]) / sum(cell["tokens"])
    return None


def arms_table(trials: Trials) -> Iterator[list[str]]:
    """Every arm, as trained and folded: means over seeds, and the passkeys of every seed."""
    learning = ["", "seeds", "learned to retrieve", "begins at step"]
    perplexity = ["perplexity 256", "1,024", "4,096", "16,384 (longer documents)"]
    yield [*learning, *perplexity, *(f"passkeys {n:,}" for n in PASSKEYS)]
    for arm, of in trials.items():
        for variant in of[0]["measured"]:
            measured = [trial["measured"][variant] for trial in of]
            found = {n: [x["passkeys"][str(n)] for x in measured] for n in PASSKEYS}
            shares = {n: [sum(hits) / len(hits) for hits in of_n] for n, of_n in found.items()}
            yield [
                arm if variant == TRAINED else f"{arm}, {variant}",
                ", ".join(str(trial["seed"]) for trial in of),
                f"{sum(share >= FOUND for share in shares[LENGTH])} of {len(of)}",
                ", ".join(begins(trial["validation"], LENGTH) for trial in of),
                *(_perplexity([log_perplexity(x, *place) for x in measured]) for place in TEXTS),
                *(", ".join(f"{share:.2f}" for share in each) for each in shares.values()),
            ]


def decay_table(trials: Trials) -> Iterator[list[str]]:
    """Perplexity without a decay against that with it, over the seeds that both have."""
    yield ["without a decay", "with it", "seeds", "perplexity 256", "4,096"]
    for base, arms in WITH_DECAY.items():
        for arm in arms:
            one, other = ({x["seed"]: x for x in trials.get(name, ())} for name in (arm, base))
            if seeds := sorted(one.keys() & other.keys()):
                cells = [
                    _difference([(one[seed], other[seed]) for seed in seeds], window)
                    for window in (LENGTH, 16 * LENGTH)
                ]
                yield [arm, base, ", ".join(map(str, seeds)), *cells]


def _difference(pairs: list[tuple[Trial, Trial]], window: int) -> str:
    """In percent, with the interval over seeds, and how many of them if not all were measured."""
    differences = []
    for pair in pairs:
        one, other = (log_perplexity(trial["measured"][TRAINED], 4096, window) for trial in pair)
        if one is not None and other is not None:
            differences.append(one - other)
    if not differences:
        return ""
    mean, *interval = mean_and_interval(differences, percent).split(" ", 1)
    return " ".join([mean, "%", *interval]) + _of(len(differences), len(pairs))


def _perplexity(nats: list[float | None]) -> str:
    found = [each for each in nats if each is not None]
    if not found:
        return ""
    return f"{math.exp(sum(found) / len(found)):.2f}" + _of(len(found), len(nats))


def _of(measured: int, seeds: int) -> str:
    return "" if measured == seeds else f" ({measured} of {seeds} seeds)"


if __name__ == "__main__":
    every = [read_json(path) for path in sorted(TRIALS.glob("*.json"))]
    by_arm = {arm: of for arm in ARMS if (of := [x for x in every if x["arm"] == arm])}
    tables = map(markdown, (arms_table(by_arm), decay_table(by_arm)))
    write_tables(TRIALS.parent / "README.md", "\n\n".join(tables))
