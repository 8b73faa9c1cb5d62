"""The paper's comparison in pieces of time: cuts leave no trace."""

import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from coca_attention.errors import UserError
from coca_lab.cli import main
from coca_lab.data import load_tokenizer
from coca_lab.studies.reproduce import Deadline, ReproduceSettings, reproduce
from coca_lab.studies.reproduce import run as module
from coca_lab.studies.reproduce.settings import MODELS
from coca_lab.training import load_recipe, read_summary, train
from coca_lab.training.run import claim_folder
from conftest import some_text

TINY = {"size": "toy", "longest": 1, "documents": 1, "samples": 1, "tokens": 8 * 256 * 25}
TWO = ["CoCA-Strict", "Roles"]


@pytest.fixture(scope="module")
def tokenised(tmp_path_factory):
    """A folder of tokenised text, and the text that it was made of."""
    folder = tmp_path_factory.mktemp("reproduce")
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(some_text(700, seed=number))
    settings = ReproduceSettings(
        **TINY, text=str(folder), tokenised=str(folder / "tokens"), prepare=True
    )
    assert reproduce(settings) is None
    return folder / "tokens"


def settings(tokenised, output, **changes) -> ReproduceSettings:
    given = {"tokenised": str(tokenised), "output": str(output), "models": TWO, "factors": []}
    return ReproduceSettings(**{**TINY, **given, **changes})


def outcome(folder, models=TWO):
    """Weights, curves and figures, without times."""
    cells = json.loads((folder / "suite" / "results.json").read_text())["results"]
    left_out = ("seconds", "file", "machine")
    cells = [{n: v for n, v in cell.items() if n not in left_out} for cell in cells]
    curves = {name: read_summary(folder / name)["curve"] for name in models}
    return {name: load_file(folder / name / "model.safetensors") for name in models}, curves, cells


def assert_same(one, other):
    for name, weights in one[0].items():
        assert all(torch.equal(w, other[0][name][key]) for key, w in weights.items())
    assert one[1:] == other[1:]


def test_a_run_that_is_cut_everywhere_is_a_whole_run(tokenised, tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert reproduce(settings(tokenised, whole)) == whole / "report.html"
    now = iter(range(10**6))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    starts, page = 0, None
    while page is None:
        starts += 1
        assert starts < 30
        # By this clock every look at it takes a second.
        page = reproduce(settings(tokenised, cut, minutes=(2 + starts / 2) / 60))
    assert starts > 4
    assert_same(outcome(whole), outcome(cut))
    assert main(["report", str(cut / "suite"), "--output", str(tmp_path / "again.html")]) == 0
    with pytest.raises(UserError, match="another tokens: choose another --output"):
        reproduce(settings(tokenised, cut, tokens=99))


def test_text_is_tokenised_once_and_then_needs_no_source(tokenised):
    about = json.loads((tokenised / "text.json").read_text())
    tokens = np.load(tokenised / "train.npy", mmap_mode="r")
    assert tokens.dtype == np.uint16
    assert len(tokens) == about["tokens"] > 60 * 700 / 2
    tokenizer = load_tokenizer(tokenised / "tokenizer")
    ends = int((tokens == tokenizer.eos_token_id).sum())
    assert 50 < ends < 60  # some documents are held out
    with lzma.open(tokenised / "test.jsonl.xz", "rt") as file:
        lines = file.readlines()
    assert len(lines) == about["test_documents"] == 1
    read = tokenizer(json.loads(lines[0])["text"])["input_ids"]
    assert 256 < len(read) < 300
    assert sorted(p.name for p in tokenised.iterdir()) == [
        "test.jsonl.xz", "text.json", "tokenizer", "train.npy"
    ]  # fmt: skip
    for changes, message in (
        ({"longest": 2}, "made for 256 tokens a window, not 512: choose a smaller --longest"),
        ({"documents": 2}, "made for 1 documents, not 2"),
    ):
        with pytest.raises(UserError, match=message):
            reproduce(settings(tokenised, tokenised / "x", **changes))
    with pytest.raises(UserError, match="not of elsewhere"):
        reproduce(settings(tokenised, tokenised / "x", text="elsewhere"))


def test_a_run_goes_on_in_more_processes(tmp_path, monkeypatch):
    given, seen = ReproduceSettings(size="toy", output=str(tmp_path), tokens=1000), []
    assert module.load_plan(given).micro_batch_size == 8
    monkeypatch.setattr(module, "blocks_each", lambda batch: batch // 4)
    monkeypatch.setattr(module, "train", lambda recipe, *a, **k: seen.append(recipe))
    module._train(given, module.load_plan(given), "RoFormer", Deadline(None))
    assert seen[0].training.micro_batch_size == 2


def test_too_large_a_batch_is_halved(tokenised, tmp_path, monkeypatch):
    seen = []

    def short_of_memory(recipe, *args, **kwargs):
        seen.append(recipe.training.micro_batch_size)
        if seen[-1] > 2:
            claim_folder(recipe, args[0], may_change=kwargs["may_change"])
            raise torch.OutOfMemoryError("no")
        return train(recipe, *args, **kwargs)

    monkeypatch.setattr(module, "train", short_of_memory)
    output = tmp_path / "run"
    given = settings(tokenised, output)
    module._train(given, module.load_plan(given), "RoFormer", Deadline(None))
    assert seen == [8, 4, 2]
    assert json.loads((output / "plan.json").read_text())["micro_batch_size"] == 2
    assert load_recipe(output / "RoFormer" / "recipe.yaml").training.micro_batch_size == 2


def test_a_run_goes_on_where_it_was_moved_to(tokenised, tmp_path, monkeypatch):
    one, other = tmp_path / "one", tmp_path / "other"
    shutil.copytree(tokenised, one / "text")
    given = settings("", one, models=["Roles"])
    plan = module.load_plan(given)
    late = iter([False, True])
    monkeypatch.setattr(Deadline, "passed", lambda self: next(late))
    with pytest.raises(module.TimeUp):
        module._train(given, plan, "Roles", Deadline(None))
    monkeypatch.undo()
    one.rename(other)
    given = settings("", other, models=["Roles"])
    module._train(given, module.load_plan(given), "Roles", Deadline(None))
    assert read_summary(other / "Roles")["seconds"] is None  # of a run in two parts
    recipe = load_recipe(other / "Roles" / "recipe.yaml")
    assert recipe.data.source == str(other / "text" / "train.npy")


@pytest.mark.slow
def test_killed_and_continued_by_the_command(tmp_path):
    """The size toy from text to page, killed and cut by minutes, beside a whole run."""

    def command(output, *more):
        words = ["--size=toy", "--text=stdlib", "--tokens=300000", f"--output={output}", *more]
        return [sys.executable, "-m", "coca_lab.cli", "reproduce", *words]

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command(whole), check=True, env=environment)
    for reached in ("CoCA-Slack/checkpoints", "suite/values.sqlite"):
        process = subprocess.Popen(command(cut), env=environment)
        while not (cut / reached).exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        subprocess.run(command(cut, "--minutes=0.15"), check=True, env=environment)
    starts = 0
    while not (cut / "report.html").exists():
        subprocess.run(command(cut, "--minutes=0.3"), check=True, env=environment)
        starts += 1
        assert starts < 40
    assert_same(*(outcome(folder, list(MODELS)) for folder in (whole, cut)))
