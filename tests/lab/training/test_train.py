"""Training: the result, resuming after a kill, divergence."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from coca_attention.errors import UserError
from coca_attention.ops import FORMS
from coca_lab.data import held_out, load_tokenizer, read_documents, tokenise
from coca_lab.training import (
    TrainingDiverged,
    as_yaml,
    is_finished,
    last_checkpoint,
    load_recipe,
    read_summary,
    train,
)
from coca_lab.training.data import load_data
from commands import run
from conftest import some_text

OPTIONS = {
    "--model.hidden_size": 16,
    "--model.num_layers": 1,
    "--model.num_heads": 2,
    "--data.vocab_size": 300,
    "--data.block_length": 16,
    "--data.held_out": 0.2,
    "--training.steps": 12,
    "--training.global_batch_size": 4,
    "--training.micro_batch_size": 2,
    "--training.precision": "float32",
    "--training.learning_rate": 1e-2,
    "--training.save_every": 4,
    "--training.log_every": 2,
    "--training.report_to": "[]",
}


def words(text_folder, **changes) -> list[str]:
    options = {**OPTIONS, "--data.source": text_folder}
    options.update({name.replace("__", "."): value for name, value in changes.items()})
    return [word for name, value in options.items() for word in (name, str(value))]


def recipe(text_folder, **changes):
    prefixed = {f"--{name}": value for name, value in changes.items()}
    return load_recipe(None, words(text_folder, **prefixed))


@pytest.mark.parametrize("attention", [*FORMS, "rope", "alibi"])
def test_the_result_is_an_ordinary_transformers_folder(text_folder, tmp_path, attention):
    folder = train(recipe(text_folder, model__attention=attention), tmp_path / "run")
    assert is_finished(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.max_position_embeddings == 16
    assert model.config.vocab_size == len(tokenizer)
    assert load_recipe(folder / "recipe.yaml") == recipe(text_folder, model__attention=attention)
    summary = read_summary(folder)
    assert summary["tokens"] == 12 * 4 * 16
    assert summary["recipe"]["model"]["attention"] == attention
    assert [entry["step"] for entry in summary["curve"]] == [1, 2, 4, 6, 8, 10, 12]
    assert summary["curve"][-1]["loss"] < summary["curve"][0]["loss"]
    left = {path.name for path in folder.iterdir()}
    assert not {name for name in left if name.endswith((".bin", ".pt", ".partial"))}


def test_validation_reads_what_is_held_out_from_training(text_folder, tmp_path):
    settings = {
        "data__held_out": "0.3",
        "validation__every": "5",
        "validation__batches": "1",
        "training__learning_rate": "0.01",
    }
    folder = train(recipe(text_folder, **settings), tmp_path / "run")
    curve = read_summary(folder)["validation"]
    assert [entry["step"] for entry in curve] == [0, 5, 10, 12]
    assert curve[-1]["perplexity"] < 0.9 * curve[0]["perplexity"]
    assert "start" not in read_summary(folder)
    asked = recipe(text_folder, **settings)
    tokenizer = load_tokenizer(str(folder))
    measured = load_data(asked, tokenizer).validation.dataset.tokens
    kept, whole = (tokenise(asked.data, tokenizer, share=share).tokens for share in (0.3, 0.0))
    documents = [tokenizer.decode(tokens).split("<|endoftext|>") for tokens in (measured, kept)]
    assert not set(documents[0]) & set(documents[1]) - {""}
    assert 0 < len(measured) == len(whole) - len(kept)


def test_the_command_says_what_validation_measures(text_folder, tmp_path, capsys):
    path, output = tmp_path / "recipe.yaml", tmp_path / "run"
    path.write_text(as_yaml(recipe(text_folder, validation__every=5, validation__batches=1)))
    code, out, err = run(capsys, "train", path, "--output", output)
    assert code == 0
    curve = read_summary(output)["validation"]
    loss, perplexity = read_summary(output)["curve"][-1]["loss"], curve[-1]["perplexity"]
    last = f"step 12 of 12, loss {loss:.3f}, validation perplexity {perplexity:.2f}"
    assert re.search(rf"^\d\d:\d\d:\d\d {last}$", err, re.M)
    assert out.rstrip().endswith(f", validation perplexity {curve[-1]['perplexity']:.2f}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"validation__every": "0"}, r"validation\.every: Input should be .* equal to 1"),
        ({"validation__batches": "0"}, r"validation\.batches: Input should be .* equal to 1"),
        ({"data__held_out": "0"}, r"needs validation\.source.*data\.held_out is 0"),
        ({"data__held_out": "1e-9"}, r"data\.held_out: no documents"),
        ({"validation__source": "nowhere.txt"}, r"validation\.source: nowhere\.txt: no such file"),
        ({"validation__batches": "5000"}, r"data\.held_out: .* fewer than 20000 .*fewer batches"),
    ],
)
def test_validation_that_cannot_be_measured_is_rejected(text_folder, tmp_path, settings, message):
    settings = {"validation__every": "5", "data__held_out": "0.3", **settings}
    with pytest.raises(UserError, match=message):
        train(recipe(text_folder, **settings), tmp_path / "run")


def test_other_validation_text_is_another_run(text_folder, tmp_path):
    text = tmp_path / "validation.txt"
    text.write_text(some_text(400, seed=50))
    asked = recipe(text_folder, validation__every="5", validation__source=str(text))

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = control.should_training_stop = True

    with pytest.raises(UserError, match="stopped at step 1"):
        train(asked, tmp_path / "run", callbacks=[Stop()])
    text.write_text(some_text(400, seed=51))
    with pytest.raises(UserError, match="the training text has changed"):
        train(asked, tmp_path / "run")


def test_a_finished_run_is_not_repeated_and_another_recipe_is_rejected(text_folder, tmp_path):
    folder = train(recipe(text_folder), tmp_path)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    train(recipe(text_folder), tmp_path)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(ValueError, match=r"another recipe .different: training\.seed"):
        train(recipe(text_folder, training__seed=5), tmp_path)


def test_curves_go_to_tensorboard_in_the_folder_of_each_run(text_folder, tmp_path):
    for name in ("one", "two"):
        train(recipe(text_folder, training__report_to='["tensorboard"]'), tmp_path / name)
    for name in ("one", "two"):
        assert len(list((tmp_path / name / "logs").glob("events.out.tfevents.*"))) == 1


def test_bfloat16_trains_and_the_weights_stay_in_float32(text_folder, tmp_path):
    exact = train(recipe(text_folder), tmp_path / "exact")
    rough = train(recipe(text_folder, training__precision="bfloat16"), tmp_path / "rough")
    ours, theirs = (load_file(path / "model.safetensors") for path in (rough, exact))
    assert {weight.dtype for weight in ours.values()} == {torch.float32}
    assert any(not torch.equal(weight, theirs[name]) for name, weight in ours.items())
    losses = [read_summary(path)["curve"][-1]["loss"] for path in (rough, exact)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_gradient_checkpointing_gives_the_same_weights(text_folder, tmp_path):
    plain = train(recipe(text_folder), tmp_path / "plain")
    saving = train(
        recipe(text_folder, training__gradient_checkpointing="true"), tmp_path / "saving"
    )
    ours, theirs = (load_file(path / "model.safetensors") for path in (saving, plain))
    for name, weight in ours.items():
        assert torch.allclose(weight, theirs[name], atol=1e-6), name


def test_a_run_that_failed_before_its_first_checkpoint_leaves_the_folder_to_its_correction(
    text_folder, tmp_path
):
    """Another recipe, other text and another vocabulary; the result is that of a fresh folder."""
    source, output = tmp_path / "books.txt", tmp_path / "run"
    source.write_text(some_text(150))
    with pytest.raises(UserError, match="blocks, fewer than global_batch_size 100"):
        train(recipe(source, data__held_out=0, training__global_batch_size=100), output)
    assert (output / "tokenizer").is_dir()
    source.write_text(some_text(400, seed=1))
    corrected = recipe(source, data__held_out=0, data__vocab_size=290)
    ours, theirs = (train(corrected, folder) for folder in (output, tmp_path / "fresh"))
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
    assert load_recipe(output / "recipe.yaml") == corrected
    with pytest.raises(UserError, match=r"another recipe \(different: training.seed\)"):
        train(
            recipe(source, **{"data__held_out": 0, "data__vocab_size": 290, "training__seed": 5}),
            output,
        )


def test_the_last_loss_is_that_of_the_last_step(text_folder, tmp_path, capsys):
    """Whatever log_every is; entries of the curve are means since the entry before."""
    path, output = tmp_path / "recipe.yaml", tmp_path / "run"
    path.write_text(as_yaml(recipe(text_folder, training__steps=6, training__log_every=10)))
    code, out, _ = run(capsys, "train", path, "--output", output)
    first, last = read_summary(output)["curve"]
    assert code == 0 and (first["step"], last["step"]) == (1, 6)
    assert last["loss"] < first["loss"] and f", last loss {last['loss']:.3f}" in out


def test_a_folder_with_other_files_is_rejected(text_folder, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="is not a run folder"):
        train(recipe(text_folder), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


KILLED = """
import os, signal, sys
from transformers import TrainerCallback
from coca_lab.training import load_recipe, train

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)

train(load_recipe(None, sys.argv[3:]), sys.argv[2], callbacks=[Kill()])
"""


@pytest.mark.slow
def test_a_mixture_killed_twice_ends_with_the_same_weights(text_folder, tmp_path):
    """Killed between checkpoints, and again after resuming; its cache is deleted as well."""
    code = tmp_path / "code.txt"
    code.write_text("def f(x):\n    return x\n" * 30)
    mixture = {
        "text": {"source": str(text_folder), "weight": 0.75},
        "code": {"source": str(code), "weight": 0.25},
    }
    changes = {
        "--data.source": "stdlib",
        "--data.mixture": json.dumps(mixture),
        "--data.separate_documents": "true",
        "--data.held_out": 0,
        "--data.cache": tmp_path / "cache",
    }
    options = words(text_folder, **changes)
    straight = train(load_recipe(None, options), tmp_path / "straight")
    shutil.rmtree(tmp_path / "cache")
    output = tmp_path / "killed"
    for step in (6, 9):
        arguments = [sys.executable, "-c", KILLED, str(step), str(output), *options]
        killed = subprocess.run(arguments, capture_output=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert last_checkpoint(output / "checkpoints").name == "checkpoint-8"
    train(load_recipe(None, options), output)
    ours, theirs = (load_file(path / "model.safetensors") for path in (output, straight))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name
    summaries = [read_summary(path) for path in (output, straight)]
    assert summaries[0]["curve"] == summaries[1]["curve"]
    assert summaries[0]["source_epochs"] == summaries[1]["source_epochs"]
    assert summaries[0]["source_epochs"].keys() == {"text", "code"}


@pytest.mark.slow
def test_two_processes_end_with_the_weights_of_one(text_folder, tmp_path):
    options = words(text_folder, **{"--data.separate_documents": "true"})
    alone = train(load_recipe(None, options), tmp_path / "alone")
    (tmp_path / "r.yaml").write_text(as_yaml(load_recipe(None, options)))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "coca_lab.cli", "train", tmp_path / "r.yaml"]
    output = tmp_path / "two"
    started = [sys.executable, *launch, *command, "--output", output]
    subprocess.run(started, check=True, timeout=300)
    ours, theirs = (load_file(path / "model.safetensors") for path in (output, alone))
    for name, weight in ours.items():
        assert torch.allclose(weight, theirs[name], atol=1e-6), name


def test_another_cache_folder_is_the_same_run(text_folder, tmp_path):
    for cache in (tmp_path / "a", tmp_path / "b"):
        assert is_finished(train(recipe(text_folder, data__cache=cache), tmp_path / "run"))
    with pytest.raises(UserError, match="another recipe"):
        train(recipe(text_folder, data__max_tokens=500), tmp_path / "run")


@pytest.mark.parametrize(
    ("step", "kill"),
    [
        (7, False),
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(7, True, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_resumes_and_ends_with_the_same_weights(text_folder, tmp_path, step, kill):
    """Stopped or killed before the first checkpoint, and between two."""
    straight = train(recipe(text_folder), tmp_path / "straight")
    output = tmp_path / "killed"

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step:
                raise KeyboardInterrupt

    if kill:
        arguments = [sys.executable, "-c", KILLED, str(step), str(output), *words(text_folder)]
        killed = subprocess.run(arguments, capture_output=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    else:
        with pytest.raises(KeyboardInterrupt):
            train(recipe(text_folder), output, callbacks=[Stop()])
    assert not is_finished(output)
    checkpoint = last_checkpoint(output / "checkpoints")
    assert checkpoint is None if step == 2 else checkpoint.name == "checkpoint-4"
    seen: list[int] = []

    class Record(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(state.global_step)

    train(recipe(text_folder), output, callbacks=[Record()])
    assert seen == list(range(1 if step == 2 else 5, 13))
    ours, theirs = (load_file(path / "model.safetensors") for path in (output, straight))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name
    curves = [read_summary(path)["curve"] for path in (output, straight)]
    assert curves[0] == curves[1]


def test_a_run_killed_after_its_last_step_is_not_trained_further(text_folder, tmp_path):
    """10 steps are no whole number of passes over the text."""
    straight = train(recipe(text_folder, training__steps=10), tmp_path / "straight")
    output = tmp_path / "late"
    train(recipe(text_folder, training__steps=10), output)
    for name in ("training.json", "model.safetensors", "config.json"):
        (output / name).unlink()
    seen: list[int] = []

    class Record(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(state.global_step)

    train(recipe(text_folder, training__steps=10), output, callbacks=[Record()])
    assert seen == []
    ours, theirs = (load_file(path / "model.safetensors") for path in (output, straight))
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
    assert read_summary(output)["curve"] == read_summary(straight)["curve"]


def test_changed_text_is_noticed_when_a_run_resumes(text_folder, tmp_path):
    source = tmp_path / "books"
    shutil.copytree(text_folder, source)
    output = train(recipe(source), tmp_path / "run")
    (output / "training.json").unlink()
    (source / "zz.txt").write_text(some_text(400, seed=99))
    with pytest.raises(ValueError, match="the training text has changed"):
        train(recipe(source, data__held_out=0.2), output)


def test_named_fields_of_an_unfinished_run_may_change(text_folder, tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 5

    def again(fields, **changes):
        changed = {"data__source": moved, "training__micro_batch_size": 4, **changes}
        return train(recipe(text_folder, **changed), run, may_change=fields)

    with pytest.raises(UserError, match="stopped at step 5"):
        train(recipe(text_folder), run, callbacks=[Stop()])
    begun = (run / "recipe.yaml").read_text()
    shutil.copytree(text_folder, moved)
    both = ("data.source", "training.micro_batch_size")
    for fields, changes, refused in (
        ((), {}, ", ".join(both)),
        (both[:1], {}, both[1]),
        (both, {"training__seed": 5}, "training.seed"),
    ):
        with pytest.raises(UserError, match=rf"another recipe \(different: {refused}\)"):
            again(fields, **changes)
        assert (run / "recipe.yaml").read_text() == begun
    (moved / "zz.txt").write_text(some_text(400, seed=99))
    with pytest.raises(UserError, match="the training text has changed"):
        again(both)
    (moved / "zz.txt").unlink()
    assert is_finished(again(both))
    assert load_recipe(run / "recipe.yaml").data.source == str(moved)
    assert read_summary(run)["recipe"]["training"]["micro_batch_size"] == 4
    with pytest.raises(UserError, match=r"another recipe \(different: data.source\)"):
        again(both, data__source=text_folder)


def test_held_out_documents_and_tokens_past_the_limit_are_never_trained_on(text_folder, tokenizer):
    documents = list(read_documents(str(text_folder)))
    chosen = recipe(text_folder, data__held_out=0.4)
    text = tokenizer.decode(load_data(chosen, tokenizer).blocks.dataset.tokens)
    for document in documents:
        assert (document.text in text) != held_out(document, 0.4)
    assert 0 < sum(held_out(document, 0.4) for document in documents) < len(documents)
    few = recipe(text_folder, data__max_tokens=100)
    assert load_data(few, tokenizer).fingerprint["text"]["tokens"] == 100


def test_a_start_killed_while_writing_its_recipe_does_not_lock_the_folder(text_folder, tmp_path):
    (tmp_path / ".recipe.yaml.123.partial").write_text("mod")
    assert is_finished(train(recipe(text_folder), tmp_path))


def test_settings_that_the_trainer_rejects_are_user_errors(text_folder, tmp_path):
    with pytest.raises(UserError, match="bogus"):
        train(recipe(text_folder, training__report_to='["bogus"]'), tmp_path)


def test_an_incomplete_checkpoint_is_skipped(tmp_path):
    for step, state in ((4, '{"global_step": 4}'), (8, '{"global_step": 8'), (12, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    found = last_checkpoint(tmp_path)
    assert found is not None and found.name == "checkpoint-4"
    assert last_checkpoint(tmp_path / "nowhere") is None


class Poison(TrainerCallback):
    """Makes one weight NaN once a step is done."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] = float("nan")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (6, "the loss is nan at step 7: training stopped, the last good checkpoint is .*-4"),
        (8, "not finite at step .*: training stopped, the last good checkpoint is .*-4"),
        (1, "the loss is nan at step 2: training stopped, no checkpoint was saved yet"),
    ],
)
def test_nan_stops_training_and_is_never_saved(text_folder, tmp_path, step, message):
    with pytest.raises(TrainingDiverged, match=message):
        train(recipe(text_folder), tmp_path, callbacks=[Poison(step)])
    assert not is_finished(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    saved = list(Path(tmp_path).rglob("model.safetensors"))
    assert len(saved) == (0 if step == 1 else 1)
    for path in saved:
        assert all(weight.isfinite().all() for weight in load_file(path).values())


def test_validation_that_is_nan_stops_training(text_folder, tmp_path):
    changes = {"validation__every": "5", "validation__batches": "1"}
    with pytest.raises(TrainingDiverged, match="the validation loss is nan at step"):
        train(recipe(text_folder, **changes), tmp_path, callbacks=[Poison(5)])
    assert not is_finished(tmp_path)


def test_text_shorter_than_a_block_is_rejected(tmp_path):
    (tmp_path / "tiny.txt").write_text("too little")
    for length, message in ((512, "fewer than one block"), (1, "fewer than global_batch_size")):
        with pytest.raises(ValueError, match=message):
            train(
                recipe(tmp_path / "tiny.txt", data__held_out=0, data__block_length=length),
                tmp_path / str(length),
            )
