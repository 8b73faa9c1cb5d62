"""Trends over the sizes of a search."""

from typing import Any

import pytest

from coca_lab.report import build_report
from coca_lab.report.search import size_sections


def run(
    size: str, parameters: int, model: str, seed: int, near: float, far: float
) -> dict[str, Any]:
    common = {"task": "perplexity", "scaling": "none", "training_length": 256}
    return {
        "task": "search", "search": size, "model": model, "rung": 1, "rungs": 1, "steps": 800,
        "seed": seed, "rank": {"perplexity": [256]}, "status": "finished", "error": None,
        "training": {"seconds_per_step": 0.25, "parameters": parameters}, "mean_rank": 1.0,
        "kept": model == "RoFormer", "file": "results.json",
        "cells": [{"window": 256, "perplexity": near, **common},
                  {"window": 4096, "perplexity": far, **common}],
    }  # fmt: skip


# CoCA costs 10 % at every size; its ratio falls with the square root of the size.
RUNS = [
    run(size, parameters, model, seed, cost * (20.0 + seed), cost * (20.0 + seed) * ratio)
    for size, parameters in (("0.25M", 250_000), ("1M", 1_000_000), ("4M", 4_000_000))
    for model, cost, ratio in (
        ("RoFormer", 1.0, 4.0),
        ("CoCA-Strict", 1.1, 2.0 * (parameters / 1e6) ** -0.5),
    )
    for seed in (0, 1)
]


def test_costs_and_far_text_are_followed_over_sizes():
    near, far = size_sections(RUNS)
    assert near.title == "Perplexity at 256 tokens against RoFormer’s, by size"
    assert [str(entry) for entry in near.header[1:4]] == ["0.25M", "1M", "4M"]
    ((name, *costs),) = near.rows
    assert name == "CoCA-Strict" and [str(cost) for cost in costs[:4]] == ["1.100"] * 3 + ["+0.000"]
    assert [str(cost) for cost in costs[4:]] == ["1.1", "1.1"]
    rows = {row[0]: [str(entry) for entry in row[1:]] for row in far.rows}
    assert rows["RoFormer"] == ["4.000"] * 3 + ["+0.000", "4", "4"]
    assert rows["CoCA-Strict"][:4] == ["4.000", "2.000", "1.000", "-0.500"]
    assert float(rows["CoCA-Strict"][4]) == pytest.approx(2 * 350**-0.5, rel=0.01)
    page = build_report([{"results": RUNS}])
    assert "if the trend holds" in page and "1,000,000" in page
    # A line of points, and the law, of one name.
    points, law = (line for line in near.chart.lines if line.label == "CoCA-Strict")
    assert len(points.x) == 6 and not points.joined and law.x == (250_000, 4_000_000)


def test_far_figures_are_written_out():
    sizes = (("0.25M", 250_000), ("1M", 1_000_000), ("4M", 4_000_000))
    runs = [
        run(name, size, model, 0, 20.0, 80.0 * size / 1e6)
        for name, size in sizes
        for model in ("RoFormer", "CoCA-Strict")
    ]
    far = size_sections(runs)[-1]
    assert [str(entry) for entry in far.rows[0][5:]] == ["1,400", "28,000"]


def test_one_size_has_no_trend_and_missing_figures_are_left_out():
    assert size_sections([cell for cell in RUNS if cell["search"] == "1M"]) == []
    two = [cell for cell in RUNS if cell["search"] != "4M"]
    two[0] = two[0] | {"status": "failed", "training": None, "cells": []}
    near, _ = size_sections(two)
    assert [str(entry) for entry in near.rows[0][1:3]] == ["1.100", "1.100"]
    infinite = [
        cell | {"cells": [each | {"perplexity": None} for each in cell["cells"]]} for cell in RUNS
    ]
    assert size_sections(infinite) == []
