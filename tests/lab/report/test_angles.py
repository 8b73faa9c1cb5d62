"""Sections of the report about angles."""

import copy
import json

import pytest
import torch
from result_cells import lines, shown

from coca_lab.analysis import AnalysisSettings, analyze
from coca_lab.cli.console import print_table
from coca_lab.report import printed_tables
from conftest import tiny_model

LAYERS = ("", ", layer 0", ", layer 1")
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
    return {name: entries for name, *entries in shown(*cells)["Figures of every model"].rows}


def test_sections_name_their_findings(cells):
    sections = shown(*cells)
    assert list(sections) == [
        "Angle between query and key",
        "Anomalous tokens by rotary pair",
        "Score and bounds by distance",
        "All positions moved",
        "Figures of every model",
    ]
    *drawn, figures = sections.values()
    assert all(section.lead and section.chart for section in drawn) and not figures.chart
    rope, slack = (
        sum(layer[angles]["cases"]["d"] for layer in cell["layers"]) / 2
        for cell, angles in zip(cells, ("angles", "effective_angles"), strict=False)
    )
    assert f"exceed π: {rope:.1%} (RoFormer), {slack:.1%} (Slack)." in drawn[0].lead
    found = [x["angles"]["lengths"][1]["anomalous_share"] for x in cells[0]["layers"]]
    share = sum(map(sum, found)) / sum(map(len, found))
    assert f"RoFormer {share:.1%} at 64 tokens, Slack" in drawn[1].lead
    assert "RoFormer within round-off, Slack 0." in drawn[3].lead
    checked = sum(layer["decay"]["eq19"]["checked"] for layer in cells[0]["layers"])
    assert table(cells)["violations of Eq. 19"][0] == f"0 of {checked:,}"
    shares = [layer["absolute_share"] for layer in cells[1]["layers"]]
    assert table(cells)["scores that depend on m + n"][1:] == [f"{sum(shares) / 2:.1%}", "–"]


def test_the_charts_show_the_numbers(cells):
    charts = {title: section.chart for title, section in shown(*cells).items()}
    density = lines(charts["Angle between query and key"])
    assert list(density) == [f"{n}{part}" for n in ("RoFormer", "Slack") for part in LAYERS]
    layer, (first, *_) = cells[0]["layers"][0], density["RoFormer, layer 0"].values()
    column = [row[0] for row in layer["angles"]["histogram"]]
    assert first == pytest.approx(36 * sum(column) / len(column))
    assert sum(density["Slack"].values()) == pytest.approx(36)
    anomalous = lines(charts["Anomalous tokens by rotary pair"])
    # Of the slack form only the length that was read.
    assert list(anomalous) == [*("RoFormer, 64 tokens", "RoFormer, 32 tokens", "Slack, 32 tokens")]
    shares = [layer["angles"]["lengths"][1]["anomalous_share"] for layer in cells[0]["layers"]]
    mean = [50 * (a + b) for a, b in zip(*shares, strict=True)]
    assert list(anomalous["RoFormer, 64 tokens"].values()) == pytest.approx(mean)
    rows = [layer["decay"]["by_distance"] for layer in cells[1]["layers"]]
    decay = [
        line for name, line in lines(charts["Score and bounds by distance"]).items()
        if name.startswith("Slack")
    ]  # fmt: skip
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
    first["angles"]["cases"] = {"d": None}
    for row in first["decay"]["by_distance"]:
        row |= {"score": None, "eq19": None, "eq20": None}
    assert "All positions moved" not in shown(*changed)
    found = table(changed)
    assert found["violations of Eq. 20, at angles of 0"][0].startswith("3 of ")
    assert found["largest ratio in Eq. 20, at angles of 0"] == ["1.5"]
    assert not any("moved" in name for name in found)
    # Without angles there are no figures of them.
    assert "Angle between query and key" not in shown(*cells[2:])
