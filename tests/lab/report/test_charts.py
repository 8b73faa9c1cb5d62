"""What charts show at first: axes, legends, lines that cover others."""

from pathlib import Path

import pandas as pd
import pytest

from coca_lab.report import LineChart, read_results
from coca_lab.report.page import page_sections, tasks_and_runs

RESULTS = Path(__file__).parents[3] / "results"


def points(name, y, **more):
    return pd.DataFrame({"line": name, "x": [2**i for i in range(len(y))], "y": y, **more})


def encoding(*lines, **options):
    made = LineChart(pd.concat(lines), "x", "y", **options).specification({})
    return made["layer"][0]["encoding"]


@pytest.mark.parametrize("log_y", [True, False])
def test_the_axis_of_one_model_is_wide_enough_that_noise_is_no_trend(log_y):
    """A line from 251.1 to 251.75 fills 2 % of the axis, not all of it."""
    flat = points("a", [251.1, 251.75, 251.4])
    low, high = encoding(flat, log_y=log_y)["y"]["scale"]["domain"]
    assert low < 240 and high > 265
    compared = encoding(flat, points("b", [250.0, 251.0, 252.0]), log_y=log_y)
    assert "domain" not in compared["y"]["scale"]
    assert "domain" not in encoding(points("a", [100.0, 130.0]), log_y=log_y)["y"]["scale"]


def test_a_legend_has_at_most_eight_names_and_the_others_come_on_demand():
    models = [points(f"m{i}", [i, i + 0.5]) for i in range(5)]
    scaled = [points(f"m{i} + NTK", [9, 9], colour=f"m{i}", legend="spare") for i in range(5)]
    last = [points(f"m{i}, last", [5, 5], colour=f"m{i}", legend="none") for i in range(5)]

    def shown(*lines):
        made = LineChart(pd.concat(lines), "x", "y").specification({})
        drawn = {p["line"] for rows in made["datasets"].values() for p in rows if p["first"]}
        names = made["layer"][0]["encoding"]["color"]["legend"]["values"]
        return names, drawn - set(names), made["usermeta"]["hidden"]

    names = [f"m{i}" for i in range(5)]
    beside = {f"m{i}, last" for i in range(5)}
    assert shown(*models, *scaled[:3], *last) == (
        [*names, *(f"m{i} + NTK" for i in range(3))], beside, 0
    )  # fmt: skip
    assert shown(*models, *scaled, *last) == (names, beside, 5)
    assert shown(*(points(f"m{i}", [i, i]) for i in range(12))) == (
        [f"m{i}" for i in range(8)], set(), 4
    )  # fmt: skip


def test_a_line_under_another_is_wider_than_it():
    """Two models that find every passkey are both to be seen."""
    covered, over = points("a", [1.0, 1.0, 1.0]), points("b", [1.0, 1.0, 0.999])
    scale = encoding(covered, over, points("c", [1.0, 0.5, 0.0]))["strokeWidth"]["scale"]
    widths = dict(zip(scale["domain"], scale["range"], strict=True))
    assert widths["a"] > widths["b"] == widths["c"]


@pytest.mark.parametrize("folder", sorted(p for p in RESULTS.iterdir() if any(p.glob("*.json"))))
def test_a_published_study_shows_a_chart_and_its_finding_first(folder):
    sections = page_sections(*tasks_and_runs(read_results([folder])), False)
    assert sections[0].chart and sections[0].lead
    assert not any(section.chart and not section.lead for section in sections)
