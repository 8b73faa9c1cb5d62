"""The study of results/recall: trains and evaluates every trial that has no file yet.

    PYTHONPATH=src:. python -m studies.recall.run        # what is missing, for as long as it takes
    PYTHONPATH=src:. python -m studies.recall.run table  # write the tables of results/recall

Every arm of arms.yaml is trained with each learning rate of `RATES` and seed 100, then with the
best of them and the other seeds.
"""

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

import studies.verdict  # noqa: F401 (registers baseline_llama)
from coca_lab.arguments import option_words
from coca_lab.data import load_tokenizer
from coca_lab.data.tasks import recall_vocabulary
from coca_lab.environment import describe_environment
from coca_lab.evaluation.retrieval import measure_recall
from coca_lab.files import read_json, write_json
from coca_lab.intervals import mean_interval
from coca_lab.loading import load_model
from coca_lab.training import load_recipe, read_summary, train
from studies.verdict.rule import markdown

HERE = Path(__file__).parent
TRIALS, RUNS = Path("results/recall/trials"), Path("runs/recall")
PAGE = TRIALS.parent / "README.md"
RATES = (4.6e-4, 2.2e-3, 1e-2)
"""Those of Zoology (arXiv 2312.04927) but for its lowest, 1e-4."""
TUNING, SEEDS = 100, range(5)
LENGTH, LENGTHS = 256, (256, 512, 1024, 4096)
LOAD, LOADS = 16, (4, 8, 16, 32)
"""Pairs of a text, in the tables and in all."""
TEXTS, TEXT_SEED = 32, 1
SOLVED = 0.99
"""Share of right answers with `LOAD` pairs at L from which on a run has learned the task."""
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
Trial = dict[str, Any]


def read_arms() -> dict[str, dict[str, Any]]:
    """The options of every arm, by name, in their order."""
    return yaml.safe_load((HERE / "arms.yaml").read_text(encoding="utf-8"))


def run() -> None:
    """Run what is missing: learning rates first, then seed by seed."""
    torch.set_num_threads(1)
    for arm, rate, seed in trials():
        file = path_of(arm, rate, seed)
        if not file.exists():
            print(f"{time.strftime('%F %T')} {file.stem}", flush=True)
            write_json(file, run_trial(arm, rate, seed))


def trials() -> Iterator[tuple[str, float, int]]:
    """Arm, learning rate and seed of every trial; those of seeds follow from the rates' files."""
    yield from ((arm, rate, TUNING) for arm in read_arms() for rate in RATES)
    yield from ((arm, best_rate(arm), seed) for seed in SEEDS for arm in read_arms())


def path_of(arm: str, rate: float, seed: int) -> Path:
    """The file of a trial."""
    return TRIALS / f"{arm}-{rate:g}-{seed}.json"


def best_rate(arm: str) -> float:
    """The learning rate with the most right answers at L, over all loads."""
    return max(RATES, key=lambda rate: share(read_json(path_of(arm, rate, TUNING)), LENGTH, LOADS))


def run_trial(arm: str, rate: float, seed: int) -> Trial:
    """Train, which resumes, and measure."""
    options = {**read_arms()[arm], "training.learning_rate": rate, "training.seed": seed}
    recipe = load_recipe(HERE / "recipe.yaml", option_words(options))
    folder = train(recipe, RUNS / f"{arm}-{rate:g}-{seed}")
    model, vocabulary = load_model(folder), recall_vocabulary(load_tokenizer(folder))
    trained, start = read_summary(folder), time.monotonic()
    measured = [
        measure_recall(model, vocabulary, length=n, pairs=pairs, texts=TEXTS, seed=TEXT_SEED)
        for n in LENGTHS
        for pairs in LOADS
    ]
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return {
        "arm": arm,
        "rate": rate,
        "seed": seed,
        **{name: trained[name] for name in ("parameters", "steps", "tokens", "seconds")},
        "curve": [[entry["step"], entry["loss"]] for entry in trained["curve"]],
        "measured": measured,
        "evaluation_seconds": round(time.monotonic() - start),
        "environment": describe_environment(),
    }


def share(trial: Trial, length: int, loads: tuple[int, ...], octave: int | None = None) -> float:
    """Right answers of those asked for; nan if there are none at distances of that octave."""
    asked = right = 0
    for cell in trial["measured"]:
        if cell["length"] == length and cell["pairs"] in loads:
            counts = [cell["asked"], cell["right"]]
            if octave is not None:
                counts = cell["octaves"].get(str(octave), [0, 0])
            asked, right = asked + counts[0], right + counts[1]
    return right / asked if asked else float("nan")


def read_runs() -> dict[str, list[Trial]]:
    """The trials of every arm with its best learning rate, seed by seed."""
    runs: dict[str, list[Trial]] = {arm: [] for arm in read_arms()}
    for file in sorted(TRIALS.glob("*.json")):
        trial = read_json(file)
        if trial["seed"] != TUNING:
            runs[trial["arm"]].append(trial)
    return {arm: of for arm, of in runs.items() if of}


def lengths_table(runs: dict[str, list[Trial]]) -> Iterator[list[str]]:
    """Right answers by length and load, and how many runs have learned the task."""
    yield ["arm", "rate", "learned", *(f"{n:,}, {p} pairs" for n in LENGTHS for p in LOADS)]
    for arm, of in runs.items():
        learned = sum(share(trial, LENGTH, (LOAD,)) >= SOLVED for trial in of)
        cells = [_mean([share(t, n, (p,)) for t in of]) for n in LENGTHS for p in LOADS]
        yield [arm, f"{of[0]['rate']:g}", f"{learned} of {len(of)}", *cells]


def octaves_table(runs: dict[str, list[Trial]]) -> Iterator[list[str]]:
    """Right answers by octave of distance in the longest texts."""
    octaves = [1 << power for power in range(5, LENGTHS[-1].bit_length() - 1)]
    yield [f"distance, at {LENGTHS[-1]:,} tokens", *(f"{o:,} to {2 * o - 1:,}" for o in octaves)]
    for arm, of in runs.items():
        every = ([share(t, LENGTHS[-1], LOADS, octave) for t in of] for octave in octaves)
        yield [arm, *map(_mean, every)]


def _mean(values: list[float]) -> str:
    """The mean over seeds with Student's 95 % interval."""
    interval = mean_interval(values)
    ends = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    return f"{sum(values) / len(values):.2f}{ends}"


def write_tables() -> None:
    """Write the tables into the page."""
    runs = read_runs()
    body = "\n\n".join(markdown(table(runs)) for table in (lengths_table, octaves_table))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{body}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    {"run": run, "table": write_tables}[(sys.argv[1:] or ["run"])[0]]()
