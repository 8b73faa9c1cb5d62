"""Passkeys and needles in the report, from hand-made results."""

import re
from itertools import pairwise

import pytest

from coca_lab.report import build_report, paper, printed_tables
from coca_lab.report.lines import strict_minus_slack
from coca_lab.report.prompts import (
    distance_edges,
    needle_sections,
    passkey_findings,
    passkey_sections,
)
from coca_lab.report.results import all_cells
from coca_lab.report.tasks import by_task

ATTENTION = {"CoCA-Slack": "slack", "CoCA-Strict": "strict"}


def passkey(model, length, hits, scaling="none", factor=None, trained=512):
    """A cell of ten prompts, the first ``hits`` of them right, distances and depths spread out."""
    samples = [
        {
            "index": i,
            "key": 10_000 + i,
            "depth": i / 9,
            "distance": round(length * (1 - i / 10)) - 5,
            "output": "",
            "hit": i < hits,
        }
        for i in range(10)
    ]
    return {
        "task": "passkey", "model": model, "attention": ATTENTION.get(model),
        "training_length": trained, "scaling": scaling,
        "factor": factor, "length": length, "accuracy": hits / 10, "wilson95": [0.1, 0.9],
        "samples": samples,
    }  # fmt: skip


CELLS = [
    passkey("RoFormer", 512, 9),
    passkey("RoFormer", 4096, 3),
    passkey("CoCA-Slack", 512, 10),
    passkey("CoCA-Slack", 4096, 5),
    passkey("CoCA-Slack", 4096, 7, "ntk", 4.0),
    passkey("CoCA-Strict", 4096, 2),
]


def section(title, cells=CELLS):
    return next(
        s for s in passkey_sections(all_cells([{"results": cells}])) if s.title.startswith(title)
    )


def test_the_table_of_accuracy_has_a_row_a_line_and_a_column_a_length():
    found = section("Passkeys found, by prompt length")
    assert found.header == ["prompt length in tokens", "512", "4,096"]
    assert [[str(entry) for entry in row] for row in found.rows] == [
        ["RoFormer", "0.90", "0.30"],
        ["CoCA-Slack", "1.00", "0.50"],
        ["CoCA-Slack + NTK (4)", "–", "0.70"],
        ["CoCA-Strict", "–", "0.20"],
    ]
    assert found.rows[0][1].small == "9 of 10; 0.10–0.90"
    lines = {line.label: line for line in found.chart.lines}
    assert lines["CoCA-Slack"].y == [1.0, 0.5] and lines["CoCA-Slack"].ends[0] == [0.1, 0.9]
    assert found.lead == (
        "At 4,096 tokens (8 × the training length) CoCA-Slack + NTK (4) finds 70% of the passkeys, "
        "the most."
    )


def test_near_and_far_keys_are_counted_apart():
    """Of 4,096 tokens the distances are 4091, 3681, …, 405: one key lies within 512."""
    near, far = section("Passkeys at most 512"), section("Passkeys more than 512")
    near_rows = {row[0]: row[1:] for row in near.rows}
    far_rows = {row[0]: row[1:] for row in far.rows}
    assert near_rows["CoCA-Slack"][0].startswith("1.00 (10/10;")
    assert near_rows["CoCA-Slack"][1].startswith("0.00 (0/1;")
    assert far.header == ["prompt length in tokens", "4,096"]
    assert far_rows["CoCA-Slack"][0].startswith("0.56 (5/9;")
    by_distance = section("Passkeys found, by distance")
    trials = [
        [int(n) for n in re.findall(r"/(\d+);", " ".join(row[1:]))] for row in by_distance.rows
    ]
    assert [sum(row) for row in trials] == [20, 20, 10, 10]
    assert len(by_distance.header) == 5


def test_ranges_of_distance_begin_at_the_training_length_and_grow_by_one_ratio():
    edges = distance_edges(4091, 512)
    assert edges[:2] == [0, 512] and edges[-1] == 4091
    ratios = [b / a for a, b in pairwise(edges[1:])]
    assert ratios == pytest.approx([2.0, 2.0, 2.0], rel=0.01)
    assert distance_edges(251, 512) == [0, 251]


def test_depths_are_quarters_of_the_prompt():
    found = section("Passkeys found, by depth", [passkey("a", 512, 5)])
    trials = [int(n) for n in re.findall(r"/(\d+);", " ".join(found.rows[0][1:]))]
    assert trials == [3, 2, 2, 3]  # depths 0, 1/9, …, 1
    assert found.rows[0][1].startswith("1.00") and found.rows[0][4].startswith("0.00")


def test_strict_is_compared_with_slack_as_in_the_papers_table_3():
    found = section("Strict minus slack: passkeys found")
    assert found.rows == [
        ["CoCA-Slack, no scaling", "1.00", "0.50"],
        ["CoCA-Strict, no scaling", "–", "−0.30"],
    ]

    def compared(*rows):
        cells = [
            {"model": model, "attention": attention, "scaling": "ntk", "factor": 4.0,
             "window": window, "perplexity": value}
            for model, attention, window, value in rows
        ]  # fmt: skip
        return strict_minus_slack(cells, "perplexity", "window", "title")

    rows = [
        ("a", "slack", 512, 20.0),
        ("b", "strict", 512, 20.5),
        ("a", "slack", 1024, 30.0),
        ("b", "strict", 1024, None),
    ]
    assert compared(*rows)[0].rows == [["a, ntk-4", "20.00", "30.00"], ["b, ntk-4", "+0.50", "–"]]
    assert compared(*rows[:1]) == []
    assert compared(*rows, ("c", "slack", 512, 25.0)) == []  # which of the two is meant?


def test_the_papers_figures_are_shown_where_they_compare_or_are_asked_for():
    other = [passkey("m", 512, 3, trained=256)]
    table, differences = paper.passkey_sections(CELLS, asked=False)
    assert table.rows[4][1:3] == ["1.00", "1.00"]
    assert differences.rows[2][:3] == ["NTK (8)", "+0.0", "−0.05"]
    assert paper.passkey_sections(other, asked=False) == []
    assert [s.title for s in paper.perplexity_sections(CELLS, asked=False)] == [
        "The paper’s perplexity (its Table 1, training from scratch)",
        "The paper’s perplexity, strict minus slack (its Table 3)",
    ]
    assert paper.perplexity_sections(other, asked=False) == []
    # Trained under position interpolation: Table 4.
    (interpolated,) = paper.passkey_sections(
        [other[0] | {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}], asked=False
    )
    assert interpolated.rows[1][::6] == ["LLaMA-7B + CoCA + PI", "0.99"]
    assert paper.passkey_sections(other, asked=True) == [table, differences, interpolated]
    assert len(paper.perplexity_sections(other, asked=True)) == 3


def test_findings_name_who_finds_most_then_the_others():
    cells = [*CELLS, passkey("ALiBi", 512, 8), passkey("ALiBi", 4096, 8)]
    cells += [passkey(model, 8192, 0) for model in ("ALiBi", "CoCA-Strict")]
    assert passkey_findings(cells) == [
        "At 512 tokens (the training length), share of passkeys found: CoCA-Slack 1.00 (95 % "
        "interval 0.10 to 0.90); RoFormer 0.90; ALiBi 0.80.",
        "At 4,096 tokens (8 × the training length), share of passkeys found: ALiBi 0.80 (95 % "
        "interval 0.10 to 0.90); CoCA-Slack + NTK (4) 0.70; RoFormer 0.30; CoCA-Strict 0.20.",
        "At more than 4,096 tokens, up to 8,192, none is found.",
    ]
    assert passkey_findings(cells[-1:]) == ["No passkey was found at any length."]
    tied = [passkey("a", 512, 4), passkey("b", 512, 4), passkey("c", 512, 0)]
    assert "found: a and b 0.40 (95 % interval 0.10 to 0.90); c 0.00." in passkey_findings(tied)[0]


def test_other_prompts_are_other_results():
    """Those of another seed or tokenizer, but not those of another length."""

    def grouped(other):
        contents = [{"results": CELLS, "file": "a"}, {"results": [other], "file": "b"}]
        groups = by_task(all_cells(contents))["passkey"]
        return [[cell["model"] for cell in group] for group in groups[1:]]

    other = passkey("ALiBi", 512, 2)
    assert grouped(other) == []
    assert grouped(passkey("ALiBi", 1024, 2)) == []
    moved = [{**sample, "distance": sample["distance"] + 1} for sample in other["samples"]]
    assert grouped({**other, "samples": moved}) == [["ALiBi"]]
    assert grouped({**other, "samples": other["samples"][:5]}) == [["ALiBi"]]


def test_the_page_and_the_printed_tables():
    page = build_report([{"results": CELLS}])
    assert "<h1>Passkey retrieval</h1>" in page and page.count("Passkeys found") >= 3
    (header, rows), *rest = printed_tables(CELLS)
    assert header == ["passkeys found at", "512", "4,096"] and len(rows) == 4 and not rest


def test_what_was_not_found_is_a_sentence_and_no_chart():
    (section,) = passkey_sections([passkey("a", 512, 0), passkey("a", 1024, 0)])
    assert section.chart is None and section.lead == "No passkey was found at any length."
    needle = {"task": "needles", "kind": "single", "length": 512, "scaling": "none", "samples": []}
    needle |= {"model": "A", "recall": 0.0, "metric": "R-precision", "training_length": 64}
    (section,) = needle_sections([needle])
    assert section.chart is None and "nothing was found" in section.lead and section.rows


def test_two_results_in_one_place_are_refused():
    other = {**CELLS[0], "accuracy": 0.1}
    with pytest.raises(ValueError, match=r"RoFormer .none. at 512 tokens twice"):
        build_report([{"results": [*CELLS, other]}])
    build_report([{"results": [*CELLS, CELLS[0]]}])  # the same figure is no contradiction


def test_needles_of_another_metric_stand_apart():
    """Early results counted what stands anywhere in an answer."""
    about = {"task": "needles", "kind": "single", "length": 512, "scaling": "none", "samples": []}
    cells = [
        {**about, "model": "A", "recall": 0.5, "metric": "recall"},
        {**about, "model": "B", "recall": 0.25, "metric": "R-precision"},
    ]
    titles = {table[0][0]: table[1] for table in printed_tables(cells)}
    assert titles == {
        "single: recall at (prompts 1)": [["A", "0.50"]],
        "single: R-precision at (prompts 2)": [["B", "0.25"]],
    }
