"""The commands that measure a model, and the report of their results."""

import json
from importlib.metadata import version

from coca_lab.store import Store
from commands import run


def test_eval_perplexity_and_report(capsys, model_folder, text_folder, tmp_path):
    output = tmp_path / "deep" / "result.json"
    code, out, err = run(
        capsys, "eval", "perplexity", model_folder, "--source", text_folder, "--windows", "16,64",
        "--scaling", "ntk", "--factor", "2", "--attend-last", "16", "--output", output,
        "--name", "tiny",
    )  # fmt: skip
    assert code == 0, err
    content = json.loads(output.read_text())
    cells = content["results"]
    assert [(c["scaling"], c["window"]) for c in cells] == [
        ("ntk", 16), ("ntk", 64), ("attend-last", 16),
    ]  # fmt: skip
    assert len({c["tokens"] for c in cells}) == 1
    assert content["environment"]["versions"]["torch"] == version("torch")
    assert f"{cells[1]['perplexity']:.1f}" in out and "tiny + NTK (2)" in out
    page = tmp_path / "page.html"
    code, out, err = run(capsys, "report", output, "--output", page, "--title", "Mine")
    assert code == 0, err
    assert "<title>Mine</title>" in page.read_text()


def test_a_command_that_was_stopped_resumes_from_its_values(
    capsys, model_folder, text_folder, tmp_path, monkeypatch
):
    words = [
        "eval", "perplexity", model_folder, "--source", text_folder, "--windows", "16,64",
        "--output", tmp_path / "r.json",
    ]  # fmt: skip

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("coca_lab.evaluation.plan.write_json", stopped)
    assert run(capsys, *words)[0] == 130
    with Store(tmp_path / "r.values.sqlite") as store:
        assert len(store) == 2
    monkeypatch.undo()
    monkeypatch.setattr("coca_lab.evaluation.perplexity.score_windows", stopped)
    code, _, err = run(capsys, *words)
    assert code == 0, err
    assert len(json.loads((tmp_path / "r.json").read_text())["results"]) == 2
    assert not (tmp_path / "r.values.sqlite").exists()
