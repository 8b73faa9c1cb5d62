"""Training: the result, validation, precision, the folder, and what is refused beforehand."""

import io
import json
import re
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_attention.errors import UserError
from coca_lab.data import held_out, load_tokenizer, read_documents
from coca_lab.files import hold
from coca_lab.training import as_yaml, is_finished, load_recipe, read_summary, train
from coca_lab.training.folder import claim
from commands import run
from conftest import some_text
from runs import changed, data_of, recipe, weights, write_recipe


def test_the_result_is_an_ordinary_transformers_folder(trained, text_folder):
    assert is_finished(trained)
    model = AutoModelForCausalLM.from_pretrained(trained)
    assert model.config.max_position_embeddings == 16
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(trained))
    assert load_recipe(trained / "recipe.yaml") == recipe(text_folder)
    summary = read_summary(trained)
    assert summary["tokens"] == 12 * 4 * 16
    assert summary["parameters"] == sum(p.numel() for p in model.parameters())
    assert (summary["attention"], summary["dtype"]) == ("slack", "float32")
    assert summary["recipe"]["model"]["attention"] == "slack"
    assert [entry["step"] for entry in summary["curve"]] == [1, 2, 4, 6, 8, 10, 12]
    assert summary["curve"][-1]["loss"] < summary["curve"][0]["loss"]
    speed = pytest.approx(summary["tokens"] / summary["seconds"])
    assert summary["throughput"] == {"tokens_per_second": speed}
    left = {path.name for path in trained.iterdir()}
    assert not {name for name in left if name.endswith((".bin", ".pt", ".partial", ".lock"))}


def test_validation_reads_what_is_held_out_from_training(trained, text_folder):
    curve = read_summary(trained)["validation"]
    assert [entry["step"] for entry in curve] == [0, 5, 10, 12]
    assert curve[-1]["perplexity"] < 0.9 * curve[0]["perplexity"]
    assert "start" not in read_summary(trained)
    tokenizer = load_tokenizer(str(trained))
    data = data_of(recipe(text_folder), tokenizer)
    parts = data.stages[0].dataset.datasets[0], data.validation.dataset
    read, measured = (tokenizer.decode(blocks.tokens) for blocks in parts)
    found = {
        document.text: held_out(document, 0.3) for document in read_documents(str(text_folder))
    }
    for text, is_held_out in found.items():
        assert (text in measured, text in read) == (is_held_out, not is_held_out)
    assert set(found.values()) == {True, False}
    few = recipe(text_folder, data__max_tokens=100)
    assert data_of(few, tokenizer).fingerprint["text"]["tokens"] == 100


def test_validation_is_a_mean_over_the_tokens_of_a_whole_short_text(text_folder, tmp_path, caplog):
    """Not of batches, of which one has long documents and others a target in every second place."""
    (tmp_path / "text").mkdir()
    for index in range(82):
        text = some_text(8, index) if index % 20 < 2 else "a"
        (tmp_path / "text" / f"{index:02}.txt").write_text(text)
    made = recipe(
        text_folder,
        data__separate_documents="true",
        data__block_length=8,
        validation__source=tmp_path / "text",
        validation__batches=50,
    )
    run = train(made, tmp_path / "run")
    blocks = [*data_of(made, load_tokenizer(run)).validation]
    assert len(blocks) % 2, "not whole micro-batches"
    assert f"50 batches of 4: all {len(blocks)} blocks are measured" in caplog.text
    names = ("input_ids", "position_ids", "shift_labels")
    ids, positions, targets = (torch.stack([block[name] for block in blocks]) for name in names)
    counts = (targets != -100).sum(1)
    assert len(counts.unique()) > 2
    model = AutoModelForCausalLM.from_pretrained(run).eval()
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions).logits.double()
    nats = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    ).view(targets.shape)
    expected = (nats.sum() / counts.sum()).exp().item()
    of_blocks = (nats.sum(1) / counts).mean().exp().item()
    assert abs(of_blocks / expected - 1) > 1e-3
    found = read_summary(run)["validation"][-1]["perplexity"]
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_command_says_what_was_learned(text_folder, tmp_path, capsys):
    """The last loss is that of the last step, whatever log_every is."""
    path, output = tmp_path / "recipe.yaml", tmp_path / "run"
    changes = {"training__steps": 6, "training__log_every": 10}
    path.write_text(as_yaml(recipe(text_folder, **changes)))
    code, out, err = run(capsys, "train", path, "--output", output)
    assert code == 0
    summary = read_summary(output)
    first, last = summary["curve"]
    assert (first["step"], last["step"]) == (1, 6) and last["loss"] < first["loss"]
    loss, perplexity = f"{last['loss']:.3f}", f"{summary['validation'][-1]['perplexity']:.2f}"
    line = f"step 6 of 6, loss {loss}, validation perplexity {perplexity}"
    assert re.search(rf"^\d\d:\d\d:\d\d {line}$", err, re.M)
    assert f"last loss {loss}, validation perplexity {perplexity}\nNext: coca generate" in out
    assert "PROMPT, coca eval" in out  # its tokenizer has no chat template


def test_in_a_terminal_every_loss_appears_once(text_folder, tmp_path, monkeypatch, capfd):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    changes = {"training__steps": 4, "training__log_every": 1}
    folder = train(recipe(text_folder, **changes), tmp_path / "run")
    told, said = capfd.readouterr()
    assert "{'loss'" not in terminal.getvalue() + told + said
    last = f"loss={read_summary(folder)['curve'][-1]['loss']:.3f}"
    assert last in terminal.getvalue() and "4/4" in terminal.getvalue()


def test_bfloat16_trains_and_the_weights_stay_in_float32(trained, text_folder, tmp_path):
    rough = train(recipe(text_folder, training__precision="bfloat16"), tmp_path / "rough")
    assert {weight.dtype for weight in weights(rough).values()} == {torch.float32}
    assert changed(weights(rough), weights(trained))
    losses = [read_summary(path)["curve"][-1]["loss"] for path in (rough, trained)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    for folder in (rough, trained):  # each has its curves for TensorBoard
        assert len(list((folder / "logs").glob("events.out.tfevents.*"))) == 1


@pytest.mark.slow
def test_a_compiled_model_learns_the_same_with_recomputed_activations(
    trained, text_folder, tmp_path
):
    options = {"training__compile": True, "training__gradient_checkpointing": True}
    other = train(recipe(text_folder, **options), tmp_path / "run")
    ours, theirs = weights(other), weights(trained)
    for name, weight in ours.items():
        assert torch.allclose(weight, theirs[name], rtol=1e-4, atol=1e-4), name
    for name in ("curve", "validation"):
        curves = (read_summary(folder)[name] for folder in (other, trained))
        for entry, reference in zip(*curves, strict=True):
            assert entry == pytest.approx(reference, rel=1e-4)


def test_a_run_that_failed_before_its_first_checkpoint_may_be_corrected(tmp_path):
    """Another recipe, other text and another vocabulary; the result is that of a fresh folder."""
    source, output = tmp_path / "books.txt", tmp_path / "run"
    source.write_text(some_text(150))
    changes = {"data__held_out": 0, "validation__every": "null", "training__steps": 4}
    with pytest.raises(UserError, match="blocks, fewer than `global_batch_size` 100"):
        train(recipe(source, **changes, training__global_batch_size=100), output)
    assert not output.exists()
    source.write_text(some_text(400, seed=1))
    corrected = recipe(source, **changes, data__vocab_size=290)
    ours, theirs = (train(corrected, folder) for folder in (output, tmp_path / "fresh"))
    assert changed(weights(ours), weights(theirs)) == set()
    assert load_recipe(output / "recipe.yaml") == corrected


def test_a_start_that_fails_leaves_nothing(base, text_folder, tmp_path):
    """Also not what an earlier one, which a kill has ended, had left."""
    output, other = tmp_path / "runs" / "run", tmp_path / "other"
    path = write_recipe(base, text_folder, tmp_path / "r.yaml", [], attention="alibi")
    with pytest.raises(UserError, match="cannot be converted to alibi"):
        train(load_recipe(path), output)
    assert not output.parent.exists()
    with pytest.raises(UserError, match=r"nothing\.txt"):
        train(recipe(tmp_path / "nothing.txt"), output)
    assert not output.parent.exists()
    other.mkdir()
    (other / "recipe.yaml").write_text(as_yaml(recipe(text_folder)))
    (other / "text.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be converted to alibi"):
        train(load_recipe(path), other)
    assert list(other.iterdir()) == []


def test_whose_folder_it_is(text_folder, tmp_path):
    """Not other files', nor another run's; a start that was killed before it wrote its recipe
    leaves no trace."""
    (tmp_path / ".recipe.yaml.123.partial").write_text("mod")
    chosen = recipe(text_folder)
    with claim(chosen, {}, tmp_path):
        assert load_recipe(tmp_path / "recipe.yaml") == chosen
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="is not a run folder"):
        train(recipe(text_folder), tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.txt"]
    run, named = tmp_path / "run", "run is in use by another process: wait"
    with hold(run / ".lock"), pytest.raises(UserError, match=named):
        train(recipe(text_folder), run)
    assert list(run.iterdir()) == []


def test_a_model_with_several_chat_templates_is_saved_again(trained, text_folder, tmp_path):
    """They lie in a folder beside the weights, which a second save finds there."""
    tokenizer = AutoTokenizer.from_pretrained(trained)
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    changes = {"data__tokenizer": tmp_path / "tokenizer", "training__steps": 1}
    folder = train(recipe(text_folder, **changes), tmp_path / "run")
    (folder / "training.json").unlink()  # as after a kill
    train(recipe(text_folder, **changes), folder)
    assert is_finished(folder) and (folder / "additional_chat_templates" / "tools.jinja").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training__micro_batch_size": 3}, "multiple of `micro_batch_size`"),
        ({"model__teacher": "/nowhere"}, "there is no such folder"),
        ({"validation__source": "nowhere.txt"}, r"validation\.source: nowhere\.txt: no such file"),
    ],
)
def test_what_needs_no_text_is_checked_first(text_folder, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr("coca_lab.training.run.load_data", None)
    with pytest.raises(UserError, match=message):
        train(recipe(text_folder, **changes), tmp_path / "run")
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def test_what_trainer_refuses_is_one_line(trained, text_folder, tmp_path):
    asked = recipe(text_folder, data__tokenizer=trained, training__report_to="[bogus]")
    with pytest.raises(UserError, match="rejects these settings: bogus is not supported"):
        train(asked, tmp_path / "run")


def test_blocks_without_a_target_teach_nothing_and_cannot_be_validated_on(tmp_path):
    """Empty documents that are kept apart: nothing follows the end of a text."""
    path = tmp_path / "empty.jsonl"
    lines = [{"text": ""}] * 2000 + [{"text": "alpha beta gamma " * 40}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    options = {"data__separate_documents": "true", "data__held_out": 0.0}
    settings = recipe(path, **options, validation__every="null", training__log_every=1)
    losses = [entry["loss"] for entry in read_summary(train(settings, tmp_path / "run"))["curve"]]
    assert 0.0 in losses and max(losses) > 1
    settings = recipe(path, **options, validation__source=str(path))
    with pytest.raises(UserError, match="no token to predict: its documents are empty"):
        train(settings, tmp_path / "validated")
