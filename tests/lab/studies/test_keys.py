"""No figure is stale: whatever a value depends on may change, and it is measured again."""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from coca_attention.errors import UserError
from coca_lab import fingerprints
from coca_lab.data import train_tokenizer
from coca_lab.data.text import Document
from coca_lab.evaluation import TASKS, Task, register_task
from coca_lab.evaluation.task import at_once
from coca_lab.settings.evaluations import TASK_OPTIONS
from coca_lab.studies import load_study, run_study
from coca_lab.training import train
from conftest import some_text, tiny_model
from runs import OPTIONS, cells_of, recipe

pytestmark = pytest.mark.usefixtures("undrawn")

TRAINED = {name: x for name, x in OPTIONS.items() if not name.startswith("validation.")}
TRAINED |= {"training.steps": 4, "training.report_to": [], "data.held_out": 0.05}
PERPLEXITY = {"windows": [16], "max_documents": 2, "skip_short": True}
ROPE = {"model.attention": "rope"}


def study(path, models, text, **fields):
    """A study of models without training options that converted and ready ones do not take."""
    models = {
        name: options if "path" in options or "model.start" in options else TRAINED | options
        for name, options in models.items()
    }
    content = {"models": models, "text": str(text), "perplexity": PERPLEXITY, **fields}
    (path / "study.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return load_study(path / "study.yaml")


def nats(results):
    """Nats of every document by model and size; the sum over documents can be equal by chance."""
    cells = json.loads(Path(results).read_text())["results"]
    return {
        f"{cell['model']} {cell.get('size', '')}".strip(): tuple(
            document["nats"] for document in cell["documents"]
        )
        for cell in cells
    }


def run(*arguments, **fields):
    output = arguments[0] / "out"
    return nats(run_study(study(*arguments, **fields), output, workers=0))


def edit(file, content):
    """Change a file in place and set its time back; its size must stay."""
    before = file.stat()
    assert len(content) == before.st_size and content != file.read_bytes()
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def reweigh(folder, seed):
    """Other weights of the same size in the same file, with its time set back."""
    other = folder.parent / f"other-{seed}"
    tiny_model("slack", seed=seed).save_pretrained(other)
    edit(folder / "model.safetensors", (other / "model.safetensors").read_bytes())


@pytest.fixture
def model(model_folder, tmp_path):
    """A model's folder, to be changed."""
    return shutil.copytree(model_folder, tmp_path / "model")


@pytest.fixture
def text(text_folder, tmp_path):
    """A folder of text, to be changed."""
    return shutil.copytree(text_folder, tmp_path / "text")


def other_text(folder):
    """Every document with other words, in files of the same size and time."""
    for file in folder.iterdir():
        edit(file, file.read_bytes().replace(b"alpha", b"omega").replace(b"theta", b"sigma"))


# Studies


def test_a_changed_base_changes_what_starts_from_it(text, tmp_path):
    start = {"model.start": "base", "model.attention": "rope"}
    kept = {n: x for n, x in TRAINED.items() if n.startswith("training.") or n == "data.held_out"}
    models = {
        "base": ROPE,
        "tuned": {**start, **kept, "data.block_length": 16},
        "limited": {"path": "base", "convert.form": "rope", "convert.near": 8},
    }
    before = run(tmp_path, models, text)
    models["base"] = {**ROPE, "training.steps": 9, "training.learning_rate": 0.1}
    shutil.rmtree(tmp_path / "out" / "base")
    with pytest.raises(UserError, match=r"1 of 3 .*tuned: the start has changed since .* remove"):
        run(tmp_path, models, text)
    now = nats(tmp_path / "out" / "results.json")
    assert now.keys() == {"base", "limited"} and all(now[n] != before[n] for n in now)
    shutil.rmtree(tmp_path / "out" / "tuned")
    now = run(tmp_path, models, text)
    assert all(now[name] != before[name] for name in models)


def test_weights_and_text_edited_in_place_are_measured_again(model, text, tmp_path):
    models = {"ready": {"path": str(model)}}
    found = [run(tmp_path, models, text)]
    reweigh(model, 1)
    found.append(run(tmp_path, models, text))
    other_text(text)
    found.append(run(tmp_path, models, text))
    assert len({each["ready"] for each in found}) == 3
    kept = [nats(tmp_path / "out" / f"results-{n}.json") for n in (1, 2)]
    assert kept == found[:2]


def test_another_training_text_is_refused_before_anything_is_written(model, text, tmp_path):
    models = {"some": ROPE, "ready": {"path": str(model)}}
    run(tmp_path, models, text)
    before = (tmp_path / "out" / "results.json").read_bytes()
    other_text(text)
    with pytest.raises(
        UserError, match=r"the training text and the tokenizer have changed .* remove"
    ):
        run(tmp_path, models, text)
    assert (tmp_path / "out" / "results.json").read_bytes() == before


def test_a_task_with_a_source_of_its_own_does_not_read_the_text_of_the_study(model, text, tmp_path):
    own = shutil.copytree(text, tmp_path / "own")
    other_text(own)
    models = {"ready": {"path": str(model)}}
    alone = run(tmp_path, models, own)
    assert run(tmp_path, models, text) != alone
    assert run(tmp_path, models, text, perplexity={**PERPLEXITY, "source": str(own)}) == alone


def test_other_options_of_a_conversion_and_another_start_convert_again(base, text, tmp_path):
    path = shutil.copytree(base, tmp_path / "base")
    found = []
    for options in ({}, {"convert.near": 4}, {"convert.form": "strict"}):
        options = {"path": str(path), "convert.form": "rope", "convert.near": 8, **options}
        if options["convert.form"] == "strict":
            del options["convert.near"]
        found.append(run(tmp_path, {"made": options}, text)["made"])
    shutil.copyfile(base / "config.json", path / "config.json")
    weights = path / "model.safetensors"
    edit(weights, weights.read_bytes()[:-8] + bytes(8))
    found.append(run(tmp_path, {"made": options}, text)["made"])
    assert len(set(found)) == 4
    # What the study has not converted is never replaced.
    (tmp_path / "out" / "made" / "conversion.json").unlink()
    with pytest.raises(UserError, match=r"made: .*is a file or has content"):
        run(tmp_path, {"made": {**options, "convert.form": "slack"}}, text)


def test_models_share_a_tokenizer_that_fits_their_recipe(text, tmp_path):
    def entries(name):
        return len(AutoTokenizer.from_pretrained(tmp_path / "out" / name))

    b = {**ROPE, "data.vocab_size": 280}
    run(tmp_path, {"b": b}, text)
    run(tmp_path, {"a": {**ROPE, "data.vocab_size": 260}, "b": b}, text)
    assert [entries(name) for name in ("a", "b")] == [260, 280]
    with pytest.raises(UserError, match=r"different: data\.vocab_size"):
        run(tmp_path, {"a": {**ROPE, "data.vocab_size": 275}}, text)


def test_threads_and_titles_are_no_other_measurement_and_new_models_add_to_it(
    model, text, tmp_path
):
    models = {"ready": {"path": str(model)}}
    run(tmp_path, models, text, title="One")
    run(tmp_path, models, text, title="Two", num_cpus=2)
    models["copy"] = {"path": str(shutil.copytree(model, tmp_path / "copy"))}
    found = run(tmp_path, models, text)
    assert found["copy"] == found["ready"]
    assert [path.name for path in (tmp_path / "out").glob("results*.json")] == ["results.json"]
    del models["ready"]
    run(tmp_path, models, text)
    assert nats(tmp_path / "out" / "results-1.json") == found


def test_a_model_from_elsewhere_has_no_size(model, text, tmp_path):
    models = {
        "ready": {"path": str(model)},
        "same": {"path": "ready"},
        "some": ROPE,
        "own": {"path": "some"},
    }
    sizes = {"small": {}, "large": {"model.hidden_size": 32}}
    planned = study(tmp_path, models, text, sizes=sizes)
    assert [trial.of_size for trial in planned.trials(tmp_path)] == [
        "ready", "same", "some, small", "own, small", "some, large", "own, large",
    ]  # fmt: skip
    assert {trial.model.parent for trial in planned.trials(tmp_path)} == {tmp_path}


@pytest.mark.parametrize("name", ["tokenizers", "..", "report.html", "Results.json", "logs", "!"])
def test_names_of_the_studys_own_files_are_refused(name, model, text, tmp_path):
    planned = study(tmp_path, {name: {"path": str(model)}}, text)
    with pytest.raises(UserError, match=f"cannot be called '{name}'.*rename it"):
        run_study(planned, tmp_path / "out", workers=0)
    assert not (tmp_path / "out" / "values.sqlite").exists()


def test_two_studies_in_one_folder(text, tmp_path, monkeypatch):
    def both(*arguments):
        monkeypatch.undo()
        with pytest.raises(UserError, match="is in use by another process: wait"):
            run(tmp_path, {"some": ROPE}, text)
        return load(*arguments)

    load = __import__("coca_lab.studies.running", fromlist=["_"]).load_run_tokenizer
    monkeypatch.setattr("coca_lab.studies.running.load_run_tokenizer", both)
    assert run(tmp_path, {"some": ROPE}, text)


# Models that are evaluated as they are


def ready(path, model, **tasks):
    content = {"models": {"m": str(model)}, **tasks}
    (path / "study.yaml").write_text(yaml.safe_dump(content))
    return load_study(path / "study.yaml")


def cells(planned, path):
    return cells_of(run_study(planned, path / "out"))


def test_a_study_notices_other_files_of_a_tokenizer(model, tmp_path):
    tokenizer = train_tokenizer([Document("a", some_text(2000))], 280)
    rules = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    (model / "tokenizer.json").unlink()
    (model / "vocab.json").write_text(json.dumps(rules["vocab"]))
    merges = [" ".join(pair) for pair in rules["merges"]]
    (model / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    planned = ready(tmp_path, model, passkey={"lengths": [300], "samples": 1, "max_new_tokens": 4})
    before = cells(planned, tmp_path)
    (model / "merges.txt").write_text("\n".join(["#version: 0.2", *merges[:9], ""]))
    assert cells(planned, tmp_path)[0]["samples"] != before[0]["samples"]


@dataclass
class NoSettings:
    """Nothing to set."""


def test_a_study_notices_another_task_of_the_same_name(model, tmp_path):
    answers = []
    for answer in (1, 2):
        module = {}
        file = tmp_path / "task.py"
        file.write_text(
            f"def evaluate(model, settings, scaling):\n    return [{{'n': {answer}}}]\n"
        )
        exec(compile(file.read_text(), str(file), "exec"), module)
        register_task(Task("toy", "A toy.", NoSettings, measure=at_once(module["evaluate"])))
        try:
            answers.append(cells(ready(tmp_path, model, toy={}), tmp_path)[0]["n"])
        finally:
            del TASKS["toy"], TASK_OPTIONS["toy"]
    assert answers == [1, 2]


@dataclass
class Measuring:
    """Has no hash, as a dataclass without ``frozen``."""

    def __call__(self):
        return []

    def measured(self):
        return []


def test_a_task_may_be_measured_by_any_callable():
    for measure in (Measuring(), Measuring().measured, partial(Measuring(), 1)):
        first, again = (fingerprints.code_fingerprint(measure) for _ in range(2))
        assert first == again


def test_a_study_notices_other_code_of_the_package(model, tmp_path, text, monkeypatch):
    for package in ("coca_attention", "coca_lab"):
        source = Path(fingerprints.__file__).parents[1] / package
        shutil.copytree(source, tmp_path / "src" / package)
    monkeypatch.setattr(fingerprints, "__file__", str(tmp_path / "src/coca_lab/fingerprints.py"))
    measured, score = [], __import__("coca_lab.evaluation.perplexity", fromlist=["_"])

    def counted(*arguments):
        measured.append(arguments)
        return score_windows(*arguments)

    score_windows = score.score_windows
    monkeypatch.setattr(score, "score_windows", counted)
    planned = ready(tmp_path, model, perplexity={"source": str(text), **PERPLEXITY})
    found = []
    for part in ("coca_lab/report/page.py", "coca_attention/ops/rules.py", "coca_lab/intervals.py"):
        with open(tmp_path / "src" / part, "a") as file:
            file.write("# changed\n")
        fingerprints._package_code.cache_clear()
        cells(planned, tmp_path)
        cells(planned, tmp_path)
        found.append(len(measured))
    fingerprints._package_code.cache_clear()
    assert found == [1, 2, 3]


# Training


def test_a_finished_run_says_what_has_changed_since(text, tmp_path, caplog):
    small = recipe(text, **{"validation.every": "null"})
    train(small, tmp_path / "run")
    caplog.clear()
    assert train(small, tmp_path / "run") == tmp_path / "run" and not caplog.text
    other_text(text)
    with pytest.raises(UserError, match="the training text has changed since this run"):
        train(small, tmp_path / "run")
    (tmp_path / "run" / "inputs.json").unlink()  # of an earlier version
    train(small, tmp_path / "run")
    assert "not known is whether this changed since: training text" in caplog.text


# Fingerprints


def test_large_files_are_read_once_and_changed_ones_again(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprints, "SETTLED", 0)
    read, digest = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *of: read.append(of) or digest(*of))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "weights"
    file.write_bytes(b"1234")
    before = [fingerprints.files_fingerprint([file]) for _ in range(2)]
    assert before[0] == before[1] and len(read) == 1
    edit(file, b"4321")
    assert fingerprints.files_fingerprint([file]) != before[0] and len(read) == 2
    shutil.copyfile(file, tmp_path / "copy")  # without a cache, and elsewhere
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert fingerprints.files_fingerprint([file]) != before[0]
    monkeypatch.setattr(fingerprints, "SETTLED", 10**12)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "young"))
    fingerprints.files_fingerprint([file])
    assert not (tmp_path / "young").exists()
