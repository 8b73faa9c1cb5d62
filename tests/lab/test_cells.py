"""Cells: what tasks make is what is declared, and what was published still is."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from coca_lab.cells import CELLS, cell_type
from coca_lab.evaluation import TASKS
from coca_lab.evaluation.needles import NeedleSettings
from coca_lab.evaluation.perplexity import PerplexitySettings
from coca_lab.evaluation.prompts import PasskeySettings, RulerSettings
from coca_lab.evaluation.task import Model, Task, at_once, evaluate
from conftest import tiny_model

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def made(tokenizer, text_folder):
    """The cells of every task, of a tiny model."""
    source = str(text_folder)
    settings = {
        "perplexity": PerplexitySettings(
            source=source, windows=[32, 64], attend_last=16, positions=2, repeats=2, max_documents=2
        ),
        "needles": NeedleSettings(source=source, lengths=[400], count=1, max_documents=1),
        "passkey": PasskeySettings(lengths=[400], samples=1, depths=2, max_new_tokens=2),
        "ruler": RulerSettings(source=source, kinds=["niah_single_1"], lengths=[700], samples=1),
    }
    model = Model(tiny_model("rope"), tokenizer)
    return {name: evaluate(TASKS[name], model, each) for name, each in settings.items()}


def undeclared(record):
    """The names of fields that a record, or one in it, has besides those of its declaration."""
    found = set(record.model_extra or {})
    for name in type(record).model_fields:
        value = getattr(record, name)
        parts = value if isinstance(value, list) else [value]
        if isinstance(value, dict):
            parts = list(value.values())
        for part in parts:
            if hasattr(part, "model_extra"):
                found |= {f"{name}.{each}" for each in undeclared(part)}
    return found


def test_every_field_that_a_task_writes_is_declared(made):
    assert set(made) == set(CELLS) - {"harness", "recall"}  # the latter of studies.recall, if any
    for name, cells in made.items():
        for cell in cells:
            assert undeclared(cell_type(name).model_validate(cell)) == set(), name
            assert json.loads(json.dumps(cell, allow_nan=False)) == cell


@pytest.mark.parametrize(
    "wrong",
    [{"perplexity": -1.0}, {"tokens": -1}, {"documents": [{"id": "a"}]}],
)
def test_a_task_that_makes_a_wrong_cell_is_stopped(wrong, tokenizer):
    right = {"window": 8, "perplexity": 2.0}
    task = Task("perplexity", "", PerplexitySettings, measure=at_once(lambda *_: [right | wrong]))
    model = Model(tiny_model("rope"), tokenizer)
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        evaluate(task, model, PerplexitySettings())
    task = Task("perplexity", "", PerplexitySettings, measure=at_once(lambda *_: [right]))
    (cell,) = evaluate(task, model, PerplexitySettings())
    assert cell["perplexity"] == 2.0 and "size" not in cell  # as it was made, without defaults


def test_published_cells_are_what_is_declared():
    count = 0
    for path in RESULTS.glob("*/*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        for cell in content.get("results", []) if isinstance(content, dict) else []:
            kind = cell_type(cell["task"])
            assert kind.model_validate(cell).task == cell["task"]
            count += kind is not cell_type("other")
    assert count > 500
