"""The tables of results/recall, from what `coca study recall` has measured.

PYTHONPATH=src:. python -m studies.recall.tables
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from coca_attention.errors import UserError
from coca_lab.files import read_json
from studies.pages import markdown, mean_and_interval, write_tables

RESULTS = Path("results/recall/results.json")
LENGTH, LENGTHS = 64, (64, 128, 256, 1024)
LOADS, MOST = (4, 8, 16), 32
"""Pairs of a text: those of training, and twice as many, which do not fit into L."""
SOLVED = 0.95
"""Share of right answers at L from which on a run has learned the task."""
OCTAVES = [1 << power for power in range(5, LENGTHS[-1].bit_length() - 1)]
"""Of distances in the longest texts."""
FAR = [octave for octave in OCTAVES if octave >= 4 * LENGTH]
PAIRS = [("roles-decay", "roles"), ("native", "roles"), ("roles", "rotary")]
PAIRS += [(arm, "rotary") for arm in ("strict", "magnitude", "pope", "thin")]
PAIRS += [("cohere-decay", "cohere-roles"), ("cohere2", "cohere-roles")]
SAME_RATE = [("roles-decay", "roles", 1.5e-3), ("roles-decay", "roles", 6e-3)]
SAME_RATE += [("native", "roles", 6e-3)]
"""Pairs that were run with a common rate after the rule's had been, which differ in theirs."""
_COLUMNS = [f"at {LENGTH} tokens", f"at {LENGTHS[-1]:,}, {FAR[0]} tokens back or more"]
Frame = Any
"""A frame or a series, whose columns pandas has no types for."""
Arms = dict[str, Frame]
"""The answers of every arm."""
_NAMES = ["arm", "rate", "seed", "tried", "best", "length", "pairs", "octave", "asked", "right"]


def read_answers(path: Path) -> Frame:
    """Answers asked for and right ones by run and place; UserError if a trial has failed.

    A run is an arm, a rate and a seed; those with the rate that was chosen are ``best``, those by
    which it was chosen ``tried``.
    """
    content = read_json(path)
    rows = []
    if content["failures"]:
        failed = ", ".join(content["failures"])
        raise UserError(f"{path}: the tables need all trials, and these failed: {failed}")
    for tried, cells in ((False, content["results"]), (True, content["tuning"]["results"])):
        for cell in cells:
            arm, _, rate = cell["model"].partition(" at ")
            run = (arm, cell["learning_rate"], cell["training_seed"], tried, not (tried or rate))
            counts = cell["octaves"].items()
            rows += [(*run, cell["length"], cell["pairs"], int(o), *each) for o, each in counts]
    return pd.DataFrame(rows, columns=pd.Index(_NAMES))


def shares(
    answers: Frame,
    length: int,
    loads: Collection[int],
    octaves: Collection[int] | None = None,
) -> Frame:
    """Right answers of those asked for, by seed; at all distances, or those of some octaves."""
    chosen = answers[(answers.length == length) & answers.pairs.isin(loads)]
    if octaves is not None:
        chosen = chosen[chosen.octave.isin(octaves)]
    sums = chosen.groupby("seed")[["right", "asked"]].sum()
    return sums.right / sums.asked


def _near(answers: Frame) -> Frame:
    return shares(answers, LENGTH, LOADS)


def _far(answers: Frame) -> Frame:
    return shares(answers, LENGTHS[-1], LOADS, FAR)


def _mean(values: Frame) -> str:
    return mean_and_interval(values.tolist(), lambda x: f"{round(x, 2) + 0.0:.2f}")


def lengths_table(arms: Arms) -> Iterator[list[str]]:
    """Right answers by length, and how many runs have learned the task."""
    yield ["arm", "rate", "learned", *(f"{length:,} tokens" for length in LENGTHS)]
    for arm, of in arms.items():
        near = _near(of)
        learned = f"{(near >= SOLVED).sum()} of {len(near)}"
        cells = [_mean(shares(of, length, LOADS)) for length in LENGTHS]
        yield [arm, f"{of.rate.iloc[0]:g}", learned, *cells]


def loads_table(arms: Arms) -> Iterator[list[str]]:
    """Right answers by the number of pairs, in the shortest and the longest texts."""
    cells = [(LENGTH, pairs) for pairs in LOADS]
    cells += [(LENGTHS[-1], pairs) for pairs in (*LOADS, MOST)]
    yield ["arm", *(f"{length:,} tokens, {pairs} pairs" for length, pairs in cells)]
    for arm, of in arms.items():
        yield [arm, *(_mean(shares(of, n, (pairs,))) for n, pairs in cells)]


def octaves_table(arms: Arms) -> Iterator[list[str]]:
    """Right answers by octave of distance in the longest texts."""
    yield [f"distance, at {LENGTHS[-1]:,} tokens", *(f"{o:,} to {2 * o - 1:,}" for o in OCTAVES)]
    for arm, of in arms.items():
        yield [arm, *(_mean(shares(of, LENGTHS[-1], LOADS, [octave])) for octave in OCTAVES)]


def rates_table(answers: Frame) -> Iterator[list[str]]:
    """Right answers of every arm with every learning rate, whatever the seed."""
    yield ["arm", "rate", "seeds", *_COLUMNS]
    for arm in answers[answers.best].arm.unique():
        for rate, of in answers[answers.arm == arm].groupby("rate"):
            near = _near(of)
            columns = (" ".join(map("{:.2f}".format, x)) for x in (near, _far(of)))
            yield [arm, f"{rate:g}", ", ".join(map(str, near.index)), *columns]


def pairs_table(arms: Arms) -> Iterator[list[str]]:
    """Differences of right answers between arms, seed by seed."""
    yield ["difference", *_COLUMNS]
    for arm, other in PAIRS:
        if arm in arms and other in arms:
            yield from _difference(f"{arm} − {other}", arms[arm], arms[other])


def same_rate_table(answers: Frame) -> Iterator[list[str]]:
    """The same for arms with one learning rate, which need not be their best."""
    yield ["difference, with one rate", *_COLUMNS]
    final = answers[~answers.tried]
    for arm, other, rate in SAME_RATE:
        pair = [final[(final.arm == name) & (final.rate == rate)] for name in (arm, other)]
        yield from _difference(f"{arm} − {other}, {rate:g}", *pair)


def _difference(name: str, one: Frame, two: Frame) -> Iterator[list[str]]:
    """A row with the differences of runs with the same seed, if there are any."""
    found = [(measure(one) - measure(two)).dropna() for measure in (_near, _far)]
    if len(found[0]):
        yield [name, *map(_mean, found)]


def tables(answers: Frame) -> str:
    """All tables of the page."""
    final = answers[answers.best]
    arms = {arm: final[final.arm == arm] for arm in final.arm.unique()}
    by_arm = [table(arms) for table in (pairs_table, lengths_table, loads_table, octaves_table)]
    every = [*by_arm, rates_table(answers), same_rate_table(answers)]
    return "\n\n".join(map(markdown, every))


if __name__ == "__main__":
    write_tables(RESULTS.with_name("README.md"), tables(read_answers(RESULTS)))
