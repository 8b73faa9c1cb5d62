"""A task from outside the package: one call adds it to the commands, studies and the report."""

import json
from dataclasses import dataclass, field
from typing import Literal

import pytest

from coca_attention.errors import UserError
from coca_lab.cli import EVALUATIONS, main
from coca_lab.engine import Engine
from coca_lab.evaluation import TASKS, Model, RotaryScaling, Task, register_task
from coca_lab.evaluation.task import at_once, finish
from coca_lab.fingerprints import model_fingerprint
from coca_lab.studies import load_study
from conftest import tiny_model


@dataclass
class LengthSettings:
    """Which words to encode."""

    words: list[str] = field(default_factory=lambda: ["alpha1"])
    """Words to encode."""
    ways: list[Literal["plain", "twice"]] | None = None
    """Ways to write them."""
    upper: bool = False
    """Whether to write them in capitals."""

    def __post_init__(self):
        if not self.words:
            raise UserError("give at least one word")


@at_once
def measure(model, settings, scaling):
    words = [word.upper() if settings.upper else word for word in settings.words]
    return [{"word": word, "ways": settings.ways} for word in words]


TOY = Task("lengths", "How many tokens is a word?", LengthSettings, measure)


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setenv("COCA_IMPORT", __name__)  # as a user names the module that registers it
    register_task(TOY)
    yield TOY
    del TASKS["lengths"]


def test_a_task_from_outside_runs_as_a_command(toy, model_folder, tmp_path, capsys):
    assert main(["eval", "--help"]) == 0
    assert TOY.summary in capsys.readouterr().out
    out = tmp_path / "r.json"
    words = ["eval", "lengths", str(model_folder), "--words", "alpha1,beta2", "--upper"]
    words += ["--ways", "plain,twice", "--scaling", "ntk", "--name", "mine", "--output", str(out)]
    assert main(words) == 0, capsys.readouterr().err
    facts = {"task": "lengths", "model": "mine", "attention": "slack", "training_length": 32}
    facts |= {"scaling": "ntk", "factor": 4.0, "ways": ["plain", "twice"]}
    cells = json.loads(out.read_text())["results"]
    assert all(cell.pop("seconds") >= 0 for cell in cells)
    assert cells == [{**facts, "word": word} for word in ("ALPHA1", "BETA2")]
    assert main(["eval", "lengths", str(model_folder), "--words", ""]) == 2
    assert "give at least one word" in capsys.readouterr().err


def test_what_is_kept_is_shown_under_the_name_of_the_model(tokenizer):
    model, count, engine = tiny_model("rope"), iter([1]), Engine()
    task = Task("toy", "", LengthSettings, at_once(lambda *_: [{"tokens": next(count)}]))

    def cells(name):
        named = Model(model, tokenizer, name, "same")
        return finish(task.measurements(named, LengthSettings(), RotaryScaling()), engine)

    assert [(c["model"], c["tokens"]) for c in cells("a") + cells("b")] == [("a", 1), ("b", 1)]


def test_a_model_in_memory_has_no_values_of_another(tokenizer, tmp_path):
    task, engine = Task("toy", "", LengthSettings, measure_weight), Engine()
    found = []
    for seed in (0, 1):
        model = Model(tiny_model("rope", seed=seed), tokenizer, "same name")
        found += finish(task.measurements(model, LengthSettings(), RotaryScaling()), engine)
    assert found[0]["weight"] != found[1]["weight"]


@at_once
def measure_weight(model, settings, scaling):
    return [{"weight": next(model.module.parameters()).flatten()[0].item()}]


def test_the_help_that_comes_at_once_has_every_task():
    assert {name: task.summary for name, task in TASKS.items()} == EVALUATIONS


def test_names_that_are_taken_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="named 'perplexity'"):
        register_task(Task("perplexity", "", LengthSettings, measure))
    monkeypatch.setitem(TASKS, "models", Task("models", "", LengthSettings, measure))
    with pytest.raises(ValueError, match="named models, as a field of studies"):
        load_study("quickstart")


def test_an_updated_repository_of_the_hub_is_another_model(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cache, found = tmp_path / "models--owner--name", []
    (cache / "refs").mkdir(parents=True)
    for commit in ("a" * 40, "b" * 40):  # as they are loaded
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "config.json").write_text("{}")
        (cache / "refs" / "main").write_text(commit)
        found.append(model_fingerprint("owner/name"))
    assert found == [f"owner/name {commit * 40}" for commit in "ab"]
    with pytest.raises(ValueError, match=r"no/where: .* connect"):
        model_fingerprint("no/where")
