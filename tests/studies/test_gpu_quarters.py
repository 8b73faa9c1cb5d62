"""The prepared runs on a GPU, at a hundredth of their size."""

import json
import lzma
import signal
import subprocess

import pytest

from conftest import VOCABULARY, some_text, tiny_model
from families import vanilla
from studies import gpu
from studies.gpu import main


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_far_reads_and_asks_with_every_command(tokenizer, tmp_path, capsys):
    model_folder = tmp_path / "model"
    tiny_model("llama-rope").save_pretrained(model_folder)
    tokenizer.save_pretrained(model_folder)
    books, output = tmp_path / "books.jsonl.xz", tmp_path / "out"
    with lzma.open(books, "wt") as file:
        text = "In the beginning there were words, and then more words. " * 2000
        file.write(json.dumps({"id": "one", "text": text}) + "\n")
    words = ["far", "--model", str(model_folder), "--books", str(books), "--output", str(output)]
    assert main([*words, "--dry-run"]) == 0
    names = ("base", "rerope")
    read = [line for name in names for line in lines_of(output / f"books-{name}.jsonl")]
    assert {(x["method"], x["length"]) for x in read} == {
        (method, length) for method in names for length in (1024, 2048)
    }
    assert all(0 < x["nats"] < 100 for x in read)
    asked = [line for path in output.glob("ruler-*.jsonl") for line in lines_of(path)]
    assert all(0 <= score <= 1 for x in asked for score in x["scores"])
    assert len(asked) == 9 * 4  # every process has the task of the dry run
    assert "exit code 0" in capsys.readouterr().out


@pytest.mark.parametrize("quarter", ["retrieval", "paper"])
def test_a_study_of_a_quarter_trains_and_measures_every_model(quarter, tmp_path, undrawn):
    books = tmp_path / "books.jsonl"
    text = "Words and words, and other words besides. " * 2000
    # Enough of them that some are held out.
    books.write_text("".join(json.dumps({"text": f"{n} {text}"}) + "\n" for n in range(40)))
    words = [quarter, "--books", str(books), "--output", str(tmp_path), "--dry-run"]
    assert main(words) == 0
    results = json.loads(next(tmp_path.glob("*/results.json")).read_text())
    assert results["training"] and not results["failures"]


def test_a_pretrained_model_is_converted_in_every_way(tokenizer, tmp_path, monkeypatch, undrawn):
    monkeypatch.chdir(tmp_path)
    model = vanilla(
        "Llama", num_hidden_layers=3, vocab_size=VOCABULARY, max_position_embeddings=2048
    )
    model.save_pretrained("smollm2")
    tokenizer.save_pretrained("smollm2")
    texts = (json.dumps({"text": some_text(9000, seed=n)}) + "\n" for n in range(40))
    (tmp_path / "books.jsonl").write_text("".join(texts))
    words = ["pretrained", "--books", "books.jsonl", "--output", "out", "--dry-run"]
    assert main([*words, "--minutes", "9"]) == 0
    results = json.loads((tmp_path / "out/pretrained/results.json").read_text())
    assert not results["failures"]
    models = {cell["model"] for cell in results["results"] if cell["task"] == "passkey"}
    converted = {"strict, teacher", "strict, three stages", "roles, converted", "roles"}
    assert models == {"base", "fine-tuned"} | converted


def test_commands_run_side_by_side_until_the_minutes_are_over(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE", 2.0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as where a shell runs it in the background
    stays = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    scripts = ["print('said')", "raise SystemExit(3)", "import time; time.sleep(600)", stays]
    codes = gpu.run([["-c", script, str(tmp_path)] for script in scripts], tmp_path, 5.0)
    assert codes == [0, 3, None, None]
    assert (tmp_path / "log-0.txt").read_text() == "said\n"
    assert "KeyboardInterrupt" in (tmp_path / "log-2.txt").read_text()
    assert subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).returncode == 1
