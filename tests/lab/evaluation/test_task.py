"""Tasks: what a value is kept under, and which names are free; test_extending.py adds one."""

from dataclasses import dataclass

import pytest

from coca_lab.engine import Engine
from coca_lab.evaluation import TASKS, MethodSettings, Model, Task, register_task
from coca_lab.evaluation.task import at_once, finish
from coca_lab.fingerprints import model_fingerprint
from coca_lab.settings.evaluations import TASK_OPTIONS
from coca_lab.studies import load_study
from conftest import tiny_model


@dataclass
class NoSettings:
    """Nothing to set."""


def test_what_is_kept_is_shown_under_the_name_of_the_model(tokenizer):
    model, count, engine = tiny_model("rope"), iter([1]), Engine()
    task = Task("toy", "", NoSettings, measure=at_once(lambda *_: [{"tokens": next(count)}]))

    def cells(name):
        named = Model(model, tokenizer, name, "same")
        return finish(task.measurements(named, NoSettings(), MethodSettings()), engine)

    assert [(c["model"], c["tokens"]) for c in cells("a") + cells("b")] == [("a", 1), ("b", 1)]


def test_a_model_in_memory_has_no_values_of_another(tokenizer, tmp_path):
    task, engine = Task("toy", "", NoSettings, measure=measure_weight), Engine()
    found = []
    for seed in (0, 1):
        model = Model(tiny_model("rope", seed=seed), tokenizer, "same name")
        found += finish(task.measurements(model, NoSettings(), MethodSettings()), engine)
    assert found[0]["weight"] != found[1]["weight"]


@at_once
def measure_weight(model, settings, scaling):
    return [{"weight": next(model.module.parameters()).flatten()[0].item()}]


def test_the_help_that_comes_at_once_has_every_task():
    assert TASK_OPTIONS.keys() == TASKS.keys()


def test_names_that_are_taken_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="named 'perplexity'"):
        register_task(Task("perplexity", "", NoSettings, measure=measure_weight))
    monkeypatch.setitem(TASKS, "models", Task("models", "", NoSettings, measure=measure_weight))
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
    with pytest.raises(ValueError, match=r"no/where: there is no such folder here .* offline"):
        model_fingerprint("no/where")
