"""What the trials say: the rule of results/verdict, its intervals and what is reported besides.

    python -m studies.verdict.rule     # writes the tables of results/verdict/README.md

Values are log perplexities, so a difference of 0.01 is one percent, and less is better.
"""

import math
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import ttest_rel

from coca_lab.files import read_json
from coca_lab.intervals import mean_interval
from studies.pages import markdown, mean_and_interval, percent, write_tables

TRIALS = "results/verdict/trials"

TUNING_SEED = 100
SEEDS, REPEATS = range(5), range(5, 10)
TIMES = 4
"""Some arms are also trained with so many times the steps."""

NEAR = 256
FAR, FARTHEST = 1024, 4096
MEASURES = {"near": (FAR, NEAR, None), "far": (FAR, FAR, None), "limited": (FAR, FAR, NEAR)}
"""By measure: the longest window of the same targets, the window, and the limit of distances."""
OTHERS = {"4,096": (FARTHEST, FARTHEST, None), "256, same documents": (FARTHEST, NEAR, None)}

RULE = [("b", "c"), ("b1", "c"), ("b2", "c"), ("g", "f"), ("g1", "f"), ("d", "a"), ("h", "a")]
"""Who has to beat whom."""
BESIDES = [(arm, "a") for arm in ("b", "b1", "b2", "c", "e", "f", "g", "g1")]
BESIDES += [(arm, "e") for arm in ("f", "g", "g1", "d")]

REPEATED = [(arm, name, other, name) for arm, other in RULE for name in MEASURES]
REPEATED += [(arm, name, "b", name) for arm in ("b1", "b2") for name in ("near", "far")]
REPEATED += [("b", "far", "c", "limited")]
"""Arm, measure, other arm and its measure, compared beyond the first seeds; outside the rule."""

EQUIVALENT = math.log(1.01)
DRAWS = 10_000

Trial = dict[str, Any]
"""What the file of a trial has."""
Runs = dict[tuple[str, int], Trial]
"""Final runs that ended, by arm and seed."""


def read_runs(folder: str | Path) -> tuple[list[Trial], Runs]:
    """All trials in the order of their names, and of them the final runs at the usual length."""
    trials = [read_json(path) for path in sorted(Path(folder).glob("*.json"))]
    return trials, {
        (each["arm"], each["seed"]): each
        for each in trials
        if each["seed"] != TUNING_SEED and each.get("times", 1) == 1
    }


def scores(run: Trial, place: tuple[int, int, int | None]) -> Trial:
    """Nats and tokens of every document at a place; empty where it was not measured."""
    cells = (x for x in run.get("text", ()) if (x["longest"], x["window"]) == place[:2])
    return next((x for x in cells if x.get("max_distance") == place[2]), {})


def value(run: Trial, place: tuple[int, int, int | None]) -> float:
    """Log perplexity at a place; infinite for a run that diverged, NaN if it was not measured."""
    if run["status"] != "finished":
        return math.inf
    cell = scores(run, place)
    return sum(cell["nats"]) / sum(cell["tokens"]) if cell else math.nan


def compare(runs: Runs, arm: str, other: str, measure: str, seeds: range) -> Trial | None:
    """The difference of two arms on a measure, or None before all seeds of both are measured.

    A run that diverged leaves no interval, and its arm does not win.
    """
    if any((name, seed) not in runs for name in (arm, other) for seed in seeds):
        return None
    pairs = [(runs[arm, seed], runs[other, seed]) for seed in seeds]
    first, second = np.array([[value(run, MEASURES[measure]) for run in pair] for pair in pairs]).T
    if np.isnan([first, second]).any():
        return None
    if np.isinf([first, second]).any():
        return {"diverged": True}
    test = ttest_rel(first, second)
    narrow = test.confidence_interval(0.9)
    return {
        "difference": float((first - second).mean()),
        "interval": [float(x) for x in test.confidence_interval(0.95)],
        "equivalent": bool(narrow.low > -EQUIVALENT and narrow.high < EQUIVALENT),
        "bootstrap": bootstrap(pairs, MEASURES[measure]),
        "correlation": float(np.corrcoef(first, second)[0, 1]),
    }


def bootstrap(pairs: list[tuple[Trial, Trial]], place: tuple[int, int, int | None]) -> list[float]:
    """95 % interval of the difference, with seeds and documents both drawn again."""
    cells = [[scores(run, place) for run in pair] for pair in pairs]
    nats = np.array([np.subtract(a["nats"], b["nats"]) for a, b in cells])
    tokens = np.array(cells[0][0]["tokens"])
    draw = np.random.default_rng(0)
    # How often every seed and every document is drawn.
    rows, columns = (draw.multinomial(n, np.full(n, 1 / n), DRAWS) for n in nats.shape)
    means = (rows @ nats * columns).sum(-1) / len(nats) / (columns @ tokens)
    return [float(x) for x in np.quantile(means, [0.025, 0.975])]


def wins(runs: Runs, arm: str, other: str, seeds: range) -> list[str]:
    """The measures on which an arm beats another by the rule, in the runs of some seeds."""
    found = {name: compare(runs, arm, other, name, seeds) for name in MEASURES}
    low_high = {
        name: each["interval"] for name, each in found.items() if each and "interval" in each
    }
    if not {"near", "far"} <= low_high.keys():
        return []
    better = {name: high < 0 for name, (_, high) in low_high.items()}
    worse = {name: low > 0 for name, (low, _) in low_high.items()}
    # Bare rotary attention collapses beyond its length: a win over it must hold with limits, too.
    far = better["far"] and (other != "a" or better.get("limited", False))
    won = {"near": better["near"] and not worse["far"], "far": far and not worse["near"]}
    return [name for name, is_so in won.items() if is_so]


def verdict(runs: Runs) -> list[Trial]:
    """All comparisons; of those that the rule names, who won and whether it was repeated."""
    found = []
    for arm, other in RULE + BESIDES:
        each: Trial = {"arm": arm, "other": other, "decides": (arm, other) in RULE}
        each |= {name: compare(runs, arm, other, name, SEEDS) for name in MEASURES}
        if each["decides"]:
            won = wins(runs, arm, other, SEEDS)
            again = wins(runs, arm, other, REPEATS)
            each |= {"wins": won, "repeated": [name for name in won if name in again]}
        found.append(each)
    return found


def arms_table(runs: Runs) -> Iterator[list[str]]:
    """Means of every arm over its seeds, as perplexities with 95 % intervals."""
    places = MEASURES | OTHERS
    yield ["arm", "seeds", *places]
    for arm, each in groupby(sorted(runs.items()), key=lambda item: item[0][0]):
        of_seeds = [run for _, run in each]
        cells = [_mean([value(run, place) for run in of_seeds]) for place in places.values()]
        yield [arm, ", ".join(str(run["seed"]) for run in of_seeds), *cells]


def _mean(values: list[float]) -> str:
    if any(map(math.isnan, values)):
        return ""
    if any(map(math.isinf, values)):
        return "diverged"
    return mean_and_interval(values, lambda nats: f"{math.exp(nats):.2f}")


def comparisons_table(compared: list[Trial]) -> Iterator[list[str]]:
    """The differences in percent of perplexity."""
    yield ["comparison", "measure", "difference, %", "95 %, seeds", "95 %, seeds × documents",
           "equivalent", "correlation", "wins"]  # fmt: skip
    for each in compared:
        for name in MEASURES:
            found = each[name]
            if not found:
                continue
            row = [f"{each['arm']} against {each['other']}", name]
            if "diverged" in found:
                yield [*row, "diverged", "", "", "", "", ""]
                continue
            won = name in each.get("wins", ())
            again = ", repeated" if name in each.get("repeated", ()) else ", not repeated"
            yield [*row, percent(found["difference"]), _ends(found["interval"]),
                   _ends(found["bootstrap"]), "yes" if found["equivalent"] else "no",
                   f"{found['correlation']:.2f}", f"yes{again}" if won else ""]  # fmt: skip


def repeats_table(runs: Runs) -> Iterator[list[str]]:
    """Differences in percent over the seeds that repeat wins, and over all."""
    every = range(SEEDS.start, REPEATS.stop)
    yield ["comparison", *(f"seeds {seeds[0]} to {seeds[-1]}, %" for seeds in (REPEATS, every))]
    for arm, measure, other, others in REPEATED:
        pairs = [(runs.get((arm, seed)), runs.get((other, seed))) for seed in every]
        differences = [
            value(one, MEASURES[measure]) - value(two, MEASURES[others])
            for one, two in pairs
            if one and two
        ]
        if len(differences) == len(every) and all(map(math.isfinite, differences)):
            cells = [
                f"{percent(sum(of) / len(of))} ({_ends(list(mean_interval(of) or ()))})"
                for of in (differences[len(SEEDS) :], differences)
            ]
            yield [f"{arm}, {measure}, against {other}, {others}", *cells]


def _ends(interval: list[float]) -> str:
    return " to ".join(map(percent, interval))


def trials_table(trials: list[Trial]) -> Iterator[list[str]]:
    """Every trial, with what it was trained with and what it came to."""
    yield ["arm", "learning rate", "seed", "steps", "status", "perplexity", "seconds"]
    for each in trials:
        place = (NEAR if each["seed"] == TUNING_SEED else FAR, NEAR, None)
        result = value(each, place)
        times = f"{each['times']} times" if each.get("times", 1) > 1 else ""
        yield [each["arm"], f"{each['learning_rate']:g}", str(each["seed"]), times, each["status"],
               f"{math.exp(result):.2f}" if math.isfinite(result) else "",
               f"{each.get('seconds', 0):.0f}"]  # fmt: skip


def main(folder: str = TRIALS) -> None:
    """Write the tables of the page beside a folder of trials."""
    trials, runs = read_runs(folder)
    compared = verdict(runs)
    longer = {(x["arm"], x["seed"]): x for x in trials if x.get("times") == TIMES}
    sections = {
        "Arms": markdown(arms_table(runs)),
        "Comparisons": markdown(comparisons_table(compared)),
        "Repetitions": markdown(repeats_table(runs)),
        f"{TIMES} times the steps": markdown(arms_table(longer)),
        "Trials": markdown(trials_table(trials)),
    }
    body = "".join(f"\n## {title}\n\n{text}\n" for title, text in sections.items())
    write_tables(Path(folder).parent / "README.md", body)


if __name__ == "__main__":
    main(*sys.argv[1:])
