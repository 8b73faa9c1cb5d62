"""Runs that are killed end in the same weights, wherever the kill came."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from coca_lab.training import as_yaml, last_checkpoint, load_recipe, read_summary, run, train
from covering import mostly_slow
from runs import Record, assert_the_same, recipe, write_recipe

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA allows no forks")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Kill(TrainerCallback):
    """Kills its process after a step of a stage."""

    def __init__(self, where):
        self.where = where

    def on_step_end(self, args, state, control, **kwargs):
        if self.where == f"{Path(args.output_dir).parent.name} {state.global_step}":
            die()


def train_until(where, path, output):
    """A run in this process that a kill ends at a place."""
    replace, summary = os.replace, run.write_json

    def move(source, target):
        # Among the first files of a finished stage's model that are moved to their place.
        if where == "moving" and ".model.partial" in str(source) and "tokenizer" in str(source):
            die()
        replace(source, target)

    def write(path, value):
        if where == "before the summary" and path.name == "stage.json":
            die()
        summary(path, value)
        if where == "after the summary" and path.name == "stage.json":
            die()

    os.replace, run.write_json = move, write
    train(load_recipe(path), output, callbacks=[Kill(where)])


def forked(work, *arguments):
    """The number of a process that does some work, which a kill ends without a trace."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        try:
            work(*arguments)
        finally:
            os._exit(0)
    return child


def kill_at(where, path, output):
    """Trains until the place where the run is killed."""
    assert os.waitpid(forked(train_until, where, path, output), 0)[1] == signal.SIGKILL


PLACES = ["first 1", "second 3", "moving", "before the summary", "after the summary", "third 5"]


@pytest.mark.parametrize("where", mostly_slow(PLACES, ["second 3"]))
def test_killed_anywhere_it_ends_in_the_same_weights(staged, tmp_path, where):
    path, whole = staged
    output, seen = tmp_path / "killed", Record()
    kill_at(where, path, output)
    train(load_recipe(path), output, callbacks=[seen])
    if where == "second 3":
        second, third = range(3, 7), range(1, 6)
        assert seen.steps == [("second", i) for i in second] + [("third", i) for i in third]
    assert_the_same(output, whole)


def test_a_mixture_resumes_between_checkpoints_without_its_token_cache(text_folder, tmp_path):
    """Losses that were not yet logged when the checkpoint was written are in the curve."""
    sources = {"most": (text_folder, 0.75), "rest": (text_folder / "00.txt", 0.25)}
    mixture = {name: {"source": str(x), "weight": y} for name, (x, y) in sources.items()}
    changes = {"data__mixture": json.dumps(mixture), "data__cache": tmp_path / "cache"}
    changes |= {"data__held_out": 0, "validation__every": "null", "training__log_every": 5}
    settings, path = recipe("stdlib", **changes), tmp_path / "recipe.yaml"
    path.write_text(as_yaml(settings))
    whole, output = train(settings, tmp_path / "whole"), tmp_path / "killed"
    assert [entry["step"] for entry in read_summary(whole)["curve"]] == [1, 5, 10, 12]
    kill_at("killed 6", path, output)
    assert last_checkpoint(output / "checkpoints").name == "checkpoint-4"
    shutil.rmtree(tmp_path / "cache" / "tokens")
    assert_the_same(train(settings, output), whole)


@pytest.mark.slow
def test_killed_at_ten_random_moments_it_ends_in_the_same_weights(base, text_folder, tmp_path):
    """After any part of the time that a run takes, in all of three stages."""
    parts = [
        {"name": "first", "train": "qt", "objective": "attention", "steps": 15},
        {"name": "second", "train": "qtv", "steps": 15},
        {"name": "third", "objective": "logits", "steps": 15},
    ]
    path, began = write_recipe(base, text_folder, tmp_path / "r.yaml", parts), time.monotonic()
    straight, output = train(load_recipe(path), tmp_path / "straight"), tmp_path / "killed"
    draw, seconds, finished_stages = random.Random(0), time.monotonic() - began, []
    # On a busy machine a run may need several starts to leave a stage.
    while len(finished_stages) < 10 or not {0, 1, 2} <= {*finished_stages}:
        assert len(finished_stages) < 60
        child = forked(train_until, "nowhere", path, output)
        time.sleep(draw.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        if os.waitpid(child, 0)[1] == signal.SIGKILL:
            finished_stages.append(len(list(output.glob("stages/*/stage.json"))))
            continue
        assert_the_same(output, straight)
        shutil.rmtree(output)
    train(load_recipe(path), output)
    assert_the_same(output, straight)
