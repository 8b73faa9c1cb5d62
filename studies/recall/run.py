"""The study of results/recall: trains and evaluates every trial that has no file yet.

    PYTHONPATH=src:. python -m studies.recall.run        # what is missing, for as long as it takes
    PYTHONPATH=src:. python -m studies.recall.run table  # write the tables of results/recall

Every arm of arms.yaml is trained with each learning rate of `RATES` and seed 100, then with the
best of them and the other seeds, then pairs of arms with one rate.
"""

import shutil
import sys
import time
from collections.abc import Collection, Iterator
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
from coca_lab.training.trainer import TrainingDiverged
from studies.verdict.rule import markdown

HERE = Path(__file__).parent
TRIALS, RUNS = Path("results/recall/trials"), Path("runs/recall")
PAGE = TRIALS.parent / "README.md"
RATES = (1.5e-3, 3e-3, 6e-3)
TUNING, SEEDS = 100, range(5)
LENGTH, LENGTHS = 64, (64, 128, 256, 1024)
LOADS, MOST = (4, 8, 16), 32
"""Pairs of a text: those of training, and twice as many, which do not fit into L."""
TEXTS, TEXT_SEED = 32, 1
SOLVED = 0.95
"""Share of right answers at L from which on a run has learned the task."""
OCTAVES = [1 << power for power in range(5, LENGTHS[-1].bit_length() - 1)]
"""Of distances in the longest texts."""
FAR = [octave for octave in OCTAVES if octave >= 4 * LENGTH]
PAIRS = [("roles-decay", "roles"), ("native", "roles"), ("roles", "rotary")]
PAIRS += [(arm, "rotary") for arm in ("strict", "magnitude", "pope", "thin")]
SAME_RATE = [("roles-decay", "roles", 1.5e-3), ("roles-decay", "roles", 6e-3)]
SAME_RATE += [("native", "roles", 6e-3)]
"""Pairs that were run with a common rate after the rule's had been, which differ in theirs."""
_COLUMNS = [f"at {LENGTH} tokens", f"at {LENGTHS[-1]:,}, {FAR[0]} tokens back or more"]
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
    also = dict.fromkeys((arm, rate) for *pair, rate in SAME_RATE for arm in pair)
    yield from ((arm, rate, seed) for arm, rate in also for seed in SEEDS)


def path_of(arm: str, rate: float, seed: int) -> Path:
    """The file of a trial."""
    return TRIALS / f"{arm}-{rate:g}-{seed}.json"


def best_rate(arm: str) -> float:
    """The learning rate with the most right answers at L, over all loads."""
    return max(RATES, key=lambda rate: share(read_json(path_of(arm, rate, TUNING)), LENGTH, LOADS))


def run_trial(arm: str, rate: float, seed: int) -> Trial:
    """Train, which resumes, and measure; a run that diverges has nothing measured."""
    options = {**read_arms()[arm], "training.learning_rate": rate, "training.seed": seed}
    recipe = load_recipe(HERE / "recipe.yaml", option_words(options))
    try:
        folder = train(recipe, RUNS / f"{arm}-{rate:g}-{seed}")
    except TrainingDiverged as error:
        return {"arm": arm, "rate": rate, "seed": seed, "measured": [], "diverged": str(error)}
    model, vocabulary = load_model(folder), recall_vocabulary(load_tokenizer(folder))
    trained, start = read_summary(folder), time.monotonic()
    measured = [
        measure_recall(model, vocabulary, length=n, pairs=pairs, texts=TEXTS, seed=TEXT_SEED)
        for n in LENGTHS
        for pairs in (*LOADS, MOST)
        if 4 * pairs <= n
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


def share(
    trial: Trial, length: int, loads: tuple[int, ...], octaves: Collection[int] | None = None
) -> float:
    """Right answers of those asked for; nan if there are none at distances of those octaves."""
    if "diverged" in trial:
        return 0.0
    asked = right = 0
    for cell in trial["measured"]:
        if cell["length"] == length and cell["pairs"] in loads:
            for octave, counts in cell["octaves"].items():
                if octaves is None or int(octave) in octaves:
                    asked, right = asked + counts[0], right + counts[1]
    return right / asked if asked else float("nan")


def read_runs() -> dict[str, list[Trial]]:
    """The trials of every arm with its best learning rate, seed by seed."""
    runs = {arm: with_rate(arm, best_rate(arm)) for arm in read_arms()}
    return {arm: of for arm, of in runs.items() if of}


def with_rate(arm: str, rate: float, seeds: Collection[int] = SEEDS) -> list[Trial]:
    """The trials of an arm with a learning rate, seed by seed."""
    files = (path_of(arm, rate, seed) for seed in seeds)
    return [read_json(file) for file in files if file.exists()]


def lengths_table(runs: dict[str, list[Trial]]) -> Iterator[list[str]]:
    """Right answers by length, and how many runs have learned the task."""
    yield ["arm", "rate", "learned", *(f"{length:,} tokens" for length in LENGTHS)]
    for arm, of in runs.items():
        learned = sum(share(trial, LENGTH, LOADS) >= SOLVED for trial in of)
        cells = [_mean([share(trial, length, LOADS) for trial in of]) for length in LENGTHS]
        yield [arm, f"{of[0]['rate']:g}", f"{learned} of {len(of)}", *cells]


def loads_table(runs: dict[str, list[Trial]]) -> Iterator[list[str]]:
    """Right answers by the number of pairs, in the shortest and the longest texts."""
    cells = [(LENGTH, pairs) for pairs in LOADS]
    cells += [(LENGTHS[-1], pairs) for pairs in (*LOADS, MOST)]
    yield ["arm", *(f"{length:,} tokens, {pairs} pairs" for length, pairs in cells)]
    for arm, of in runs.items():
        yield [arm, *(_mean([share(trial, n, (pairs,)) for trial in of]) for n, pairs in cells)]


def octaves_table(runs: dict[str, list[Trial]]) -> Iterator[list[str]]:
    """Right answers by octave of distance in the longest texts."""
    yield [f"distance, at {LENGTHS[-1]:,} tokens", *(f"{o:,} to {2 * o - 1:,}" for o in OCTAVES)]
    for arm, of in runs.items():
        every = ([share(t, LENGTHS[-1], LOADS, [octave]) for t in of] for octave in OCTAVES)
        yield [arm, *map(_mean, every)]


def rates_table(_: dict[str, list[Trial]]) -> Iterator[list[str]]:
    """Right answers of every arm with every learning rate, whatever the seed."""
    yield ["arm", "rate", "seeds", *_COLUMNS]
    for arm in read_arms():
        for rate in RATES:
            of = with_rate(arm, rate, (*SEEDS, TUNING))
            seeds = ", ".join(str(trial["seed"]) for trial in of)
            near = " ".join(f"{share(trial, LENGTH, LOADS):.2f}" for trial in of)
            yield [arm, f"{rate:g}", seeds, near, " ".join(f"{_far(trial):.2f}" for trial in of)]


def pairs_table(runs: dict[str, list[Trial]]) -> Iterator[list[str]]:
    """Differences of right answers between arms, seed by seed."""
    yield ["difference", *_COLUMNS]
    for arm, other in PAIRS:
        yield from _difference(f"{arm} − {other}", runs.get(arm, []), runs.get(other, []))


def same_rate_table(_: dict[str, list[Trial]]) -> Iterator[list[str]]:
    """The same for arms with one learning rate, which need not be their best."""
    yield ["difference, with one rate", *_COLUMNS]
    for arm, other, rate in SAME_RATE:
        found = with_rate(arm, rate), with_rate(other, rate)
        yield from _difference(f"{arm} − {other}, {rate:g}", *found)


def _difference(name: str, runs: list[Trial], others: list[Trial]) -> Iterator[list[str]]:
    """A row with the differences of runs with the same seed, if there are any."""
    by_seed = {trial["seed"]: trial for trial in others}
    both = [(trial, by_seed[trial["seed"]]) for trial in runs if trial["seed"] in by_seed]
    if both:
        near = [share(a, LENGTH, LOADS) - share(b, LENGTH, LOADS) for a, b in both]
        yield [name, _mean(near), _mean([_far(a) - _far(b) for a, b in both])]


def _far(trial: Trial) -> float:
    return share(trial, LENGTHS[-1], LOADS, FAR)


def _mean(values: list[float]) -> str:
    """The mean over seeds with Student's 95 % interval."""
    interval = mean_interval(values) or ()
    mean, *ends = (f"{round(x, 2) + 0.0:.2f}" for x in (sum(values) / len(values), *interval))
    return f"{mean} ({' to '.join(ends)})" if ends else mean


def write_tables() -> None:
    """Write the tables into the page."""
    runs = read_runs()
    tables = [pairs_table, lengths_table, loads_table, octaves_table, rates_table, same_rate_table]
    body = "\n\n".join(markdown(table(runs)) for table in tables)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{body}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    {"run": run, "table": write_tables}[(sys.argv[1:] or ["run"])[0]]()
