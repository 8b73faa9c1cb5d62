"""Staged runs that are killed, or run out of disk space, end in the same weights."""

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
from transformers import TrainerCallback, modeling_utils

from coca_attention.errors import UserError
from coca_lab.training import is_finished, load_recipe, train
from coca_lab.training import run as module
from runs import assert_the_same, write_recipe

KILLED = """
import os, signal, sys
from pathlib import Path
from transformers import TrainerCallback
from coca_lab.training import load_recipe, run, train

where, path, output = sys.argv[1:]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print("a step", flush=True)
        if where == f"{Path(args.output_dir).parent.name} {state.global_step}":
            die()

replace = os.replace
def move(source, target):
    # Among the first files of a finished stage's model that are moved to their place.
    if where == "moving" and ".model.partial" in str(source) and "tokenizer" in str(source):
        die()
    replace(source, target)
os.replace = move

summary = run.write_json
def write(path, value):
    if where == "before the summary" and path.name == "stage.json":
        die()
    summary(path, value)
    if where == "after the summary" and path.name == "stage.json":
        die()
run.write_json = write

print("begins", flush=True)
train(load_recipe(path), output, callbacks=[Kill()])
"""


def program(where, path, output):
    return [sys.executable, "-c", KILLED, where, str(path), str(output)]


def killed(where, path, output):
    result = subprocess.run(program(where, path, output), capture_output=True)
    assert result.returncode == -signal.SIGKILL, result.stderr.decode()


def test_stopped_between_stages_and_killed_in_one_it_ends_in_the_same_weights(
    staged, tmp_path, monkeypatch
):
    path, run = staged
    output = tmp_path / "killed"

    write = module.write_json

    def stop(path, value):
        if path.name == "stage.json":
            raise KeyboardInterrupt
        write(path, value)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "write_json", stop)  # the first stage's summary
        train(load_recipe(path), output)
    assert not (output / "stages" / "first" / "stage.json").exists()
    killed("second 3", path, output)
    assert (output / "stages" / "first" / "stage.json").is_file()
    seen: list[tuple[str, int]] = []

    class Record(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append((args.output_dir.split(os.sep)[-2], state.global_step))

    train(load_recipe(path), output, callbacks=[Record()])
    assert seen == [("second", step) for step in range(3, 7)] + [
        ("third", step) for step in range(1, 6)
    ]
    assert_the_same(output, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", ["first 1", "moving", "before the summary", "after the summary", "third 5"]
)
def test_killed_anywhere_it_ends_in_the_same_weights(staged, tmp_path, where):
    path, run = staged
    output = tmp_path / "killed"
    killed(where, path, output)
    train(load_recipe(path), output)
    assert_the_same(output, run)


@pytest.mark.slow
def test_killed_at_ten_random_moments_it_ends_in_the_same_weights(base, text_folder, tmp_path):
    """Some steps and a moment after each start, in all of three stages."""
    parts = [
        {"name": "first", "train": "qt", "objective": "attention"},
        {"name": "second", "train": "qtv"},
        {"name": "third", "objective": "logits"},
    ]
    parts = [{**part, "steps": 30} for part in parts]
    path = write_recipe(base, text_folder, tmp_path / "r.yaml", parts)
    straight, output = train(load_recipe(path), tmp_path / "straight"), tmp_path / "killed"
    draw, finished_stages = random.Random(0), []
    while len(finished_stages) < 10:
        with (
            (tmp_path / "errors").open("wb") as errors,
            subprocess.Popen(
                program("nowhere", path, output), stdout=subprocess.PIPE, stderr=errors
            ) as process,
        ):
            assert process.stdout is not None
            for _ in range(draw.randint(1, 12)):
                process.stdout.readline()
            time.sleep(draw.uniform(0, 0.3))
            process.kill()
        if process.returncode == -signal.SIGKILL:
            finished_stages.append(len(list(output.glob("stages/*/stage.json"))))
            continue
        assert process.returncode == 0, (tmp_path / "errors").read_text()
        assert_the_same(output, straight)
        shutil.rmtree(output)
    assert {0, 1, 2} <= set(finished_stages)
    train(load_recipe(path), output)
    assert_the_same(output, straight)


def test_a_full_disk_leaves_the_last_checkpoint_and_says_so(staged, tmp_path, monkeypatch):
    """At the first checkpoint, at one after a restart, and at the model of a stage."""
    path, run = staged
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
        (2, r"the last good checkpoint is .*checkpoint-2\b"),
        (3, r"the last good checkpoint is .*checkpoint-6\b"),
    ):
        count.clear()
        with pytest.raises(
            UserError, match=f"training stopped, {saved}.* No space left on device: free"
        ):
            train(load_recipe(path), tmp_path)
        assert not is_finished(tmp_path)
    count.clear()
    fail_at = None
    train(load_recipe(path), tmp_path)
    assert_the_same(tmp_path, run)


def test_a_disk_that_fills_up_within_an_optimizer_state(staged, tmp_path):
    """PyTorch's own writer, under a real limit: the third stage's state is twice its weights."""
    path, run = staged
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = (run / "model.safetensors").stat().st_size + 2000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(UserError, match=r"third.checkpoints cannot be written"):
            train(load_recipe(path), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    train(load_recipe(path), tmp_path)
    assert_the_same(tmp_path, run)
