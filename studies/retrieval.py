"""The tables of results/retrieval, from runs of the study by ``coca study retrieval``.

    PYTHONPATH=src:. python -m studies.retrieval runs/retrieval/results.json

adds the trials of a run to trials.jsonl, without the text of answers, and writes the tables into
the page; without files it writes the tables. A trial that is there already stays as it is.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scipy.stats import fisher_exact

from coca_lab.intervals import wilson_interval
from coca_lab.old_names import OLD_METHODS
from studies.pages import (
    FOUND,
    begins,
    markdown,
    mean_and_interval,
    percent,
    read_trials,
    write_tables,
)

PAGE = Path("results/retrieval/README.md")
TRIALS = PAGE.parent / "trials.jsonl"
LENGTH = 256
CONTROLS = {
    "llama 8 x 4000": "llama",
    "llama 16 x 4000": "llama",
    "llama decay": "llama",
    "llama embeddings x 12": "llama",
    "llama rate 6e-3": "llama",
    "olmo": "llama",
    "llama decay 8 x 4000": "llama decay",
    "neox": "neox sequential",
}
"""By the rule of the page: an arm, and what it changes one factor of."""
PERPLEXITIES = [(256, "none"), (4096, "none"), (4096, "temperature")]
PASSKEYS = [(4096, "none"), (16384, "none"), (4096, "temperature"), (16384, "temperature")]
"""Columns of the table: a length, and a scaling."""
STOCK, DECAY = "cohere 8 x 4000", "cohere decay 8 x 4000"
Trial = dict[str, Any]


def add(path: Path) -> None:
    """Append the trials of a run that the file does not have."""
    known = {(trial["arm"], trial["seed"]) for trial in read_trials(TRIALS)}
    run = json.loads(path.read_text(encoding="utf-8"))
    with TRIALS.open("a", encoding="utf-8") as file:
        for training in run["training"]:
            arm = training["name"]
            seed = training["seed"]
            cells = [
                {
                    name: value
                    for name, value in cell.items()
                    if name not in ("samples", "documents")
                }
                for cell in run["results"]
                if (cell["model"], cell["training_seed"]) == (arm, seed)
            ]
            if cells and (arm, seed) not in known:
                facts = ("parameters", "steps", "tokens", "seconds", "validation")
                trial = {"arm": arm, "seed": seed, **{name: training[name] for name in facts}}
                trial |= {"cells": cells, "environment": run["environment"]}
                file.write(json.dumps(trial) + "\n")


def value(trial: Trial, name: str, length: int, scaling: str) -> float | None:
    """A measurement of a trial: ``accuracy`` or ``perplexity`` at a length or window."""
    for cell in trial["cells"]:
        place = cell.get("length") or cell.get("window")
        made = OLD_METHODS.get(cell["scaling"], cell["scaling"])
        if name in cell and (place, made) == (length, scaling):
            return cell[name]
    return None


def learned(trial: Trial) -> bool:
    """Whether passkeys are found at the training length."""
    return (value(trial, "accuracy", LENGTH, "none") or 0.0) >= FOUND


def reads_far(trial: Trial) -> bool:
    """Whether passkeys are found at 16 L, and at 64 L with the temperature for it."""
    folded = value(trial, "accuracy", 64 * LENGTH, "temperature")
    farthest = value(trial, "accuracy", 64 * LENGTH, "none") if folded is None else folded
    return min(value(trial, "accuracy", 16 * LENGTH, "none") or 0.0, farthest or 0.0) >= FOUND


def in_one_folder(trial: Trial) -> bool | None:
    """Whether passkeys of L, 16 L and 64 L are found, folded for 64 L; None without a fold."""
    lengths = (LENGTH, 16 * LENGTH, 64 * LENGTH)
    found = [value(trial, "accuracy", length, "temperature") for length in lengths]
    known = [each for each in found if each is not None]
    return min(known) >= FOUND if len(known) == len(lengths) else None


def arms_table(arms: dict[str, list[Trial]]) -> Iterator[list[str]]:
    """What every arm learned, and what it reads."""
    yield [
        "arm", "seeds", "learned", "95 % interval", "reads far", "in one folder", "begins at step",
        "perplexity 256", "4,096", "4,096, folded for 64 L", "passkeys 4,096", "16,384",
        "4,096, folded for 64 L", "16,384, folded for 64 L",
    ]  # fmt: skip
    for arm, of in arms.items():
        count = sum(map(learned, of))
        folded = [found for trial in of if (found := in_one_folder(trial)) is not None]
        low, high = wilson_interval(count, len(of)) or (0.0, 1.0)
        yield [
            arm,
            ", ".join(str(trial["seed"]) for trial in of),
            f"{count} of {len(of)}",
            f"{low:.2f} to {high:.2f}",
            f"{sum(map(reads_far, of))} of {len(of)}",
            f"{sum(folded)} of {len(folded)}" if folded else "",
            ", ".join(begins(trial["validation"], LENGTH) for trial in of),
            *(_perplexity(of, *at) for at in PERPLEXITIES),
            *(_shares(of, *at) for at in PASSKEYS),
        ]


def _perplexity(trials: list[Trial], window: int, scaling: str) -> str:
    """exp of the mean over seeds of mean nats; empty where it was not measured."""
    found = [each for t in trials if (each := value(t, "perplexity", window, scaling))]
    return f"{math.exp(sum(map(math.log, found)) / len(found)):.2f}" if found else ""


def _shares(trials: list[Trial], length: int, scaling: str) -> str:
    found = [value(trial, "accuracy", length, scaling) for trial in trials]
    return ", ".join(f"{each:.2f}" for each in found if each is not None)


def factors_table(arms: dict[str, list[Trial]]) -> Iterator[list[str]]:
    """One factor at a time: seeds that learned, over the seeds that both arms have."""
    yield ["arm", "control", "seeds", "learned", "the control", "Fisher's p, one side"]
    for arm, control in CONTROLS.items():
        seeds = {t["seed"] for t in arms.get(arm, ())} & {t["seed"] for t in arms.get(control, ())}
        if seeds:
            one, other = (
                sum(learned(trial) for trial in arms[name] if trial["seed"] in seeds)
                for name in (arm, control)
            )
            n = len(seeds)
            table = [[one, n - one], [other, n - other]]
            p = fisher_exact(table, alternative="greater")[1]  # pyright: ignore[reportIndexIssue]
            yield [arm, control, str(n), str(one), str(other), f"{p:.3f}"]


def decay_line(arms: dict[str, list[Trial]]) -> str:
    """What the decay does to perplexity at 16 L, over the seeds that both arms have."""
    stock, decay = (
        {trial["seed"]: value(trial, "perplexity", 4096, scaling) for trial in arms.get(arm, ())}
        for arm, scaling in ((STOCK, "temperature"), (DECAY, "none"))
    )
    seeds = sorted(stock.keys() & decay.keys())
    if not seeds:
        return ""
    nats = [math.log((decay[seed] or math.nan) / (stock[seed] or math.nan)) for seed in seeds]
    return (
        f"Perplexity at 4,096 tokens of {DECAY}, beside {STOCK} folded for 64 L: "
        f"{mean_and_interval(nats, percent)} %, seeds {', '.join(map(str, seeds))}."
    )


def main() -> None:
    """Add the files that are named, and write the tables."""
    for word in sys.argv[1:]:
        add(Path(word))
    arms: dict[str, list[Trial]] = {}
    for trial in sorted(read_trials(TRIALS), key=lambda trial: trial["seed"]):
        arms.setdefault(trial["arm"], []).append(trial)
    parts = markdown(arms_table(arms)), markdown(factors_table(arms)), decay_line(arms)
    write_tables(PAGE, "\n\n".join(filter(None, parts)))


if __name__ == "__main__":
    main()
