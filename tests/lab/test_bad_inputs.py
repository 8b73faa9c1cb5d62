"""Bad inputs of every command: one line that says what to do, exit code 2, nothing lost.

What is wrong with single settings and files of text is tested where they are read.
"""

import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM

from coca_lab.cli import main
from coca_lab.data import Document, train_tokenizer
from conftest import tiny_model


class Place:
    """A model of each kind, a text and a finished run, to spoil copies of."""

    def __init__(self, folder, tokenizer, text, trained):
        self.folder, self.text, self.count = folder, text, 0
        for name in ("llama-rope", "llama-slack", "alibi"):
            tiny_model(name).save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
        self.model = folder / "llama-rope"
        self.run = shutil.copytree(trained, folder / "run")

    def new(self, ending: str = "") -> Path:
        self.count += 1
        return self.folder / f"{self.count}{ending}"

    def file(self, content: str | bytes, ending: str = ".yaml") -> str:
        path = self.new(ending)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    def copy(self, source: str, **files: bytes | None) -> str:
        """A copy in which files have other content, None for none; ``a__b_c`` means a/b.c."""
        path = shutil.copytree(self.folder / source, self.new())
        for name, content in files.items():
            file = path / ".".join(name.replace("__", "/").rsplit("_", 1))
            file.unlink()
            if content is not None:
                file.write_bytes(content)
        return str(path)

    def configured(self, **fields) -> str:
        """A copy of a model with other fields in its configuration."""
        content = json.loads((self.model / "config.json").read_text()) | fields
        return self.copy("llama-rope", config_json=json.dumps(content).encode())

    def recipe(self, **fields) -> str:
        """The recipe of the run with other fields."""
        content = yaml.safe_load((self.run / "recipe.yaml").read_text())
        for name, value in fields.items():
            section, _, field = name.partition("__")
            content[section][field] = value
        return self.file(yaml.safe_dump(content))

    def study(self, **fields) -> str:
        content = {"models": {"a": str(self.model)}, "passkey": {"lengths": [300], "samples": 1}}
        return self.file(yaml.safe_dump(content | fields))

    def damaged_values(self) -> str:
        """A result file's name, beside which there are values that are none."""
        path = self.file(b"not a database, but as long as one" * 50, ".values.sqlite")
        return path.replace(".values.sqlite", ".json")

    def encoder(self) -> str:
        """A model that sees what it would have to predict."""
        sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        path = self.new()
        BertForMaskedLM(BertConfig(hidden_size=16, vocab_size=300, **sizes)).save_pretrained(path)
        return str(path)

    def not_numbers(self) -> str:
        """A copy of a model whose weights are NaN."""
        path = Path(self.copy("llama-rope")) / "model.safetensors"
        weights = {name: weight * math.nan for name, weight in load_file(path).items()}
        save_file(weights, path, {"format": "pt"})
        return str(path.parent)


@pytest.fixture(scope="module")
def place(tmp_path_factory, tokenizer, text_folder, trained):
    folder = tmp_path_factory.mktemp("place")
    before = Path.cwd()
    os.chdir(folder)
    yield Place(folder, tokenizer, text_folder, trained)
    os.chdir(before)


def train(**fields):
    return lambda p: ["train", p.recipe(**fields), "--output", p.new()]


def train_file(content):
    return lambda p: ["train", p.file(content), "--output", p.new()]


def perplexity(*words, make=lambda p: p.model):
    return lambda p: ["eval", "perplexity", make(p), "--source", p.text, "--windows", "16", *words]


def generate(*words, make=lambda p: p.model):
    return lambda p: ["generate", make(p), *(words or ("alpha", "--max-new-tokens", "2"))]


def study(**fields):
    return lambda p: ["study", p.study(**fields), "--output", p.new()]


def report(content):
    return lambda p: ["report", p.file(content, ".json"), "--output", p.new(".html")]


def convert(*words, make=lambda p: p.model):
    form = () if {"--form", "--from-original"} & {*words} else ("--form", "slack")
    return lambda p: ["convert", make(p), p.new(), *form, *words]


def resumed(**files):
    """A run folder in which a file is damaged, and a recipe equal to its own."""
    return lambda p: [
        "train", p.recipe(), "--output", p.copy("run", **({"training_json": None} | files))
    ]  # fmt: skip


def damaged(**files):
    """What measures a model of which files have other content."""
    return perplexity(make=lambda p: p.copy("llama-rope", **files))


def larger_tokenizer(p):
    path = p.copy("llama-rope")
    text = " ".join(f"{a}{b}" for a in "abcdefghijklmnop" for b in "qrstuvwxyz0123")
    train_tokenizer([Document("a", text)], 500).save_pretrained(path)
    return path


BOMB = "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{f'*a{n}, ' * 10}]\n" for n in range(9))
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n + 1}: &a{n + 1} {{<<: [{f'*a{n}, ' * 10}]}}\n" for n in range(9)
)
CELL = '{"results": [{"task": "perplexity", "model": "a", "scaling": "none", %s}]}'
CASES = {
    # Of every kind one; single settings, files of text and results are tested where they are read.
    "body": (train(model__attention="own", model__body="cohere22"), "did you mean cohere2?"),
    "wandb": (train(training__report_to=["wandb"]), "requires wandb"),
    "heads of a model": (generate(make=lambda p: p.configured(num_attention_heads=0)),
                         "no model could be loaded"),
    "training.json": (lambda p: ["report", p.copy("run", training_json=b'{"curve": ['),
                                 "--output", p.new()], "no valid JSON"),
    "training.json again": (resumed(training_json=b'{"cu'), "training.json is damaged"),
    "tokenizer": (perplexity(make=larger_tokenizer), "entries and the model embeddings for 300"),
    "tokenizer of generate": (generate(" pz oz", make=larger_tokenizer),
                              "use the model's own tokenizer"),
    "NaN": (generate(make=Place.not_numbers), "returns NaN or infinity"),
    "NaN, converted": (convert(make=Place.not_numbers), "not finite"),
    "output of train": (lambda p: ["train", p.recipe(), "--output", "/proc/x"], "/proc"),
    # Recipes.
    "file of a wrong field": (train(model__window=4), ".yaml: model.window is for local layers"),
    "empty file of bytes": (train_file(b"\xff\xfe\x00\x80" * 9), "not a readable recipe"),
    "list": (train_file("- a\n- b"), "a recipe has sections with fields and values"),
    "nested": (train_file("model: " + "[" * 1500), "not a readable recipe"),
    "open bracket": (train_file("model: [1,\n"), "readable recipe: line 1: expected the node"),
    "key twice": (train_file("training: {}\ntraining: {}"), "line 2: training is given twice"),
    "empty recipe": (train_file("# nothing\n"), "got an empty file"),
    "bomb": (train_file(BOMB), "more than 100,000 values"),
    "bomb of merges": (train_file(MERGES), "more than 100,000 values"),
    "tag": (train_file("model: !!python/object/apply:os.getcwd []"), "not a readable recipe"),
    "recursion": (train_file("model: &a {x: *a}"), "with those that aliases repeat"),
    "folder": (lambda p: ["train", p.text], "no such recipe"),
    "many steps": (train(training__steps=10**30), "steps: must be less than"),
    "wide": (train(model__hidden_size=10**8, model__num_heads=10**6), "not enough memory"),
    "deepspeed": (train(training__trainer={"deepspeed": "nowhere.json"}), "training.trainer"),
    "empty source": (train(data__source=""), "data.source: the source is empty"),
    "empty validation": (train(validation__every=1, validation__source=""),
                         "validation.source: the source is empty"),
    "workers": (train(training__trainer={"dataloader_num_workers": -1}), "training.trainer"),
    "optimizer": (train(training__trainer={"optim": "nothing"}), "training.trainer"),
    "run in a file": (lambda p: ["train", p.recipe(), "--output", p.file("x")],
                      "a file is where a folder is needed"),
    "run below a file": (lambda p: ["train", p.recipe(), "--output", p.file("x") + "/y"],
                         "a file is where a folder is needed"),
    "long name": (lambda p: ["train", p.recipe(), "--output", p.folder / ("x" * 300)], "too long"),
    "recipe of a run": (resumed(recipe_yaml=b"["), "not a readable recipe"),
    "text of a run": (resumed(text_json=b"\xff{"), "text.json is damaged"),
    "tokenizer of a run": (resumed(tokenizer__tokenizer_json=b"{"), "no tokenizer could be loaded"),
    # Models.
    "file": (perplexity(make=lambda p: p.file("x")), " is a file: name the model's folder"),
    "relative path": (generate(make=lambda p: "./x"), "./x: there is no such folder; check"),
    "trailing slash": (generate(make=lambda p: "x/"), "x/: there is no such folder; check"),
    "name": (generate(make=lambda p: "org/nowhere"), "there is no such folder here"),
    "no name": (perplexity(make=lambda p: ""), "no config.json"),
    "weights": (damaged(model_safetensors=b""), "damaged"),
    "no weights": (damaged(model_safetensors=None), "its folder has no weights, model.safetensors"),
    "no configuration": (damaged(config_json=b"{"),
                         "no model could be loaded: its config.json is damaged: download or save"),
    "damaged tokenizer": (damaged(tokenizer_json=b""), "tokenizer"),
    "half a tokenizer": (damaged(tokenizer_json=None), "has no tokenizer: copy tokenizer.json"),
    "code of a folder": (perplexity(make=lambda p: p.configured(
        model_type="mine", auto_map={"AutoConfig": "mine.Config"})), "code of its folder"),
    "device": (perplexity("--device", "gpu"), "--device 'gpu' is no device of torch: here there "),
    "encoder": (perplexity(make=Place.encoder), "BertForMaskedLM reads in both directions"),
    "rope_type": (perplexity(make=lambda p: p.configured(rope_scaling={
        "rope_type": "hyperrope", "factor": 2.0})), "hyperrope"),
    "shapes": (perplexity(make=lambda p: p.configured(intermediate_size=72)),
               "have other shapes than config.json gives"),
    # Evaluations.
    "factor alone": (perplexity("--factor", "8"), "--factor is for a method"),
    "factor of generate": (generate("x", "--factor", "8"), "--factor is for a method"),
    "length alone": (perplexity("--length", "8"), "--length is for a method"),
    "length of generate": (generate("x", "--length", "8"), "--length is for a method"),
    "check without text": (lambda p: ["extend", p.model, p.new(), "--check-lengths", "64"],
                           "says how to measure: add --check TEXT, or leave it out"),
    "no source": (perplexity("--source", ""), "the source is empty"),
    "long windows": (perplexity("--windows", str(10**18)), "the largest of --windows needs 1000"),
    "long lengths": (lambda p: ["eval", "needles", p.model, "--source", p.text,
                                "--lengths", "9999999"], "the largest of --lengths needs 9999999"),
    "folder as output": (perplexity("--output", "."), "is a folder"),
    "device as folder": (perplexity("--output", "/dev/null/x"), "/dev/null"),
    "values": (lambda p: [*perplexity()(p), "--output", p.damaged_values()], "sqlite is damaged"),
    "temperature": (generate("x", "--temperature", ".nan"), "temperature: must be a valid number"),
    "cold": (generate("x", "--temperature", "1e-40"), "--temperature must be 0, or at least"),
    "seed of draws": (generate("x", "--seed", str(2**70)), "--seed: must be less than"),
    "bytes": (generate("\udcff"), "not UTF-8"),
    # Names in another encoding, which no card, result or page can say.
    "name of a model": (perplexity(make=lambda p: shutil.copytree(
        p.model, p.new("\udce9"))), "not UTF-8"),
    "name of a target": (lambda p: ["convert", p.model, p.new("\udce9")], "not UTF-8"),
    "name of a run": (lambda p: ["train", p.recipe(), "--output", p.new("\udce9")], "not UTF-8"),
    "name in results": (perplexity("--name", "\udce9"), "not UTF-8"),
    "name of a page": (lambda p: ["report", p.run, "--output", p.new("\udce9.html")], "not UTF-8"),
    # Suites.
    "missing model": (study(models={"a": "/nowhere/b"}), "model a: /nowhere/b: there is no"),
    "length 3": (study(passkey={"lengths": [300, 3]}), "model a: passkey: "),
    # Reports, conversions.
    "no results": (report(""), "no valid JSON"),
    "other results": (report('{"results": 5}'), "results: Input should be a valid list"),
    "other object": (report('{"a": 1}'), "expected an object with results"),
    "nothing to show": (report('{"results": []}'), "neither results that the report shows"),
    "strange cells": (report(CELL % '"window": "x", "perplexity": 2'),
                      "unable to parse string as an integer, got 'x'"),
    "results of NaN": (report(CELL % '"window": 16, "perplexity": NaN'), "has NaN in place of a"),
    "nested results": (report("[" * 99999), "no valid JSON"),
    "page over results": (lambda p: ["report", p.run / "training.json", "--output",
                                     p.run / "training.json"], "no page of coca report"),
    "page over a page": (lambda p: ["report", p.run / "training.json", "--output",
                                    p.file("<!doctype html>", ".html")], "no page of coca report"),
    "results over a model": (perplexity("--output", "llama-rope/config.json"),
                             "config.json is there and no result file"),
    "results over a list": (lambda p: [*perplexity()(p), "--output", p.file("[]", ".json")],
                            "is there and no result file"),
    "command of before": (lambda p: ["analyze", p.model], "coca analyze: angles of queries and"),
    # Of two mistakes, the one that is told is the one that was looked for first.
    "target": (lambda p: ["extend", p.model, "/proc/x"],
               "/proc/x cannot be written (No such file or directory): name another folder"),
    "target of an export": (lambda p: ["export", p.model, "/proc/x"], "/proc/x cannot be written"),
    "form to convert to": (convert("--form", "stric", make=lambda p: p.copy(
        "llama-rope", model_safetensors=b"")), "coca: error: --form must be"),
    "free pairs": (convert("--free-pairs", "99"), "coca_free_pairs must be a whole number"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_exit_code_2(place, capfd, name):
    make, message = CASES[name]
    words = [str(word) for word in make(place)]
    results = (place.run / "training.json").read_bytes()
    assert main(words) == 2
    said = capfd.readouterr().err
    last = said.splitlines()[-1]
    assert last.startswith("coca: error: ") and message in last
    assert "Traceback" not in said and "unexpected" not in last.replace("unexpected keyword", "")
    assert (place.run / "training.json").read_bytes() == results
    assert not [*(place.folder / "runs").rglob("*.sqlite")]


def test_a_refused_evaluation_leaves_no_folder(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    assert main(["eval", "perplexity", str(place.model), "--source", "short.txt"]) == 2
    assert "set --skip-short to" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["short.txt"]
    (tmp_path / "study.yaml").write_text("{title: A, models: {A: {path: /nothing}}, passkey: {}}")
    assert main(["study", "study.yaml"]) == 2
    assert "/nothing: there is no such folder" in capsys.readouterr().err
    assert {each.name for each in tmp_path.iterdir()} == {"short.txt", "study.yaml"}


def test_results_of_another_measurement_are_kept(place, capsys):
    """Two models whose folders have the same name, other settings; the same command again."""
    written = place.folder / "runs" / "eval" / "same-perplexity.json"

    def run(model, *words):
        folder = place.folder / model.removeprefix("llama-") / "same"
        shutil.copytree(place.folder / model, folder, dirs_exist_ok=True)
        assert main([str(word) for word in perplexity(*words, make=lambda p: folder)(place)]) == 0
        cells = json.loads(written.read_text())["results"]
        return "held another measurement" in capsys.readouterr().err, cells[0]["attention"]

    assert [run("llama-rope"), run("llama-rope")] == [(False, "rope")] * 2
    assert run("llama-slack") == (True, "slack")
    moved = written.with_name("same-perplexity-1.json")
    assert json.loads(moved.read_text())["results"][0]["attention"] == "rope"
    assert run("llama-slack", "--stride", "8") == (True, "slack")
    assert len(list(written.parent.glob("same-perplexity*.json"))) == 3


def test_a_study_reads_no_weights_before_everything_is_checked(place, monkeypatch, capsys):
    """The defect is in the last model and the last task; nothing else has been evaluated."""
    broken = Path(place.copy("llama-rope")) / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-50])
    models = {"a": str(place.model), "b": str(broken.parent)}
    monkeypatch.setattr("coca_lab.evaluation.task.load_model", None)
    for fields, message in (
        ({"models": models}, "model b: .*a weight file is damaged"),
        ({"device": "quantum"}, "`device` 'quantum' is no device of torch"),
        (
            {"perplexity": {"source": str(place.text), "windows": [16, 10**6]}},
            "largest of `windows`",
        ),
        ({"models": {"a": str(place.folder / "alibi")}, "methods": [{"method": "ntk"}]}, "rotary"),
    ):
        assert main(["study", place.study(**fields), "--output", str(place.new())]) == 2
        assert re.search(message, capsys.readouterr().err)


@pytest.mark.slow
def test_a_full_disk_is_one_line(place):
    """In processes that may write files of 300 bytes."""
    journal = place.new(".json")
    for words in (
        [*perplexity()(place), "--output", journal],
        ["report", place.run / "training.json", "--output", place.new(".html")],
        convert()(place),
        train()(place),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "coca_lab.cli", *map(str, words)],
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300)),
        )
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 2 and last.startswith("coca: error: "), done.stderr
        assert "disk space" in last and str(place.folder) in last
    again = [str(w) for w in [*perplexity()(place), "--output", journal]]
    assert main(again) == 0
