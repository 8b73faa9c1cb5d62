"""Sections of the report about angles."""

import copy
import json
import re

import pytest
import torch
from result_cells import lines

from coca_lab.analysis import AnalysisSettings, analyze
from coca_lab.cli.console import print_table
from coca_lab.report import printed_tables
from coca_lab.report.angles import angle_sections
from conftest import tiny_model

KINDS = {"RoFormer": "rope", "Slack": "slack", "Strict": "strict"}


@pytest.fixture(scope="module")
def cells():
    """Analyses of tiny models as they come back from a file."""
    text = torch.randint(3, 290, (32,), generator=torch.Generator().manual_seed(0))
    settings = AnalysisSettings(pairs=64, pairs_per_distance=8, shifts=[1, 100], lengths=[32, 64])
    return [
        json.loads(json.dumps(analyze(tiny_model(kind), [text], settings, name=name)))
        for name, kind in KINDS.items()
    ]


def table(cells):
    *_, section = angle_sections(cells)
    return {name: entries for name, *entries in section.rows}


@pytest.fixture(scope="module")
def sections(cells):
    return angle_sections(cells)


def test_every_section_has_a_title_a_finding_and_a_chart(sections):
    assert [section.title for section in sections] == [
        "Angle between query and key: RoFormer",
        "Angle between query and key: Slack",
        "Anomalous tokens by rotary pair",
        "Score and bounds by distance: RoFormer",
        "Score and bounds by distance: Slack",
        "Score and bounds by distance: Strict",
        "All positions moved",
        "Figures of every model",
    ]
    assert all(section.lead and section.chart for section in sections[:-1])


def test_texts_say_what_was_measured(cells, sections):
    texts = {section.title: section.text for section in sections}
    shares = [layer["angles"]["cases"]["d"] for layer in cells[0]["layers"]]
    assert f"in {sum(shares) / 2:.1%} of all" in texts["Angle between query and key: RoFormer"]
    slack = [layer["effective_angles"]["cases"]["d"] for layer in cells[1]["layers"]]
    assert f"in {sum(slack) / 2:.1%} of all" in texts["Angle between query and key: Slack"]
    assert "Strict: none, since all angles are 0" in texts["Anomalous tokens by rotary pair"]
    found = [
        value
        for layer in cells[0]["layers"]
        for value in layer["angles"]["lengths"][1]["anomalous_share"]
    ]
    share = f"{sum(found) / len(found):.1%} at 64 tokens"
    assert share in texts["Anomalous tokens by rotary pair"]
    checked = sum(layer["decay"]["eq19"]["checked"] for layer in cells[0]["layers"])
    assert table(cells)["violations of Eq. 19"][0] == f"0 of {checked:,}"
    moved = texts["All positions moved"]
    assert "RoFormer, moved by 100 tokens: scores do not change beyond round-off" in moved
    assert "Strict, moved by 100 tokens: scores do not change beyond round-off" in moved
    assert re.search(r"Slack, moved by 100 tokens: scores change by [\d.]+ of their spread", moved)
    shares = [layer["absolute_share"] for layer in cells[1]["layers"]]
    assert moved.count("depends on m + n") == 1
    assert f"{sum(shares) / 2:.1%} of its scores depends on m + n" in moved


def test_violations_are_told_and_not_hidden(cells):
    broken = copy.deepcopy(cells[:1])
    broken[0]["layers"][1]["decay"]["eq20"] |= {"violations": 3, "largest_ratio": 1.5}
    found = table(broken)
    (count,) = found["violations of Eq. 20, at angles of 0"]
    assert count.startswith("3 of ")
    assert found["largest ratio in Eq. 20, at angles of 0"] == ["1.5"]


def test_the_figures_show_the_numbers(cells):
    charts = {section.title: section.chart for section in angle_sections(cells)}
    heat = charts["Angle between query and key: RoFormer"]
    assert [heat.values.columns[i] for i in (0, 9, 35)] == ["0", "90", "350"]
    for layer, row in zip(cells[0]["layers"], heat.values.to_numpy(), strict=True):
        columns = zip(*layer["angles"]["histogram"], strict=True)
        assert row == pytest.approx([36 * sum(column) / len(column) for column in columns])
    anomalous = lines(charts["Anomalous tokens by rotary pair"])
    # Of the slack form only the length that was read.
    assert list(anomalous) == [
        *("RoFormer, 64 tokens", "RoFormer, 32 tokens", "Slack, 32 tokens"),
        *("Strict, 64 tokens", "Strict, 32 tokens"),
    ]
    shares = [layer["angles"]["lengths"][1]["anomalous_share"] for layer in cells[0]["layers"]]
    mean = [50 * (a + b) for a, b in zip(*shares, strict=True)]
    assert list(anomalous["RoFormer, 64 tokens"].values()) == pytest.approx(mean)
    assert not any(anomalous["Strict, 32 tokens"].values())
    rows = [layer["decay"]["by_distance"] for layer in cells[1]["layers"]]
    decay = lines(charts["Score and bounds by distance: Slack"]).values()
    for line, key in zip(decay, ("score", "eq19", "eq20"), strict=True):
        mean = [(a[key] + b[key]) / 2 for a, b in zip(*rows, strict=True)]
        assert list(line) == [1, 2, 4, 8, 16] and list(line.values()) == pytest.approx(mean)
    shifts = lines(charts["All positions moved"])
    changes = [[entry["score_change"] for entry in layer["shifts"]] for layer in cells[1]["layers"]]
    mean = [(a + b) / 2 for a, b in zip(*changes, strict=True)]
    assert list(shifts["Slack"]) == [1, 100]
    assert list(shifts["Slack"].values()) == pytest.approx(mean)


def test_the_table_has_a_column_a_model_and_fits_a_terminal(cells, capsys, monkeypatch):
    ((header, _),) = printed_tables(cells)
    assert header == ["angles", *KINDS]
    found = table(cells)
    assert found["Θ > π"][2] == "0.0%" and found["Θ > π"][0] != "0.0%"
    assert found["anomalous at 64 tokens"][1] == "–"  # of the slack form only what was read
    monkeypatch.setenv("COLUMNS", "80")
    ((header, rows),) = printed_tables(cells[:1])
    print_table(header, rows)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def test_without_angles_there_is_text_and_no_empty_figure(cells):
    strict = [cell for cell in cells if cell["model"] == "Strict"]
    section = next(s for s in angle_sections(strict) if s.title.startswith("Anomalous"))
    assert section.chart is None and "none, since all angles are 0" in section.text


def test_what_is_not_there_is_left_out(cells):
    without = copy.deepcopy(cells)
    for cell in without:
        cell["shifts"] = []
        for layer in cell["layers"]:
            layer["shifts"] = []
    assert "All positions moved" not in [s.title for s in angle_sections(without)]
    assert not any("moved" in name for name in table(without))
    empty = copy.deepcopy(cells[:1])
    angles = empty[0]["layers"][0]["angles"]
    angles["histogram"] = [[None] * 36 for _ in angles["histogram"]]
    angles["zero_share"] = [1.0 for _ in angles["zero_share"]]
    angles["cases"] = dict.fromkeys("abcd")
    for entry in angles["lengths"]:
        entry["anomalous_share"] = [None for _ in entry["anomalous_share"]]
    for row in empty[0]["layers"][0]["decay"]["by_distance"]:
        row |= {"score": None, "eq19": None, "eq20": None}
    assert len(angle_sections(empty)) == 5
