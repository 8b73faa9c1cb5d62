"""Studies of several seeds and sizes in the report: means, ranges, trends."""

from typing import Any

import pytest

from coca_lab.report import build_report, printed_tables
from coca_lab.report.study import FIGURES, gather_seeds, study_sections

ABOUT = {"training_length": 256, "scaling": "none", "file": "results.json"}


def run(size: str, parameters: int, model: str, seed: int, near: float, far: float) -> list[Any]:
    """The cells of a trial."""
    place = {"model": model, "training_seed": seed, "size": size, "parameters": parameters}
    return [
        {"task": "perplexity", "window": window, "perplexity": perplexity, **place, **ABOUT}
        for window, perplexity in ((256, near), (4096, far))
    ]


# CoCA costs 10 % at every size; its ratio falls with the square root of the size.
CELLS = [
    cell
    for size, parameters in (("0.25M", 250_000), ("1M", 1_000_000), ("4M", 4_000_000))
    for model, cost, ratio in (
        ("RoFormer", 1.0, 4.0),
        ("CoCA-Strict", 1.1, 2.0 * (parameters / 1e6) ** -0.5),
    )
    for seed in (0, 1)
    for cell in run(size, parameters, model, seed, cost * (20 + seed), cost * (20 + seed) * ratio)
]


def sections(cells):
    copies = [dict(cell) for cell in cells]
    gather_seeds(copies)
    return study_sections([cell for cell in copies if cell["task"] == "study"])


def texts(row):
    return [str(entry) for entry in row]


def test_costs_and_far_text_are_followed_over_sizes():
    near, far, *by_size = sections(CELLS)
    assert near.title == "Perplexity at 256 tokens against RoFormer’s, by size"
    assert texts(near.header[1:4]) == ["0.25M", "1M", "4M"]
    ((name, *costs),) = near.rows
    assert name == "CoCA-Strict" and texts(costs[:4]) == ["1.100"] * 3 + ["+0.000"]
    assert texts(costs[4:]) == ["1.1", "1.1"]
    rows = {row[0]: texts(row[1:]) for row in far.rows}
    assert rows["RoFormer"] == ["4.000"] * 3 + ["+0.000", "4", "4"]
    assert rows["CoCA-Strict"][:4] == ["4.000", "2.000", "1.000", "-0.500"]
    assert float(rows["CoCA-Strict"][4]) == pytest.approx(2 * 350**-0.5, rel=0.01)
    assert near.lead == "Lowest with 4M: CoCA-Strict, 1.100 × RoFormer’s perplexity at 256 tokens."
    # A line of points, and the law, of one name.
    marks = {mark: of["x"].tolist() for mark, of in near.chart.points.groupby("mark")}
    assert len(marks["points"]) == 6 and marks["line"] == [250_000, 4_000_000]
    assert [section.title for section in by_size] == [
        "Perplexity, 0.25M", "Perplexity, 1M", "Perplexity, 4M"
    ]  # fmt: skip
    page = build_report([{"results": [dict(cell) for cell in CELLS]}])
    assert "if the trend holds" in page


def test_far_figures_are_written_out():
    sizes = (("0.25M", 250_000), ("1M", 1_000_000), ("4M", 4_000_000))
    cells = [
        cell
        for name, size in sizes
        for model in ("RoFormer", "CoCA-Strict")
        for cell in run(name, size, model, 0, 20.0, 80.0 * size / 1e6)
    ]
    assert texts(sections(cells)[1].rows[0][5:]) == ["1,400", "28,000"]


def test_missing_figures_are_left_out_of_trends():
    kept = [c for c in CELLS if c["size"] != "4M"][2:]  # without a pair of RoFormer
    near, *_ = sections(kept)
    assert texts(near.rows[0][1:3]) == ["1.100", "1.100"]
    none = [cell | {"perplexity": None} for cell in CELLS if cell["model"] == "RoFormer"]
    far, *_ = sections(none + [cell for cell in CELLS if cell["model"] != "RoFormer"])
    assert far.title.endswith("against 256, by size")
    assert [row[0] for row in far.rows] == ["CoCA-Strict"]


SEEDS = [cell | {"size": ""} for cell in CELLS if cell["size"] == "1M"]


def test_means_and_ranges_of_the_seeds():
    extra = [
        {**SEEDS[0], "scaling": "attend-last", "perplexity": 19.0},
        {**SEEDS[0], "scaling": "ntk", "factor": 4.0, "perplexity": 20.5},
        *(
            {**SEEDS[seed], "task": "passkey", "length": 512, "accuracy": 0.5 + seed / 4,
             "training_seed": seed}
            for seed in (0, 1)
        ),
    ]  # fmt: skip
    perplexity, passkeys = sections([*SEEDS, *extra])
    assert texts(perplexity.header) == ["Perplexity at", "256", "4,096"]
    assert [texts(row) for row in perplexity.rows] == [
        ["RoFormer", "20.5", "82.0"],
        ["RoFormer + NTK (4)", "20.5", "–"],
        ["RoFormer, last 256 tokens only", "19.0", "19.0"],
        ["CoCA-Strict", "22.6", "45.1"],
    ]
    assert perplexity.muted == [2] and perplexity.rows[0][1].small == "20.0 to 21.0"
    assert perplexity.lead == "Perplexity: at 4,096 tokens CoCA-Strict has 45.1, the others 82.0."
    intervals = perplexity.chart.points[["low", "high"]].head(2)
    assert intervals.values.tolist() == [[20.0, 21.0], [80.0, 84.0]]
    assert perplexity.chart.mark == (256, "training length")
    assert passkeys.lead == "Share of passkeys found: at 512 tokens RoFormer has 0.62."
    tied = [{**SEEDS[0], "model": model, "task": "passkey", "length": 512, "accuracy": share,
             "training_seed": seed} for seed in (0, 1)
            for model, share in (("a", 1.0), ("b", 0.5), ("c", 1.0))]  # fmt: skip
    assert sections(tied)[0].lead == (
        "Share of passkeys found: at 512 tokens a and c have 1.00, the others 0.50."
    )
    assert "Means of 2 seeds" in passkeys.note
    header, rows = printed_tables(SEEDS)[0]
    assert header == ["Perplexity at", "256", "4,096"] and rows[0] == ["RoFormer", "20.5", "82.0"]


def test_one_seed_and_other_tasks_are_shown_as_ever():
    cells = [{**SEEDS[0], "task": "other"}, SEEDS[2]]
    assert {cell["task"] for cell in cells} == {"other", "perplexity"}
    gather_seeds(one := [dict(cell) for cell in SEEDS[:2]])
    assert one == SEEDS[:2]
    gather_seeds(both := [dict(cell) for cell in (cells[0], *SEEDS)])
    assert both[0]["task"] == "other" and {c["of"] for c in both[1:]} <= set(FIGURES)
