"""Recall as a command: cells for every length and load that fit, and their table."""

import json

from commands import run


def test_recall_is_measured_by_length_and_pairs(capsys, model_folder, tmp_path):
    words = ["eval", "recall", model_folder, "--output", tmp_path / "r.json", "--samples=3"]
    code, said, error = run(capsys, *words, "--lengths=20,40", "--pairs=4,8", "--name=tiny")
    assert code == 0, error
    cells = json.loads((tmp_path / "r.json").read_text())["results"]
    assert [(c["length"], c["pairs"], c["asked"]) for c in cells] == [
        (20, 4, 12), (40, 4, 12), (40, 8, 24)
    ]  # fmt: skip
    for cell in cells:
        assert cell["right"] == sum(right for _, right in cell["octaves"].values())
        assert cell["accuracy"] == cell["right"] / cell["asked"]
    assert said.count("share of questions answered at") == 2 and "tiny" in said
    assert "8 pairs" in said
    code, _, error = run(capsys, *words, "--lengths=15,40", "--pairs=4,8")
    assert code == 2 and "texts of 15 tokens have no room for 4 pairs, which take 16" in error
