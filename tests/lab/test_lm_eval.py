"""lm-evaluation-harness by its own command line."""

import json
import math
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

from coca_attention.errors import UserError
from coca_lab import lm_eval
from coca_lab.folders import extend_folder
from coca_lab.report import printed_tables, read_results
from coca_lab.report.result_files import parsed
from coca_lab.report.task_sections import by_task, harness_sections

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


def evaluate(tmp_path, question, arguments="pretrained=model"):
    """Run the harness in a folder with ``model``, on two questions."""
    data = tmp_path / "questions.jsonl"
    data.write_text(f'{{"question": "{question}", "choices": [" beta2", " gamma3"]}}\n' * 2)
    (tmp_path / "tasks").mkdir(exist_ok=True)
    (tmp_path / "tasks/tiny.yaml").write_text(TASK.format(data=data))
    words = f"run --model hf --model_args {arguments},dtype=float32 --device cpu "
    words += "--include_path tasks --tasks tiny_choice --output_path scores"
    done = subprocess.run(
        [sys.executable, "-m", "coca_lab.lm_eval", *words.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join(sys.path), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is an extra")
def test_the_harness_command_evaluates_and_the_report_reads_its_results(tmp_path, model_folder):
    shutil.copytree(model_folder, tmp_path / "model")
    done = evaluate(tmp_path, "alpha1")
    assert "tiny_choice" in done.stdout
    (file,) = tmp_path.glob("scores/*/results_*.json")
    accuracy = json.loads(file.read_text())["results"]["tiny_choice"]["acc,none"]
    ((_, header, rows),) = printed_tables(read_results([file.parent])[0]["results"])
    assert header == ["model", "tiny_choice: acc"] and rows == [["model", f"{accuracy:.4g}"]]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is an extra")
def test_the_harness_reads_what_a_model_was_extended_to(tmp_path, model_folder):
    shutil.copytree(model_folder, tmp_path / "model")
    extend_folder(model_folder, tmp_path / "extended", "yarn", to=256)
    question, cut = "alpha1 beta2 gamma3 " * 5, "Truncating"
    said = evaluate(tmp_path, question).stderr
    assert cut in said and "max_length=TOKENS" in said
    assert cut not in evaluate(tmp_path, question, "pretrained=extended").stderr
    said = evaluate(tmp_path, question, "pretrained=model,max_length=256").stderr
    assert cut not in said and "max_length=TOKENS" not in said


def written(path, metrics, limit=None):
    """A result file as the harness writes it, with NaN where a metric is undefined."""
    about = {"lm_eval_version": "0.4.13", "model_name": "models/tiny", "config": {"limit": limit}}
    path.write_text(json.dumps({**about, "results": {"gsm8k": {"alias": "gsm8k", **metrics}}}))
    return path


def test_every_filter_of_a_metric_has_a_column_and_what_is_undefined_a_word(tmp_path):
    metrics = {
        "exact_match,strict-match": 0.25,
        "exact_match_stderr,strict-match": "N/A",
        "exact_match,flexible-extract": 0.5,
        "acc,none": math.nan,
        "acc_stderr,none": math.nan,
        "word_perplexity,none": math.inf,
    }
    (content,) = read_results([written(tmp_path / "results.json", metrics)])
    ((_, header, rows),) = printed_tables(content["results"])
    assert dict(zip(header, *rows, strict=True)) == {
        "model": "tiny",
        "gsm8k: exact_match, strict-match": "0.25",
        "gsm8k: exact_match, flexible-extract": "0.5",
        "gsm8k: acc": "NaN",
        "gsm8k: word_perplexity": "Infinity",
    }
    ours = tmp_path / "ours.json"
    ours.write_text('{"results": [{"task": "perplexity", "perplexity": NaN}]}')
    with pytest.raises(UserError, match=r"ours.json: not a result file.*it has NaN in place of"):
        read_results([ours])


def test_a_part_of_the_questions_is_no_column_beside_all(tmp_path):
    files = [
        written(tmp_path / f"{number}.json", {"acc,none": number / 8}, limit)
        for number, limit in enumerate((None, 10, None, 0.1))
    ]
    cells = [cell for content in read_results(files) for cell in content["results"]]
    (group,) = by_task(parsed([{"results": cells[::2]}])).values()
    assert len(group) == 1
    (groups,) = by_task(parsed([{"results": cells}])).values()
    assert [[cell.metrics["acc,none"] for cell in each] for each in groups] == [
        [0.0, 0.25],
        [0.125],
        [0.375],
    ]
    notes = [harness_sections(each)[0].note for each in groups]
    assert notes == [
        "lm-evaluation-harness 0.4.13.",
        "lm-evaluation-harness 0.4.13. At most 10 questions per task.",
        "lm-evaluation-harness 0.4.13. 10% of the questions of each task.",
    ]


def test_a_missing_harness_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install -c constraints.txt '\.\[harness\]'"):
        lm_eval.main()
