"""The lm-evaluation-harness on tasks built from local files, offline."""

import json
from importlib.util import find_spec

import pytest
import torch

from coca_lab.cli import main
from coca_lab.evaluation import Session, Subject, harness
from coca_lab.evaluation.harness import HarnessSettings, evaluate_harness
from conftest import tiny_model

needs_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is an extra")
TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


@pytest.fixture
def task(tmp_path, tokenizer):
    """Questions whose first answer is what the tiny slack model finds likelier, by our own sums."""
    model = tiny_model("slack")
    questions = ["alpha1 beta2", "gamma3 delta4", "theta5 eta6 zeta0"]
    choices = [" alpha1", " theta6"]
    lines = []
    for question in questions:
        nats = []
        for choice in choices:
            ids = torch.tensor([tokenizer(question + choice)["input_ids"]])
            start = len(tokenizer(question)["input_ids"])
            with torch.no_grad():
                logs = model(ids).logits.log_softmax(-1)
            targets = ids[0, start:]
            nats.append(logs[0, start - 1 : -1].gather(-1, targets.unsqueeze(-1)).sum().item())
        best = nats.index(max(nats))
        lines.append({"question": question, "choices": choices, "answer": best})
    lines[2]["answer"] = 1 - lines[2]["answer"]  # two of three right
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(json.dumps(line) for line in lines))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "tiny.yaml").write_text(TASK.format(path=data))
    return folder


@needs_harness
@pytest.mark.filterwarnings("ignore")
def test_a_coca_model_is_evaluated_as_itself(task, tmp_path, tokenizer, capsys):
    model = tiny_model("slack")
    settings = HarnessSettings(tasks=["tiny_choice"], include_path=str(task))
    session = Session()
    (cell,) = evaluate_harness(Subject(model, tokenizer), settings, session)
    assert len(session.engine.store) == 1
    assert evaluate_harness(Subject(model, None), settings, session) == [cell]
    assert cell["metrics"]["acc,none"] == pytest.approx(2 / 3)
    assert cell["questions"] == 3 and cell["name"] == "tiny_choice"

    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    out = tmp_path / "harness.json"
    words = ["eval", "harness", str(tmp_path / "model"), "--tasks", "tiny_choice"]
    words += ["--include-path", str(task), "--limit", "2", "--output", str(out)]
    assert main(words) == 0, capsys.readouterr().err
    saved = json.loads(out.read_text())["results"][0]
    assert saved["questions"] == 2 and saved["metrics"]["acc,none"] == 1.0
    assert main(["report", str(out), "--output", str(tmp_path / "r.html")]) == 0
    assert "tiny_choice: acc" in (tmp_path / "r.html").read_text()


@needs_harness
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": []}, "name at least one task"),
        # Seconds each: the harness reads all of its task files.
        pytest.param(
            {"tasks": ["no_such_task"]}, "has no task no_such_task", marks=pytest.mark.slow
        ),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"include_path": "/nowhere"}, "no such folder of task files"),
        # Offline, its questions are not to be had.
        pytest.param({"tasks": ["hellaswag"]}, "could not run hellaswag", marks=pytest.mark.slow),
    ],
)
def test_settings_that_cannot_be_run_are_refused(changes, message, tokenizer):
    settings = HarnessSettings(**{"tasks": ["tiny_choice"], **changes})
    with pytest.raises(ValueError, match=message):
        evaluate_harness(Subject(tiny_model("slack"), tokenizer), settings, Session())


def test_a_missing_harness_names_the_extra(monkeypatch):
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"coca-attention\[harness\]"):
        harness.check_settings(HarnessSettings(tasks=["x"]))
