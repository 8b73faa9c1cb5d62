"""Suites: only what is missing is measured, whatever happened before."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from coca_lab.analysis import task as analyses
from coca_lab.cli import main
from coca_lab.engine import Store
from coca_lab.evaluation import suite as suites
from coca_lab.evaluation.suite import load_suite, open_models, run_suite
from conftest import some_text, tiny_model

OWN = sorted((Path(__file__).parents[3] / "suites").glob("*.yaml"))


@pytest.fixture
def small(tmp_path, tokenizer):
    """Two models, a text, and a suite of every task."""
    for name in ("llama-rope", "llama-slack"):
        tiny_model(name).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "text").mkdir()
    for index in range(3):
        (tmp_path / "text" / f"{index}.txt").write_text(some_text(400, seed=index))
    path = tmp_path / "suite.yaml"
    path.write_text(
        f"""
models:
  RoFormer: {tmp_path / "llama-rope"}
  CoCA-Slack: {tmp_path / "llama-slack"}
scalings:
  - {{kind: none}}
  - {{kind: ntk, factor: 4, models: [CoCA-Slack]}}
perplexity: {{source: {tmp_path / "text"}, windows: [32, 64], attend_last: 32}}
passkey: {{lengths: [260, 900], samples: 2, max_new_tokens: 4}}
needles: {{lengths: [300], kinds: [single, variables], samples: 2, max_new_tokens: 4}}
"""
    )
    return path


def without_time(cells):
    return [{k: v for k, v in cell.items() if k != "seconds"} for cell in cells]


def test_what_is_finished_is_not_measured_again(small, tmp_path, monkeypatch):
    seen = []
    path = run_suite(load_suite(small), tmp_path / "out", progress=lambda *a: seen.append(a))
    cells = json.loads(path.read_text())["results"]
    assert len(cells) == 3 * (3 + 2 + 2) - 1  # attend-last has no scaling
    done = [d for _, d, _ in seen]
    assert done == sorted(done) and done[-1] <= seen[-1][2]
    assert done[-1] > 0.9 * seen[-1][2]
    assert {(c["model"], c["scaling"]) for c in cells if c["task"] == "passkey"} == {
        ("RoFormer", "none"),
        ("CoCA-Slack", "none"),
        ("CoCA-Slack", "ntk"),
    }

    def refuse(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr("coca_lab.evaluation.perplexity.score_documents", refuse)
    monkeypatch.setattr("coca_lab.evaluation.retrieval.greedy_answers", refuse)
    again = json.loads(run_suite(load_suite(small), tmp_path / "out").read_text())["results"]
    assert again == cells or without_time(again) == without_time(cells)
    # One prompt more: the others are still there.
    with pytest.raises(ValueError, match="measured again"):
        run_suite(load_suite(small, ["--passkey.samples=3"]), tmp_path / "out")


def test_another_model_under_the_same_name_is_evaluated_again(small, tmp_path, tokenizer):
    wanted = load_suite(small)
    wanted.tasks = {"passkey": wanted.tasks["passkey"]}
    first = json.loads(run_suite(wanted, tmp_path / "out").read_text())["results"]
    other = tiny_model("llama-slack", seed=5)
    other.save_pretrained(tmp_path / "llama-slack")
    second = json.loads(run_suite(wanted, tmp_path / "out").read_text())["results"]

    def outputs(cells, model):
        return [r["output"] for c in cells if c["model"] == model for r in c["samples"]]

    assert outputs(first, "RoFormer") == outputs(second, "RoFormer")
    assert outputs(first, "CoCA-Slack") != outputs(second, "CoCA-Slack")


def test_killed_in_the_middle_it_continues(small, tmp_path):
    put, count = Store.put, []

    def killed(self, *values):
        put(self, *values)
        count.append(1)
        if len(count) == 9:
            os.kill(os.getpid(), signal.SIGKILL)

    wanted, seen = load_suite(small), []
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        Store.put = killed
        run_suite(wanted, tmp_path / "killed")
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not (tmp_path / "killed" / "results.json").exists()
    path = run_suite(wanted, tmp_path / "killed", progress=lambda *line: seen.append(line))
    assert seen[0][0].startswith("9 of ")
    straight = json.loads(run_suite(wanted, tmp_path / "straight").read_text())["results"]
    assert without_time(json.loads(path.read_text())["results"]) == without_time(straight)


def test_an_analysis_continues_where_it_ended(small, tmp_path, monkeypatch):
    read, indices = analyses.read_document, []

    def read_document(model, document, index, *rest):
        indices.append(index)
        if len(indices) == 2:
            raise KeyboardInterrupt
        return read(model, document, index, *rest)

    monkeypatch.setattr(analyses, "read_document", read_document)
    words = ["analyze", str(tmp_path / "llama-slack"), "--source", str(tmp_path / "text")]
    words += ["--pairs=64", "--shifts=[1]", "--output"]
    assert main([*words, str(tmp_path / "broken.json")]) == 130
    assert main([*words, str(tmp_path / "broken.json")]) == 0 and indices == [0, 1, 1, 2]
    assert main([*words, str(tmp_path / "alone.json")]) == 0
    broken, alone = (json.loads((tmp_path / f).read_text()) for f in ("broken.json", "alone.json"))
    assert broken["results"] == alone["results"]
    assert not list(tmp_path.glob("*.sqlite"))


def test_a_suite_on_ray_is_the_same(small, tmp_path, monkeypatch, ray):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    wanted = load_suite(small, ["--device=auto"])
    alone = json.loads(run_suite(wanted, tmp_path / "alone").read_text())["results"]
    shared = json.loads(run_suite(wanted, tmp_path / "ray", ray="").read_text())["results"]
    assert without_time(shared) == without_time(alone)


def test_from_the_command_line_to_a_report(small, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["eval", "suite", str(small), "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    for words in (
        "perplexity at",
        "passkeys found at",
        "single: R-precision at",
        "CoCA-Slack + NTK",
    ):
        assert words in printed
    assert main(["report", str(out / "results.json"), "--output", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text()
    assert "Passkeys" in page and "Needles" in page


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modles: {}", "modles: there is no such field; did you mean models"),
        ("models: 3", "models"),
        ("models: {a: b}", "needs a task"),
        ("models: {}\npasskey: {}", "needs models"),
        ("models: {a: b}\nscalings: []\npasskey: {}", "needs scalings"),
        ("models: {a: b}\npasskey: {sampels: 3}", "sampels"),
        ("models: {a: b}\npasskey: {samples: 0}", "samples must be at least 1"),
        ("models: {a: b}\nneedles: {count: 0}", "count must be at least 1"),
        ("models: {a: b}\nperplexity: {windows: [8], stride: 9}", "stride"),
        ("models: {a: b}\nscalings: [{kind: cubic}]\npasskey: {}", "cubic"),
        ("models: {a: b}\nscalings: [{kind: ntk, models: [c]}]\npasskey: {}", "does not have: c"),
        (
            "models: {a: b, c: d}\nscalings: [{kind: ntk, models: [a]}]\npasskey: {}",
            "no scaling applies to c",
        ),
    ],
)
def test_unfit_suites_are_refused(text, message, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_suite(path)
    assert "\n" not in str(caught.value)


def test_texts_are_shared_by_models_that_encode_and_end_them_alike(small, tmp_path, tokenizer):
    def cached_text(name):
        models = {model.name: model for model in open_models(load_suite(small))}
        return models["RoFormer"].texts is models[name].texts

    assert cached_text("CoCA-Slack")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "llama-slack")
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(5)
    tokenizer.save_pretrained(tmp_path / "llama-slack")
    assert not cached_text("CoCA-Slack")


def test_a_second_process_is_named(small, tmp_path):
    with (
        Store(tmp_path / "out" / suites.STORE_FILE),
        pytest.raises(ValueError, match="is in use by another process"),
    ):
        run_suite(load_suite(small), tmp_path / "out")


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_the_projects_own_suites_load(path):
    assert load_suite(path).models
    head = path.read_text()
    assert head.startswith("#") and "Command" in head and "Needs" in head
