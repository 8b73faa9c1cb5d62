"""Damaged checkpoints, signals, and two processes on one folder."""

import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from test_train import recipe, words
from transformers import AutoTokenizer, TrainerCallback

from coca_attention.errors import UserError
from coca_lab.files import hold
from coca_lab.training import (
    as_yaml,
    interrupts,
    is_finished,
    last_checkpoint,
    load_recipe,
    train,
)


class Stop(TrainerCallback):
    """Interrupts a run after a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


class Record(TrainerCallback):
    """The steps that a run takes and their learning rates."""

    def __init__(self):
        self.rates = {}

    def on_step_end(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs):
        self.rates[state.global_step] = optimizer.param_groups[0]["lr"]


@pytest.fixture(scope="module")
def straight(text_folder, tmp_path_factory):
    return train(recipe(text_folder), tmp_path_factory.mktemp("straight"))


def garbage(path):
    path.write_bytes(b"\x00garbage" * 50)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def empty(path):
    path.write_bytes(b"")


def test_an_incomplete_checkpoint_is_passed_over(text_folder, tmp_path, straight, caplog):
    """The run goes on from the one before, says so in one line, and ends with the same weights."""
    with pytest.raises(KeyboardInterrupt):
        train(recipe(text_folder), tmp_path, callbacks=[Stop(9)])
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint-8" / "trainer_state.json").unlink()
    caplog.clear()
    seen = Record()
    train(recipe(text_folder), tmp_path, callbacks=[seen])
    said = [r.getMessage() for r in caplog.records if r.name == "coca_lab.training.checkpoints"]
    assert said == [f"{folder}: checkpoint-8 not complete; training goes on from checkpoint-4"]
    assert list(seen.rates) == list(range(5, 13))
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path, straight))
    assert all(torch.equal(weight, theirs[key]) for key, weight in ours.items())
    assert last_checkpoint(folder).name == "checkpoint-12"


def test_without_a_complete_checkpoint_training_starts_again(
    text_folder, tmp_path, straight, caplog
):
    with pytest.raises(KeyboardInterrupt):
        train(recipe(text_folder), tmp_path, callbacks=[Stop(9)])
    for step in (4, 8):
        garbage(tmp_path / "checkpoints" / f"checkpoint-{step}" / "trainer_state.json")
    train(recipe(text_folder), tmp_path)
    assert "training starts again at the first step" in caplog.text
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path, straight))
    assert all(torch.equal(weight, theirs[key]) for key, weight in ours.items())


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("optimizer.pt", garbage),
        ("optimizer.pt", truncate),
        ("scheduler.pt", truncate),
        ("rng_state.pth", truncate),
        ("rng_state.pth", garbage),
        ("model.safetensors", truncate),
        ("model.safetensors", empty),
        ("model.safetensors", os.unlink),
    ],
)
def test_a_damaged_checkpoint_is_named(text_folder, tmp_path, name, damage):
    """PyTorch would advise to run code in the file."""
    with pytest.raises(KeyboardInterrupt):
        train(recipe(text_folder), tmp_path, callbacks=[Stop(9)])
    damage(tmp_path / "checkpoints" / "checkpoint-8" / name)
    with pytest.raises(
        UserError, match=r"checkpoint-8 cannot be read.*remove the folder"
    ) as caught:
        train(recipe(text_folder), tmp_path)
    assert "weights_only" not in str(caught.value)


def test_files_are_on_the_disk_before_another_checkpoint_goes(text_folder, tmp_path, monkeypatch):
    synced, plain, removed = [], os.fsync, []

    def fsync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        plain(descriptor)

    def rmtree(path, **options):
        if os.path.isdir(path):
            removed.append(len(synced))
        remove(path, **options)

    remove = shutil.rmtree
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr("coca_lab.training.trainer.shutil.rmtree", rmtree)
    train(recipe(text_folder), tmp_path)
    newest = (tmp_path / "checkpoints" / "checkpoint-12").resolve()
    files = {str(path) for path in newest.iterdir()}
    assert files and removed
    assert {str(newest), str(newest.parent), *files} <= set(synced[: removed[-1]])
    assert str(tmp_path.resolve()) in synced


def test_resuming_prints_no_warning_about_tied_weights(text_folder, tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        train(recipe(text_folder), tmp_path, callbacks=[Stop(9)])
    capsys.readouterr()
    train(recipe(text_folder), tmp_path)
    captured = capsys.readouterr()
    assert "missing keys" not in captured.out + captured.err


def test_a_model_with_several_chat_templates_is_saved_again(text_folder, tmp_path, straight):
    """They lie in a folder beside the weights, which a second save finds there."""
    tokenizer = AutoTokenizer.from_pretrained(straight)
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    chosen = recipe(text_folder, data__tokenizer=str(tmp_path / "tokenizer"))
    folder = train(chosen, tmp_path / "run")
    (folder / "training.json").unlink()  # as after a kill
    train(chosen, folder)
    assert is_finished(folder) and (folder / "additional_chat_templates" / "tools.jinja").is_file()


def test_two_processes_on_one_folder(text_folder, tmp_path):
    """The second does nothing; the lock ends with the process."""
    code = (
        "import sys, time; from pathlib import Path; from coca_lab.files import hold\n"
        "with hold(Path(sys.argv[1])):\n print('held', flush=True)\n time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run" / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="run is in use by another process: wait"):
            train(recipe(text_folder), tmp_path / "run")
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
        other.kill()
    folder = train(recipe(text_folder), tmp_path / "run")
    assert not (folder / ".lock").exists()


def test_a_lock_that_another_process_removes_is_taken_anew(tmp_path):
    with hold(tmp_path / ".lock"):
        pass
    with (
        hold(tmp_path / ".lock"),
        pytest.raises(UserError, match="in use"),
        hold(tmp_path / ".lock"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_run_says_what_it_does(text_folder, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "coca_lab"):
        with pytest.raises(KeyboardInterrupt):
            train(recipe(text_folder), tmp_path, callbacks=[Stop(9)])
        train(recipe(text_folder), tmp_path)
    said = [r.getMessage() for r in caplog.records if r.name.startswith("coca")]
    assert said[0] == f"{tmp_path}: reading the text"
    assert " tokens; " in said[1]
    assert " parameters on " in said[2] and said[2].endswith("from the first step")
    assert any(line.endswith("resuming from step 8") for line in said)


@pytest.mark.parametrize(
    ("option", "value"),
    [("seed", -1), ("beta1", 1.5), ("max_grad_norm", ".nan"), ("learning_rate", ".inf")],
)
def test_rates_and_seeds_out_of_range(text_folder, option, value):
    with pytest.raises(UserError, match=f"training.{option}: Input should be "):
        load_recipe(None, words(text_folder, **{f"--training.{option}": value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training__micro_batch_size": 3}, "multiple of micro_batch_size"),
        ({"model__teacher": "/nowhere"}, "there is no such folder"),
    ],
)
def test_what_needs_no_text_is_checked_first(text_folder, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr("coca_lab.training.run.load_data", None)
    with pytest.raises(UserError, match=message):
        train(recipe(text_folder, **changes), tmp_path / "run")
    assert not (tmp_path / "run" / "recipe.yaml").exists()


class Send(TrainerCallback):
    """Sends signals to this process in the middle of a step."""

    def __init__(self, step: int, *numbers: int):
        self.step, self.numbers = step, numbers

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step - 1:
            for number in self.numbers:
                signal.raise_signal(number)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_saves_the_step_in_which_it_came(
    text_folder, tmp_path, straight, name, monkeypatch
):
    """Twice at once, as torchrun sends it; the resumed run ends with the same weights."""
    monkeypatch.setattr(interrupts, "ONE_SIGNAL", math.inf)
    number = getattr(signal, name)
    before = signal.getsignal(number)
    if name == "SIGTERM":  # must not end the tests if nothing handles it
        signal.signal(number, signal.SIG_IGN)
    try:
        with pytest.raises(
            KeyboardInterrupt, match=r"ended after step 6 of 12, which is saved"
        ) as e:
            train(recipe(text_folder), tmp_path, callbacks=[Send(6, number, number)])
    finally:
        signal.signal(number, before)
    assert e.value.signal == number
    assert last_checkpoint(tmp_path / "checkpoints").name == "checkpoint-6"
    seen = Record()
    train(recipe(text_folder), tmp_path, callbacks=[seen])
    assert list(seen.rates) == list(range(7, 13))
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path, straight))
    assert all(torch.equal(weight, theirs[key]) for key, weight in ours.items())


def test_a_second_signal_ends_a_step_at_once(text_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(interrupts, "ONE_SIGNAL", 0.0)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="within a step"):
        train(recipe(text_folder), tmp_path, callbacks=[Send(6, signal.SIGINT, signal.SIGINT)])
    assert last_checkpoint(tmp_path / "checkpoints").name == "checkpoint-4"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_the_command_names_the_step_that_a_signal_saved(text_folder, tmp_path, name, code):
    path = tmp_path / "recipe.yaml"
    changes = {"training__steps": 10**6, "training__save_every": 10**6}
    path.write_text(as_yaml(recipe(text_folder, **changes)))
    command = [
        sys.executable,
        "-m",
        "coca_lab.cli",
        "train",
        path,
        "--output",
        tmp_path / "run",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = iter(process.stderr)
        assert any(re.match(r"\S+ step \d+ of 1,000,000, loss .* left, until ", x) for x in said)
        process.send_signal(getattr(signal, name))
        *_, last = said
    assert process.returncode == code
    step = re.search(r"interrupted: .*ended after step (\S+) of 1,000,000, which is saved", last)[1]
    saved = last_checkpoint(tmp_path / "run" / "checkpoints")
    assert saved is not None and saved.name == f"checkpoint-{step.replace(',', '')}"
