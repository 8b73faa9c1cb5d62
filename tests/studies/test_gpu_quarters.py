"""The prepared runs on a GPU, at a hundredth of their size."""

import json
import lzma
import subprocess

import pytest

from conftest import VOCABULARY, some_text, tiny_model
from families import vanilla
from studies.gpu import main


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_far_reads_and_asks_with_every_command(tokenizer, tmp_path, capsys):
    model_folder = tmp_path / "model"
    tiny_model("llama-rope").save_pretrained(model_folder)
    tokenizer.save_pretrained(model_folder)
    books, output = tmp_path / "books.jsonl.xz", tmp_path / "out"
    with lzma.open(books, "wt") as file:
        text = "In the beginning there were words, and then more words. " * 2000
        file.write(json.dumps({"id": "one", "text": text}) + "\n")
    words = ["far", "--model", str(model_folder), "--books", str(books), "--output", str(output)]
    assert main([*words, "--dry-run", "--minutes", "4"]) == 0, (output / "log-0.txt").read_text()
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


@pytest.mark.slow
@pytest.mark.parametrize("quarter", ["retrieval", "paper"])
def test_a_quarter_ends_in_time_with_what_is_finished(quarter, tmp_path):
    books = tmp_path / "books.jsonl"
    text = "Words and words, and other words besides. " * 2000
    # Enough of them that some are held out.
    books.write_text("".join(json.dumps({"text": f"{n} {text}"}) + "\n" for n in range(40)))
    words = [quarter, "--books", str(books), "--output", str(tmp_path), "--dry-run"]
    assert main([*words, "--minutes", "2.5"]) == 0, (tmp_path / "log-0.txt").read_text()[-2000:]
    results = json.loads(next(tmp_path.glob("*/results.json")).read_text())
    assert results["training"] and not results["failures"]
    assert subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).returncode == 1


@pytest.mark.slow
def test_a_pretrained_model_is_converted_in_every_way(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = vanilla(
        "Llama", num_hidden_layers=3, vocab_size=VOCABULARY, max_position_embeddings=2048
    )
    model.save_pretrained("smollm2")
    tokenizer.save_pretrained("smollm2")
    texts = (json.dumps({"text": some_text(9000, seed=n)}) + "\n" for n in range(40))
    (tmp_path / "books.jsonl").write_text("".join(texts))
    words = ["pretrained", "--books", "books.jsonl", "--output", "out", "--dry-run"]
    assert main([*words, "--minutes", "9"]) == 0, (tmp_path / "out/log-0.txt").read_text()[-2000:]
    results = json.loads((tmp_path / "out/pretrained/results.json").read_text())
    assert not results["failures"]
    models = {cell["model"] for cell in results["results"] if cell["task"] == "passkey"}
    converted = {"strict, teacher", "strict, three stages", "roles, converted", "roles"}
    assert models == {"base", "fine-tuned"} | converted
