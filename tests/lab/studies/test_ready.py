"""Models that are evaluated as they are: only what is missing is measured, whatever happened."""

import json
import os
import shutil
import signal

import pytest
import torch
from transformers import AutoTokenizer

from coca_lab.evaluation.plan import open_models
from coca_lab.store import Store
from coca_lab.studies import load_study, run_study, running
from conftest import tiny_model
from runs import cells_of

pytestmark = pytest.mark.usefixtures("undrawn")

STUDY = """
models:
  RoFormer: {rope}
  CoCA-Slack: {slack}
scalings:
  - {{kind: none}}
  - {{kind: ntk, factor: 4, models: [CoCA-Slack]}}
perplexity: {{source: {text}, max_documents: 3, windows: [32, 64], attend_last: 32}}
passkey: {{lengths: [260, 900], samples: 2, max_new_tokens: 4}}
ruler: {{lengths: [1200, 1201], kinds: [fwe], samples: 2}}
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory, tokenizer, model_folder, text_folder):
    """A study of every task for two models."""
    folder = tmp_path_factory.mktemp("small")
    tiny_model("llama-rope").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = STUDY.format(rope=folder, slack=model_folder, text=text_folder)
    (folder / "study.yaml").write_text(text)
    return folder / "study.yaml"


def results(study, out, **options):
    return cells_of(run_study(study, out, **options))


def test_what_ends_early_has_the_same_prompts_of_every_method(small, tmp_path, monkeypatch):
    """A whole table of them is written by the command with fewer samples, without the model."""
    words = ["--methods=[{method: none}, {method: linear, factor: 2}]", "--models", "{a: FOLDER}"]
    words = [word.replace("FOLDER", str(small.parent)) for word in words]
    only = tmp_path / "only.yaml"
    only.write_text("passkey: {lengths: [260, 900], max_new_tokens: 4, batch_tokens: 260}")

    def study(samples):
        return load_study(only, [*words, f"--passkey.samples={samples}"])

    def stop(line, done, total):
        if done >= 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(study(3), tmp_path / "out", progress=stop)
    monkeypatch.setattr("coca_lab.evaluation.task.load_model", None)
    cells = results(study(1), tmp_path / "out")
    assert len(cells) == 4 and all(len(cell["samples"]) == 1 for cell in cells)


def test_workers_share_the_measurements_of_one_model(small, tmp_path):
    """As many as are asked for; by default no more than models."""
    study = load_study(small)
    for asked, count in ((2, 2), (None, 1)):
        with running._executor(study, tmp_path, trials=1, ray=None, workers=asked) as executor:
            assert executor.slots == count


@pytest.fixture(scope="module")
def finished(small, tmp_path_factory):
    """The folder of the finished study, to be copied, its cells and its progress."""
    out, seen = tmp_path_factory.mktemp("finished") / "out", []
    cells = results(load_study(small), out, progress=lambda *line: seen.append(line))
    return out, cells, seen


def test_what_is_finished_is_not_measured_again(small, finished, tmp_path, monkeypatch):
    out, cells, seen = finished
    assert len(cells) == 3 * (3 + 2 + 2) - 1  # attend-last has no scaling
    done = [d for _, d, _ in seen]
    assert done == sorted(done) and done[-1] == seen[-1][2]
    about = ("model", "attention", "training_length", "scaling")
    assert {tuple(c[name] for name in about) for c in cells if c["task"] == "passkey"} == {
        ("RoFormer", "rope", 32, "none"),
        ("CoCA-Slack", "slack", 32, "none"),
        ("CoCA-Slack", "slack", 32, "ntk_text"),
    }

    def refuse(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr("coca_lab.evaluation.perplexity.score_windows", refuse)
    monkeypatch.setattr("coca_lab.evaluation.prompts.greedy_answers", refuse)
    out = shutil.copytree(out, tmp_path / "out")
    assert results(load_study(small), out) == cells
    # One prompt more: the others are still there.
    with pytest.raises(ValueError, match="measured again"):
        run_study(load_study(small, ["--passkey.samples=3"]), out)


def test_killed_in_the_middle_it_continues(small, finished, tmp_path, monkeypatch):
    put, count, again = Store.put, [], []

    def killed(self, *values):
        put(self, *values)
        count.append(1)
        if len(count) == 9:
            os.kill(os.getpid(), signal.SIGKILL)

    wanted = load_study(small)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        Store.put = killed
        run_study(wanted, tmp_path)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    there = json.loads((tmp_path / "results.json").read_text())["results"]
    assert {cell["model"] for cell in there} == {"RoFormer"}  # which was finished
    with Store(tmp_path / "values.sqlite") as store:
        before = len(store)

    def counted(self, keys, *values):
        again.extend(keys)
        put(self, keys, *values)

    monkeypatch.setattr(Store, "put", counted)
    assert results(wanted, tmp_path) == finished[1]
    with Store(tmp_path / "values.sqlite") as store:
        assert len(store) == before + len(again)  # nothing twice


def test_texts_are_shared_by_models_that_encode_and_end_them_alike(small, model_folder, tmp_path):
    wanted = load_study(small)

    def share_text():
        paths = {name: options["path"] for name, options in wanted.models.items()}
        first, second = open_models(wanted, paths, {})
        return first.texts is second.texts

    assert share_text()
    other = shutil.copytree(model_folder, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(5)
    tokenizer.save_pretrained(other)
    wanted.models["CoCA-Slack"] = {"path": str(other)}
    assert not share_text()
