"""The prepared runs on a GPU, at a hundredth of their size."""

import json
import signal
import subprocess

import pytest

from coca_attention.errors import UserError
from conftest import VOCABULARY, some_text
from families import vanilla
from studies import gpu
from studies.gpu import main
from studies.smollm2 import books


def test_smollm2_is_read_and_asked_with_every_method(tokenizer, tmp_path, undrawn, capsys):
    """Both studies, after the command that makes their text."""
    folder, text = tmp_path / "smollm2", tmp_path / "books.jsonl"
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 8192}
    vanilla("Llama", num_hidden_layers=1, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    long = [f"{n} {some_text(9000, seed=n)}" for n in range(3)]
    lines = [{"id": n, "text": text} for n, text in enumerate(["Short. " * 3000, *long])]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [str(tmp_path / "all.jsonl"), str(folder), str(text), "--tokens=2000"]
    with pytest.raises(UserError, match="3 of 8 books are long enough"):
        books.main(words)
    assert not text.exists()
    books.main([*words, "--count=2"])
    chosen = [json.loads(line) for line in text.read_text().splitlines()]
    assert [book["id"] for book in chosen] == ["1", "2"]
    assert chosen[0]["text"] == long[0][books.PREFACE : books.PREFACE + 8 * 2000]

    words = ["far", "--model", str(folder), "--books", str(text), "--output", str(tmp_path)]
    assert main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("exit code 0") == 2
    for study, factor in (("smollm2", 1.5), ("smollm2-16k", 2.0)):
        results = json.loads((tmp_path / study / "results.json").read_text())
        assert not results["failures"]
        methods = {"none", "yarn", "dynamic", "limited", "leaky", "shifted", "self_extend"}
        for task, more in (("perplexity", {"attend-last"}), ("needles", set()), ("ruler", set())):
            cells = [cell for cell in results["results"] if cell["task"] == task]
            assert {cell["scaling"] for cell in cells} == methods | more
            read = {cell["scaling"]: cell["factor"] for cell in cells}
            assert read["self_extend"] == factor and read["none"] is None
            assert len({cell.get("text", cell.get("filler")) for cell in cells}) == 1


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
