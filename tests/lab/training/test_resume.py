"""Interrupted runs end with the same weights to the last bit; what cannot be resumed is named."""

import errno
import json
import logging
import math
import os
import re
import resource
import shutil
import signal
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, modeling_utils
from transformers.conversion_mapping import get_checkpoint_conversion_mapping as renamings

from coca_attention.errors import UserError
from coca_attention.models.families import FAMILIES
from coca_lab.training import (
    TrainingDiverged,
    is_finished,
    last_checkpoint,
    load_recipe,
    read_summary,
    train,
    trainer,
)
from coca_lab.training.folder import UNFINISHED
from commands import run
from conftest import some_text
from covering import mostly_slow
from runs import TEACHER, AtStep, Record, assert_the_same, recipe, unfinished, write_recipe


def garbage(path):
    path.write_bytes(b"\x00garbage" * 50)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def mark_unfinished(path):
    """As after a kill before the checkpoint was on the disk."""
    for name in (UNFINISHED, "half-written"):
        (path.parent / name).touch()


@pytest.fixture
def output(trained, tmp_path):
    """A copy of the run `trained` as after a kill behind its checkpoint of step 8."""
    return unfinished(trained, tmp_path / "run")


STATE = "trainer_state.json"


@pytest.mark.parametrize(
    ("last", "damaged", "first", "warning"),
    [
        (8, {}, 9, ""),
        (12, {}, 13, ""),  # after the last step, of which none is repeated
        (
            12,
            {12: mark_unfinished},
            9,
            "checkpoint-12 not complete; training resumes from checkpoint-8",
        ),
        (12, {12: truncate, 8: garbage}, 1, "checkpoint-8 not complete; training starts again at"),
    ],
)
def test_a_run_resumes_from_its_last_complete_checkpoint(
    trained, text_folder, tmp_path, caplog, monkeypatch, last, damaged, first, warning
):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    output = unfinished(trained, tmp_path / "run", last)
    for step, damage in damaged.items():
        damage(output / "checkpoints" / f"checkpoint-{step}" / STATE)
    seen = Record()
    with caplog.at_level(logging.INFO, "coca_lab"):
        train(recipe(text_folder), output, callbacks=[seen])
    assert [step for _, step in seen.steps] == list(range(first, 13))
    assert_the_same(output, trained)
    assert last_checkpoint(output / "checkpoints").name == "checkpoint-12"
    assert not list(output.rglob("half-written"))
    said = [r.getMessage() for r in caplog.records if r.name.startswith("coca")]
    assert said[0] == f"{output}: reading the text" and " tokens; " in said[1]
    start = f"resuming from step {first - 1}" if first > 1 else "from the first step"
    assert any(" parameters on " in line and line.endswith(start) for line in said)
    warnings = [line for line in said if "not complete" in line]
    assert len(warnings) == bool(warning) and all(warning in line for line in warnings)
    assert "missing keys" not in caplog.text  # of tied weights, by Transformers
    assert last_checkpoint(output / "nowhere") is None


def test_a_run_with_roles_resumes_without_warnings(text_folder, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    wanted = recipe(text_folder, model__attention="rope", model__layers="g")
    resumed = unfinished(train(wanted, tmp_path / "whole"), tmp_path / "resumed")
    with caplog.at_level(logging.INFO, "coca_lab"):
        train(wanted, resumed)
    assert "resuming from step" in caplog.text and "rope_parameters" not in caplog.text


EXPERTS = (
    "{num_experts_per_tok: 2, moe_intermediate_size: 16, shared_expert_intermediate_size: 16, "
    "%s: 4}"
)
MODELS = [
    (family.vanilla.config_class.model_type, *kind)
    for family in FAMILIES
    for kind in (
        ("own", family.vanilla.config_class.model_type, family.vanilla.__name__),
        ("strict", family.config.model_type, family.causal_lm.__name__),
    )
]
RENAMED = [(body, kind) for body, kind, *names in MODELS if any(map(renamings, names))]


@pytest.mark.parametrize(("body", "attention"), mostly_slow(RENAMED, [("mixtral", "own")]))
def test_weights_whose_names_on_disk_are_others_are_resumed(text_folder, tmp_path, body, attention):
    """Untied heads of GPT-NeoX and experts: Trainer reads a checkpoint by the class's names."""
    local = body in ("mixtral", "granitemoe")
    options = EXPERTS % ("num_local_experts" if local else "num_experts")
    changes = {"model__options": options} if body != "gpt_neox" else {}
    words = {"model__body": body, "model__attention": attention, "model__tie_embeddings": False}
    wanted = recipe(text_folder, **words, **changes)
    whole = train(wanted, tmp_path / "whole")
    resumed = unfinished(whole, tmp_path / "resumed")
    train(wanted, resumed)
    assert_the_same(resumed, whole)
    model, info = AutoModelForCausalLM.from_pretrained(whole, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    names = set(load_file(whole / "model.safetensors"))
    assert names != set(model.state_dict())  # those of the Hub


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("optimizer.pt", garbage),
        pytest.param("optimizer.pt", truncate, marks=pytest.mark.slow),
        pytest.param("scheduler.pt", truncate, marks=pytest.mark.slow),
        ("rng_state.pth", garbage),
        pytest.param("model.safetensors", truncate, marks=pytest.mark.slow),
        ("model.safetensors", os.unlink),
    ],
)
def test_a_damaged_checkpoint_is_named(output, text_folder, name, damage):
    """PyTorch would advise to run code in the file."""
    damage(output / "checkpoints" / "checkpoint-8" / name)
    named = r"checkpoint-8 cannot be read.*remove the folder"
    with pytest.raises(UserError, match=named) as caught:
        train(recipe(text_folder), output)
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_checkpoint_without_a_file_is_not_resumed(trained, text_folder, tmp_path, name):
    """It would go on with another rate, other moments or other random numbers."""
    output = unfinished(trained, tmp_path / "run")
    newest = output / "checkpoints" / "checkpoint-8"
    (newest / name).rename(tmp_path / name)
    with pytest.raises(UserError, match=rf"checkpoint-8 has no {name}, .*remove the folder"):
        train(recipe(text_folder), output)
    assert not is_finished(output)
    shutil.copyfile(tmp_path / name, newest / name)
    assert_the_same(train(recipe(text_folder), output), trained)
    again = unfinished(trained, tmp_path / "again")
    shutil.rmtree(again / "checkpoints" / "checkpoint-8")
    assert_the_same(train(recipe(text_folder), again), trained)


def test_a_checkpoint_of_other_processes_is_resumed_with_a_warning(output, text_folder, caplog):
    newest = output / "checkpoints" / "checkpoint-8"
    assert json.loads((newest / STATE).read_text())["stateful_callbacks"]["processes"] == 1
    (newest / "rng_state.pth").rename(newest / "rng_state_0.pth")
    with pytest.raises(UserError, match=r"has no rng_state\.pth"):
        train(recipe(text_folder), output)
    text = (newest / STATE).read_text()
    (newest / STATE).write_text(text.replace('"processes": 1', '"processes": 2'))
    train(recipe(text_folder), output)
    assert "was written by 2 processes and is read by 1" in caplog.text


def test_files_are_on_the_disk_before_another_checkpoint_goes(output, text_folder, monkeypatch):
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
    monkeypatch.setattr("shutil.rmtree", rmtree)
    name = "training.keep_checkpoints"
    train(recipe(text_folder, **{name: 1}), output, may_change=[name])
    newest = (output / "checkpoints" / "checkpoint-12").resolve()
    files = {str(path) for path in newest.iterdir()}
    assert files and removed
    assert {str(newest), str(newest.parent), *files} <= set(synced[: removed[-1]])
    assert str(output.resolve()) in synced
    assert [path.name for path in newest.parent.iterdir()] == [newest.name]


# Text, models and settings of a run that resumes


@pytest.mark.parametrize("field", mostly_slow(["start", "teacher"], ["teacher"]))
def test_a_model_that_was_replaced_is_not_mixed_with_what_was_read_before(
    base, text_folder, tmp_path, field
):
    def killed(model):
        raise KeyboardInterrupt

    read = tmp_path / "read"
    shutil.copytree(base, read)
    models = {"start": base, field: read}
    path = write_recipe(base, text_folder, tmp_path / "r.yaml", TEACHER)
    settings = load_recipe(path, [f"--model.{name}={models[name]}" for name in models])
    output = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(settings, output, callbacks=[AtStep(3, killed)])
    weights = load_file(read / "model.safetensors")
    changed = {name: weight * 1.5 for name, weight in weights.items()}
    save_file(changed, read / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="has changed since this run was started"):
        train(settings, output)
    shutil.copyfile(base / "model.safetensors", read / "model.safetensors")
    assert is_finished(train(settings, output))


def test_named_fields_of_a_run_may_change_but_not_its_text(output, text_folder, tmp_path):
    def again(fields, **changes):
        changed = {"data__source": moved, "training__micro_batch_size": 4, **changes}
        return train(recipe(text_folder, **changed), output, may_change=fields)

    begun = (output / "recipe.yaml").read_text()
    moved = shutil.copytree(text_folder, tmp_path / "moved")
    both = ("data.source", "training.micro_batch_size")
    for fields, changes, refused in (
        ((), {}, ", ".join(both)),
        (both[:1], {}, both[1]),
        (both, {"training__seed": 5}, "training.seed"),
    ):
        with pytest.raises(UserError, match=rf"another recipe \(different: {refused}\)"):
            again(fields, **changes)
        assert (output / "recipe.yaml").read_text() == begun
    (moved / "zz.txt").write_text(some_text(400, seed=99))
    with pytest.raises(UserError, match="the training text has changed"):
        again(both)
    (moved / "zz.txt").unlink()
    assert is_finished(again(both))
    assert load_recipe(output / "recipe.yaml").data.source == str(moved)
    assert read_summary(output)["recipe"]["training"]["micro_batch_size"] == 4
    assert again(both, data__source=text_folder) == output
    with pytest.raises(UserError, match=r"another recipe \(different: data.source\)"):
        again(both[1:], data__source=text_folder)


# Signals


def twice(number):
    """Sends a signal twice at once, as torchrun does."""

    def send(_):
        signal.raise_signal(number)
        signal.raise_signal(number)

    return send


@pytest.mark.parametrize(
    ("name", "code"), mostly_slow([("SIGINT", 130), ("SIGTERM", 143)], [("SIGTERM", 143)])
)
def test_a_signal_saves_the_step_in_which_it_came(
    trained, output, text_folder, monkeypatch, capsys, name, code
):
    """The command names it, and the resumed run ends with the same weights."""
    number = getattr(signal, name)
    stop = AtStep(10, twice(number), begin=True)
    monkeypatch.setattr(trainer, "ONE_SIGNAL", math.inf)
    monkeypatch.setattr("coca_lab.training.train", partial(train, callbacks=[stop]))
    before = signal.getsignal(number)
    if name == "SIGTERM":  # must not end the tests if nothing handles it
        signal.signal(number, signal.SIG_IGN)
    try:
        ended, _, said = run(capsys, "train", output / "recipe.yaml", "--output", output)
    finally:
        signal.signal(number, before)
    assert ended == code
    assert re.search("coca: interrupted: .*after step 10 of 12, which is saved", said)
    assert last_checkpoint(output / "checkpoints").name == "checkpoint-10"
    seen = Record()
    train(recipe(text_folder), output, callbacks=[seen])
    assert [step for _, step in seen.steps] == [11, 12]
    assert_the_same(output, trained)


def test_a_second_signal_ends_a_step_at_once(output, text_folder, monkeypatch):
    monkeypatch.setattr(trainer, "ONE_SIGNAL", 0.0)
    before = signal.getsignal(signal.SIGINT)
    stop = AtStep(10, twice(signal.SIGINT), begin=True)
    with pytest.raises(KeyboardInterrupt, match="within a step"):
        train(recipe(text_folder), output, callbacks=[stop])
    assert last_checkpoint(output / "checkpoints").name == "checkpoint-8"
    assert signal.getsignal(signal.SIGINT) is before


# Values that are not finite


def poison(model):
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = float("nan")


@pytest.mark.parametrize(
    ("last", "step", "message"),
    [
        (8, 9, "the loss is nan at step 10: training stopped, the last good checkpoint is .*-8"),
        (0, 4, "not finite at step .*: training stopped, no checkpoint was saved yet"),
        (8, 10, "the validation loss is nan at step"),
    ],
)
def test_nan_stops_training_and_is_never_saved(trained, text_folder, tmp_path, last, step, message):
    output = unfinished(trained, tmp_path / "run", last)
    with pytest.raises(TrainingDiverged, match=message):
        train(recipe(text_folder), output, callbacks=[AtStep(step, poison)])
    assert not is_finished(output) and not (output / "model.safetensors").exists()
    saved = list(output.rglob("model.safetensors"))
    assert len(saved) == bool(last)
    for path in saved:
        assert all(weight.isfinite().all() for weight in load_file(path).values())


# Full disks


def test_a_full_disk_leaves_the_checkpoint(trained, text_folder, tmp_path, monkeypatch):
    """At the first checkpoint, at one after a restart, and at the model of the run."""
    write, count = modeling_utils.safe_save_file, []

    def full(tensors, name, **kwargs):
        count.append(name)
        if len(count) == fail_at:
            with open(name, "wb") as file:
                file.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(tensors, name, **kwargs)

    monkeypatch.setattr(modeling_utils, "safe_save_file", full)
    for fail_at, saved in (  # noqa: B007
        (1, "no checkpoint was saved yet"),
        (2, r"the last good checkpoint is .*checkpoint-4\b"),
        (3, r"the last good checkpoint is .*checkpoint-12\b"),
    ):
        count.clear()
        with pytest.raises(
            UserError, match=f"training stopped, {saved}.* No space left on device: free"
        ):
            train(recipe(text_folder), tmp_path)
        assert not is_finished(tmp_path)
    fail_at = None
    train(recipe(text_folder), tmp_path)
    assert_the_same(tmp_path, trained)


def test_a_disk_that_fills_up_within_an_optimizer_state(trained, output, text_folder):
    """PyTorch's own writer, under a real limit: the state is twice the weights."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = (trained / "model.safetensors").stat().st_size + 2000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(UserError, match=r"checkpoints cannot be written"):
            train(recipe(text_folder), output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    train(recipe(text_folder), output)
    assert_the_same(output, trained)
