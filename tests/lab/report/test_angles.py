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


def test_texts_say_what_was_measured(cells):
    sections = angle_sections(cells)
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
    texts = {section.title: section.text for section in sections}
    shares = [layer["angles"]["cases"]["d"] for layer in cells[0]["layers"]]
    assert f"in {sum(shares) / 2:.1%} of all" in texts["Angle between query and key: RoFormer"]
    slack = [layer["effective_angles"]["cases"]["d"] for layer in cells[1]["layers"]]
    assert f"in {sum(slack) / 2:.1%} of all" in texts["Angle between query and key: Slack"]
    assert "Strict: none, since all angles are 0" in texts["Anomalous tokens by rotary pair"]
    found = [x["angles"]["lengths"][1]["anomalous_share"] for x in cells[0]["layers"]]
    share = sum(map(sum, found)) / sum(map(len, found))
    assert f"{share:.1%} at 64 tokens" in texts["Anomalous tokens by rotary pair"]
    checked = sum(layer["decay"]["eq19"]["checked"] for layer in cells[0]["layers"])
    assert table(cells)["violations of Eq. 19"][0] == f"0 of {checked:,}"
    moved = texts["All positions moved"]
    assert "RoFormer, moved by 100 tokens: scores do not change beyond round-off" in moved
    assert "Strict, moved by 100 tokens: scores do not change beyond round-off" in moved
    assert re.search(r"Slack, moved by 100 tokens: scores change by [\d.]+ of their spread", moved)
    shares = [layer["absolute_share"] for layer in cells[1]["layers"]]
    assert moved.count("depends on m + n") == 1
    assert f"{sum(shares) / 2:.1%} of its scores depends on m + n" in moved


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


def test_violations_are_shown_and_what_is_not_there_is_left_out(cells):
    changed = copy.deepcopy(cells[:1])
    first, second = changed[0]["layers"]
    second["decay"]["eq20"] |= {"violations": 3, "largest_ratio": 1.5}
    changed[0]["shifts"] = first["shifts"] = second["shifts"] = []
    angles = first["angles"]
    angles["histogram"] = [[None] * 36 for _ in angles["histogram"]]
    angles["zero_share"] = [1.0 for _ in angles["zero_share"]]
    angles["cases"] = dict.fromkeys("abcd")
    for entry in angles["lengths"]:
        entry["anomalous_share"] = [None for _ in entry["anomalous_share"]]
    for row in first["decay"]["by_distance"]:
        row |= {"score": None, "eq19": None, "eq20": None}
    assert len(angle_sections(changed)) == 4
    found = table(changed)
    assert found["violations of Eq. 20, at angles of 0"][0].startswith("3 of ")
    assert found["largest ratio in Eq. 20, at angles of 0"] == ["1.5"]
    assert not any("moved" in name for name in found)
    # Without angles there is text, and no empty figure.
    anomalous, *_ = angle_sections(cells[2:])
    assert anomalous.chart is None and "none, since all angles are 0" in anomalous.text
