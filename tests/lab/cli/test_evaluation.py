"""The commands that measure a model, and the report of their results."""

import json

import torch

from coca_lab.engine import Store
from commands import run
from conftest import some_text


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
    assert content["environment"]["versions"]["torch"] == torch.__version__
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

    monkeypatch.setattr("coca_lab.cli.evaluation.write_json", stopped)
    assert run(capsys, *words)[0] == 130
    with Store(tmp_path / "r.values.sqlite") as store:
        assert len(store) == 2
    monkeypatch.undo()
    monkeypatch.setattr("coca_lab.evaluation.perplexity.score_documents", stopped)
    code, _, err = run(capsys, *words)
    assert code == 0, err
    assert len(json.loads((tmp_path / "r.json").read_text())["results"]) == 2
    assert not (tmp_path / "r.values.sqlite").exists()


def test_a_result_file_that_cannot_be_written_is_found_before_the_work(capsys, tmp_path):
    code, _, err = run(capsys, "eval", "perplexity", "nowhere", "--output", tmp_path)
    assert code == 2 and "is a folder" in err


def test_a_document_shorter_than_the_window_is_an_error(capsys, model_folder, tmp_path):
    (tmp_path / "short.txt").write_text("alpha1 beta2")
    code, _, err = run(
        capsys, "eval", "perplexity", model_folder, "--source", tmp_path, "--windows", "64"
    )
    assert code == 2
    assert "short.txt' has" in err and "--skip-short" in err
    (tmp_path / "long.txt").write_text(some_text(300))
    code, out, err = run(
        capsys, "eval", "perplexity", model_folder, "--source", tmp_path, "--windows", "64",
        "--skip-short", "--output", tmp_path / "r.json",
    )  # fmt: skip
    assert code == 0, err
    assert "perplexity at" in out


def test_analyze_measures_angles(capsys, model_folder, text_folder, tmp_path):
    output = tmp_path / "angles.json"
    run(
        capsys, "analyze", model_folder, "--name", "Tiny", "--source", text_folder,
        "--max-documents", "1", "--pairs", "8", "--shifts", "[]", "--output", output,
    )  # fmt: skip
    assert [(c["task"], c["model"]) for c in json.loads(output.read_text())["results"]] == [
        ("angles", "Tiny")
    ]
