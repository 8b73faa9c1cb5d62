"""Passkeys and needles in the report, from hand-made results."""

import re
from itertools import pairwise

import pytest
from result_cells import lines, needles, passkey, perplexity, read

from coca_lab.report import printed_tables
from coca_lab.report.perplexity import perplexity_sections
from coca_lab.report.prompts import distance_edges, needle_sections, passkey_sections
from coca_lab.report.results import all_cells
from coca_lab.report.tasks import by_task, paper_sections

CELLS = [
    passkey("RoFormer", 512, 9),
    passkey("RoFormer", 4096, 3),
    passkey("CoCA-Slack", 512, 10),
    passkey("CoCA-Slack", 4096, 5),
    passkey("CoCA-Slack", 4096, 7, "ntk", 4.0),
    passkey("CoCA-Strict", 4096, 2),
]


def section(title, cells=CELLS):
    return next(s for s in passkey_sections(read(*cells)) if s.title.startswith(title))


def test_the_table_of_accuracy_has_a_row_a_line_and_a_column_a_length():
    found = section("Passkeys found, by prompt length")
    assert [str(name) for name in found.header] == ["passkeys found at", "512", "4,096"]
    assert [[str(entry) for entry in row] for row in found.rows] == [
        ["RoFormer", "0.90", "0.30"],
        ["CoCA-Slack", "1.00", "0.50"],
        ["CoCA-Slack + NTK (4)", "–", "0.70"],
        ["CoCA-Strict", "–", "0.20"],
    ]
    assert found.rows[0][1].small == "9 of 10; 0.10–0.90"
    assert lines(found.chart)["CoCA-Slack"] == {512: 1.0, 4096: 0.5}
    assert found.chart.points[["low", "high"]].iloc[0].tolist() == [0.1, 0.9]
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
            perplexity(model, window, 1.0, "ntk", attention=form, perplexity=value)
            for model, form, window, value in rows
        ]
        found = {section.title: section.rows for section in perplexity_sections(read(*cells))}
        return found.get("Strict minus slack: perplexity")

    rows = [
        ("a", "slack", 512, 20.0),
        ("b", "strict", 512, 20.5),
        ("a", "slack", 1024, 30.0),
        ("b", "strict", 1024, None),
    ]
    assert compared(*rows) == [["a, ntk-4", "20.00", "30.00"], ["b, ntk-4", "+0.50", "–"]]
    assert compared(*rows[:1]) is None
    assert compared(*rows, ("c", "slack", 512, 25.0)) is None  # which of the two is meant?


def test_the_papers_figures_are_shown_where_they_compare_or_are_asked_for():
    other = [passkey("m", 512, 3, trained=256)]
    table, differences = paper_sections("passkey", CELLS, every=False)
    assert table.rows[4][1:3] == ["1.00", "1.00"]
    assert differences.rows[2][:3] == ["NTK (8)", "+0.0", "−0.05"]
    assert [s.title for s in paper_sections("perplexity", CELLS, every=False)] == [
        "The paper’s perplexity (its Table 1, training from scratch)",
        "The paper’s perplexity, strict minus slack (its Table 3)",
    ]
    # Trained under position interpolation: Table 4.
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}
    (interpolated,) = paper_sections("passkey", [other[0] | rope], every=False)
    assert interpolated.rows[1][::6] == ["LLaMA-7B + CoCA + PI", "0.99"]
    assert paper_sections("passkey", other, every=False) == []
    assert paper_sections("passkey", other, every=True) == [table, differences, interpolated]
    assert len(paper_sections("perplexity", other, every=True)) == 3


def test_findings_name_who_finds_most_in_the_longest_prompts_with_a_find():
    cells = [*CELLS, passkey("ALiBi", 512, 8), passkey("ALiBi", 4096, 8)]
    cells += [passkey(model, 8192, 0) for model in ("ALiBi", "CoCA-Strict")]
    (found, *_) = passkey_sections(read(*cells))
    at = "At 4,096 tokens (8 × the training length)"
    assert found.lead == f"{at} ALiBi finds 80% of the passkeys, the most."
    assert found.text == "At more than 4,096 tokens, up to 8,192, none is found."
    tied = [passkey(model, 4096, hits) for model, hits in (("a", 4), ("b", 4), ("c", 0))]
    lead = section("Passkeys found, by prompt length", tied).lead
    assert lead == f"{at} a and b find 40% of the passkeys, the most."
    (nothing,) = passkey_sections(read(*cells[-1:]))
    assert nothing.lead == "No passkey was found at any length."
    assert nothing.chart is None and nothing.rows


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


def test_the_terminal_has_the_table_by_length_alone():
    ((header, rows),) = printed_tables(CELLS)
    assert header == ["passkeys found at", "512", "4,096"] and len(rows) == 4


def test_needles_have_a_chart_for_every_kind_unless_none_was_found():
    (found,), (none,) = (needle_sections([needles("A", recall)]) for recall in (0.5, 0.0))
    assert (
        found.lead == "At 512 tokens (8 × the training length) A finds 50% of the facts (single)."
    )
    assert lines(found.chart) == {"A": {512: 0.5}} and found.rows == [["A", "0.50"]]
    assert none.lead == "Needles, single: nothing was found at any length."
    assert none.chart is None and none.rows == [["A", "0.00"]]


def test_needles_of_another_metric_stand_apart():
    """Early results counted what stands anywhere in an answer."""
    cells = [needles("A", 0.5, "recall"), needles("B", 0.25)]
    titles = {table[0][0]: table[1] for table in printed_tables(cells)}
    assert titles == {
        "single: recall at (prompts 1)": [["A", "0.50"]],
        "single: R-precision at (prompts 2)": [["B", "0.25"]],
    }
