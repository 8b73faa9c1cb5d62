"""The studies that need a GPU or days, at a hundredth of their size."""

import json

import pytest

from coca_attention.errors import UserError
from commands import run
from conftest import VOCABULARY, some_text
from families import vanilla
from studies.smollm2 import books

READ = (
    "--device cpu --dtype float32 --perplexity.max-tokens 513 --perplexity.windows 256,512 "
    "--perplexity.stride 128 --perplexity.attend-last 256 --perplexity.max-documents 1 "
    "--needles.lengths 512 --needles.count 2 --needles.max-documents 1 --ruler.lengths 1024 "
    "--ruler.kinds niah_single_1 --ruler.samples 1 --ruler.chat false"
)
TRAIN = (
    "--training.steps 2 --training.global-batch-size 2 --training.micro-batch-size 1 "
    "--validation.every 2 --validation.batches 1 --validation.passkeys 0 --passkey.samples 1 "
    "--passkey.max-new-tokens 2 --perplexity.max-documents 1"
)
TRAINED = {
    "retrieval": "--seeds 0 --text stdlib --passkey.lengths 256 --perplexity.windows 256 "
    "--perplexity.max-tokens 385",
    "paper-125m": "--model.num-layers 3 --model.hidden-size 192 --passkey.lengths 512 "
    "--perplexity.windows 512,1024 --perplexity.max-tokens 1025",
    # Stages have steps of their own: shorter blocks.
    "pretrained": "--data.block-length 128 --passkey.lengths 256 --perplexity.windows 128,256 "
    "--perplexity.max-tokens 257 --perplexity.stride 128",
}


@pytest.fixture(autouse=True)
def place(tokenizer, tmp_path, monkeypatch, undrawn):
    """A folder with a model in place of SmolLM2 and texts, of which some are held out."""
    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 8192}
    vanilla("Llama", num_hidden_layers=3, **sizes).save_pretrained("smollm2")
    tokenizer.save_pretrained("smollm2")
    texts = ["Short. " * 3000, *(f"{n} {some_text(9000, seed=n)}" for n in range(39))]
    lines = [json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)]
    (tmp_path / "all.jsonl").write_text("".join(lines))


def results(capsys, study, options):
    """What a study has found, in this process: imports would take most of the time."""
    code, _, said = run(capsys, "study", study, *options.split(), "--workers=0", "--output=out")
    assert code == 0, said
    with open("out/results.json", encoding="utf-8") as file:
        found = json.load(file)
    assert not found["failures"]
    return found


@pytest.mark.parametrize(
    ("study", "factor"),
    [("smollm2", 1.5), pytest.param("smollm2-16k", 2.0, marks=pytest.mark.slow)],
)
def test_smollm2_is_read_and_asked_with_every_method(tmp_path, capsys, study, factor):
    """After the command that makes its text."""
    text = tmp_path / "books.jsonl"
    words = ["all.jsonl", "smollm2", str(text), "--tokens=2000"]
    with pytest.raises(UserError, match="39 of 40 books are long enough"):
        books.main([*words, "--count=40"])
    assert not text.exists()
    books.main([*words, "--count=2"])
    first, second = (json.loads(line) for line in text.read_text().splitlines())
    assert (first["id"], second["id"]) == ("1", "2")
    whole = f"0 {some_text(9000, seed=0)}"
    assert first["text"] == whole[books.PREFACE : books.PREFACE + books.KEPT]
    found = results(capsys, study, f"{READ} --ruler.source books.jsonl")
    methods = {"none", "yarn", "dynamic", "limited", "leaky", "shifted", "self_extend"}
    for task, more in (("perplexity", {"attend-last"}), ("needles", set()), ("ruler", set())):
        cells = [cell for cell in found["results"] if cell["task"] == task]
        assert {cell["scaling"] for cell in cells} == methods | more
        read = {cell["scaling"]: cell["factor"] for cell in cells}
        assert read["self_extend"] == factor and read["none"] is None
        assert len({cell.get("text", cell.get("filler")) for cell in cells}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("study", TRAINED)
def test_every_model_is_trained_or_converted_and_measured(capsys, study):
    found = results(capsys, study, f"--text all.jsonl {TRAIN} {TRAINED[study]}")
    assert found["training"]
    if study == "pretrained":
        models = {cell["model"] for cell in found["results"] if cell["task"] == "passkey"}
        converted = {"strict, teacher", "strict, three stages", "roles, converted", "roles"}
        assert models == {"base", "fine-tuned"} | converted
