"""Perplexity in the report: tables, findings, paired differences, positions, copies."""

import math

import pytest
from result_cells import CELLS, lines, perplexity, read

from coca_lab.report import printed_tables
from coca_lab.report.perplexity import perplexity_sections


def sections(*cells):
    return {section.title: section for section in perplexity_sections(read(*cells))}


def main(*cells):
    return sections(*cells)["Perplexity against the length read at once"]


def bold(section):
    return [str(entry) for row in section.rows for entry in row[1:] if entry.bold]


def test_a_row_a_line_and_a_column_a_window():
    section = main(*CELLS)
    assert [str(name) for name in section.header] == ["perplexity at", "64", "128"]
    assert [column.small for column in section.header[1:]] == ["1 ×", "2 ×"]
    assert [[str(entry) for entry in row] for row in section.rows] == [
        ["RoFormer", "40.00", "90.00"],
        ["RoFormer + NTK (4)", "40.00", "60.00"],
        ["RoFormer, last 64 tokens only", "41.00", "41.00"],
        ["CoCA-Slack", "41.50", "54.00"],
    ]
    assert section.rows[3][2].small == "48.60 to 59.40" and section.muted == [2]
    assert section.chart.mark == (64, "training length")
    assert printed_tables(CELLS)[0][1] == [[str(e) for e in row] for row in section.rows]


def test_the_lowest_of_a_column_as_shown_is_bold_unless_it_has_one_row():
    assert bold(main(*CELLS)) == ["40.00", "40.00", "41.00"]
    close = [perplexity("a", 64, 40.001), perplexity("b", 64, 40.0), perplexity("c", 64, 41.0)]
    assert bold(main(*close)) == ["40.00", "40.00"]
    assert bold(main(close[0])) == []


def test_findings_follow_the_numbers_whichever_way_they_fall():
    near = "At 64 tokens (the training length) RoFormer has the lowest perplexity, 40.00."
    far = "At 128 tokens (2 × the training length) CoCA-Slack has the lowest perplexity, 54.00."
    section = main(*CELLS)
    assert section.lead == far
    assert section.text == (
        f"{near} {far} At 128 tokens no model has a lower perplexity than with its last tokens "
        "only: none of them benefits from the longest window yet."
    )
    better = main(*CELLS, perplexity("CoCA-Slack", 64, 60.0, "attend-last"))
    assert better.text == (
        f"{near} {far} At 128 tokens the perplexity of CoCA-Slack is lower than with the last 64 "
        "tokens only."
    )
    one = perplexity("a", 64, 40.0, training_length=None)
    assert main(one).lead == "At 64 tokens a has a perplexity of 40.00."
    infinite = main(perplexity("a", 64, 2.0, perplexity=None, ci95=None))
    assert infinite.lead.endswith("no model has a finite perplexity.")
    assert [str(entry) for entry in infinite.rows[0]] == ["a", "inf"]


def test_differences_carry_an_interval_over_paired_documents():
    def measured(model, factor, spread=0):
        documents = [
            {"id": str(i), "nats": 100 * (3 + i % 4 + factor) + spread * i, "tokens": 100}
            for i in range(20)
        ]
        return perplexity(model, 64, 40.0 * math.exp(factor), documents=documents)

    cells = [measured("a", 0.0), measured("b", -0.1), measured("c", 0.0, spread=0.1)]
    section = sections(*cells)["Perplexity: paired differences"]
    assert section.header[0] == "against b at"
    assert section.rows[0] == ["a", "+10.5% (+10.5% to +10.5%)"]
    (ratio,) = lines(section.chart)["c"].values()
    assert ratio == pytest.approx(math.exp(0.1 + 0.1 * 190 / 2000))
    low, high = section.chart.points[["low", "high"]].iloc[1]
    assert 1.1 < low < ratio < high < 1.13 and section.chart.level == 1.0
    assert "Perplexity: paired differences" not in sections(cells[0])


def test_repeats_are_compared_with_the_short_context():
    def measured(window: int, far: float, rest: float, scaling: str = "none") -> dict:
        documents = [{"id": str(i), "nats": far + rest + i, "tokens": 100} for i in range(20)]
        repeated = [{"nats": far, "tokens": 10} for _ in documents]
        about = {"n": 4, "beyond": 64, "documents": repeated}
        made = {"documents": documents, "tokens": 2000, "repeats": about}
        return perplexity("Roles", window, 30.0, scaling, **made)

    cells = [measured(256, 20, 300), measured(64, 30, 297, "attend-last"), measured(64, 31, 297)]
    section = sections(*cells)["Copied from far back, and the rest"]
    assert section.header[0].startswith("4-gram only farther back than 64 tokens")
    # exp(-10 / 10) and exp(3 / 90); nats differ alike in all documents.
    assert section.rows == [
        ["Roles, these 10.0%", "+10.5% (+10.5% to +10.5%)", "−63.2% (−63.2% to −63.2%)"],
        ["Roles, all others", "+0.0% (+0.0% to +0.0%)", "+3.4% (+3.4% to +3.4%)"],
    ]
    assert (section.header, section.rows) in printed_tables(cells)
    assert "Copied from far back, and the rest" not in sections(*CELLS)


def test_few_documents_and_the_stride_are_named_below_the_intervals():
    def note(count: int) -> str:
        documents = [{"id": str(i), "nats": 350.0 + i, "tokens": 100} for i in range(count)]
        cells = [perplexity("RoFormer", n, 40.0, documents=documents) for n in (64, 128)]
        return main(*cells).note

    assert "8 documents: intervals are rough below 10, where one unusual document" in note(8)
    assert "W − 63 to W tokens before it, at 64 tokens 1 to 64." in note(8)
    assert "rough" not in note(10)


def test_last_tokens_of_two_evaluations_are_one_line_and_of_two_lengths_two():
    again, shorter = {**CELLS[2], "seconds": 3.0}, perplexity("RoFormer", 32, 43.0, "attend-last")
    assert main(*CELLS, again).rows == main(*CELLS).rows
    rows = printed_tables([*CELLS, shorter])[0][1]
    assert ["RoFormer, last 32 tokens only", "43.00", "43.00"] in rows
    assert ["RoFormer, last 64 tokens only", "41.00", "41.00"] in rows


def test_positions_have_a_table_for_every_window_and_ranges():
    def ranges(count):
        size = 8 // count
        return [
            {"first": i * size + 1, "last": (i + 1) * size, "nats": 8.0, "tokens": 4}
            for i in range(count)
        ]

    unknown = ranges(2)
    unknown[1]["nats"] = None
    cells = [perplexity("a", 8, 3.0, by_position=unknown)]
    cells.append(perplexity("b", 8, 3.0, by_position=ranges(4)))
    found = [s for s in perplexity_sections(read(*cells)) if "by position, window 8" in s.title]
    assert [section.header for section in found] == [
        ["tokens read before", "1 to 2", "3 to 4", "5 to 6", "7 to 8"],
        ["tokens read before", "1 to 4", "5 to 8"],
    ]
    assert found[1].rows == [["a", "7.4", "–"]]
