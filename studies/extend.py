"""What a check of `coca extend` measured, from its result file (results/extend)."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coca_lab.evaluation.choice import Loss, loss_of
from coca_lab.evaluation.needles import figures
from coca_lab.evaluation.task import Cell
from coca_lab.files import read_json
from coca_lab.intervals import DocumentScore

L, TO = 8192, 12288
"""Tokens that SmolLM2-135M was made for, and those that it reads."""
ALONE = "last 8,192 tokens alone"
METHODS = {
    "as it is": "none",
    "the last 8,192 tokens alone": ALONE,
    "limited distances": "limited",
    "NTK": "ntk",
    "YaRN": "yarn",
    "leaky distances": "leaky",
    "shifted distances": "shifted",
}
"""By their names on pages, those of the check of eight books."""
Perplexity = dict[tuple[str, int], list[DocumentScore]]
"""Scores of documents by method and length in tokens."""
Needles = dict[str, list[Cell]]
"""Documents by method."""


def values_of_check(path: Path) -> tuple[Perplexity, Needles]:
    """Of the result file of a check: scores of perplexity, and needles in `TO` tokens."""
    perplexity: Perplexity = {}
    needles: Needles = {}
    for cell in read_json(path)["results"]:
        method = cell["scaling"]
        if cell["task"] == "perplexity":
            scores = [DocumentScore.of(each) for each in cell["documents"]]
            perplexity[method, cell["window"]] = scores
        elif cell["length"] == TO:
            needles[method] = cell["documents"]
    return perplexity, needles


def losses_within(perplexity: Perplexity, method: str) -> dict[int, Loss]:
    """What a method loses in perplexity within L, by length; nothing as it is."""
    if method in ("none", ALONE):
        return {}
    margin = math.log1p(0.01)
    return {
        length: loss_of(perplexity[method, length], perplexity["none", length], margin)
        for length in (512, L)
    }


def digits(path: Path) -> Iterator[dict[str, Any]]:
    """By method, the probability of a digit of a needle up to L back and farther, in percent.

    Yields:
        Its name, whether it loses within L, whether the needles are farther back, and the
        probability with its 95 % interval.
    """
    perplexity, needles = values_of_check(path)
    for name, method in METHODS.items():
        losses = losses_within(perplexity, method).values()
        for far in (False, True):
            found = figures(needles[method], near=L, beyond=far)
            low, high = found["ci95"]
            yield {
                "method": name,
                "loses": any(loss.word == "loses" for loss in losses),
                "far": far,
                "percent": 100 * math.exp(-found["nats"]),
                "low": 100 * math.exp(-high),
                "high": 100 * math.exp(-low),
            }
