"""lm-evaluation-harness by its own command line."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from coca_lab import lm_eval
from coca_lab.report import printed_tables, read_results
from conftest import tiny_model

TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: 0
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def folders(tmp_path, tokenizer):
    tiny_model("strict").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    data = tmp_path / "questions.jsonl"
    data.write_text('{"question": "alpha1", "choices": [" beta2", " gamma3"]}\n' * 2)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/tiny.yaml").write_text(TASK.format(data=data))
    return tmp_path


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is an extra")
def test_the_harness_command_evaluates_and_the_report_reads_its_results(folders):
    words = ["run", "--model", "hf", "--model_args", "pretrained=model,dtype=float32"]
    words += ["--device", "cpu"]
    words += ["--tasks", "tiny_choice", "--include_path", "tasks", "--output_path", "scores"]
    done = subprocess.run(
        [sys.executable, "-m", "coca_lab.lm_eval", *words],
        capture_output=True,
        text=True,
        cwd=folders,
        env={"PYTHONPATH": ":".join(sys.path), "HF_HUB_OFFLINE": "1", "HF_HOME": str(folders)},
    )
    assert done.returncode == 0, done.stderr
    assert "tiny_choice" in done.stdout
    (file,) = folders.glob("scores/*/results_*.json")
    accuracy = json.loads(file.read_text())["results"]["tiny_choice"]["acc,none"]
    ((header, rows),) = printed_tables(read_results([file.parent])[0]["results"])
    assert header == ["model", "tiny_choice: acc"] and rows == [["model", f"{accuracy:.4g}"]]


def test_a_missing_harness_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install 'PATH/TO/coca-attention\[harness\]'"):
        lm_eval.main()
