"""The paper's comparison in pieces of time: decisions, costs, and that cuts leave no trace."""

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

from coca_attention import reproduce as module
from coca_attention.cli import main
from coca_attention.data import load_tokenizer
from coca_attention.errors import UserError
from coca_attention.reproduce import (
    Deadline,
    Plan,
    ReproduceSettings,
    costs_of,
    make_plan,
    reproduce,
    suite_of,
)
from coca_attention.training import load_recipe, read_summary
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
    with pytest.raises(UserError, match="not of elsewhere"):
        reproduce(settings(tokenised, tokenised / "x", text="elsewhere"))


def test_batches_follow_from_the_tokens(tmp_path):
    def plan(tokens):
        return make_plan(ReproduceSettings(size="50m", tokens=tokens, output=str(tmp_path)))

    assert plan(2000 * 256 * 512).global_batch_size == 256  # the paper's
    assert plan(2000 * 256 * 512 - 1).global_batch_size == 128
    assert plan(1000).global_batch_size == 8
    recipe = plan(10**9).recipe(ReproduceSettings(size="50m"), "RoFormer")
    assert recipe.steps == 10**9 // (256 * 512)
    assert recipe.training.learning_rate == pytest.approx(7.5e-4)
    assert recipe.training.micro_batch_size == 16  # on a CPU
    # 20 tokens a parameter.
    assert make_plan(ReproduceSettings(size="50m")).tokens == 20 * 54_606_848


def test_processes_that_cannot_share_a_batch(tmp_path):
    def micro_batch(devices, tokens=10**9):
        plan, given = Plan({}, "bfloat16", 1, 1, 1), ReproduceSettings(output=str(tmp_path))
        module._share_out(plan, given, tokens, devices)
        return plan.micro_batch_size

    assert micro_batch(4) == 64 and micro_batch(8, 1000) == 1
    for devices, tokens in ((3, 10**9), (6, 10**9), (16, 1000)):
        with pytest.raises(UserError, match=f"to {devices} processes: use a power of two"):
            micro_batch(devices, tokens)


def test_a_run_goes_on_in_more_processes(tmp_path, monkeypatch):
    given, seen = ReproduceSettings(size="toy", output=str(tmp_path), tokens=1000), []
    assert module.load_plan(given).micro_batch_size == 8
    monkeypatch.setattr(module, "_blocks_each", lambda batch: batch // 4)
    monkeypatch.setattr(
        "coca_attention.training.train", lambda recipe, *a, **k: seen.append(recipe)
    )
    module._train(given, module.load_plan(given), "RoFormer", Deadline(None))
    assert seen[0].training.micro_batch_size == 2


def test_all_models_differ_in_their_attention_alone():
    given = ReproduceSettings()
    plan = Plan({}, "bfloat16", 10**9, 256, 16)
    roformer, *others = (plan.recipe(given, name) for name in module.MODELS)
    for other in others:
        other.model.attention, other.model.layers = "rope", ""
        assert other == roformer


def test_the_suite_is_the_papers(request):
    paper = request.config.rootpath / "suites" / "paper.yaml"
    from coca_attention.evaluation.suite import load_suite

    expected = load_suite(paper, [])
    made = suite_of(ReproduceSettings(), Plan({}, "bfloat16", 10**9, 256, 16))
    found, known = made.tasks["perplexity"], expected.tasks["perplexity"]
    found.source = known.source
    assert made.tasks == expected.tasks
    assert [(s.kind, s.factor) for s in made.scalings] == [
        (s.kind, s.factor) for s in expected.scalings
    ]


def test_costs_on_gpus_that_are_not_at_hand(capsys):
    h100 = ReproduceSettings(size="350m", dry_run=True, device="H100", devices=8)
    costs = {cost.name: cost for cost in costs_of(h100)}
    assert len(costs) == 5
    roformer = costs["RoFormer"]
    assert roformer.tokens == pytest.approx(20 * roformer.parameters, rel=1e-4)
    # 6 operations per parameter and token, attention on top, at 40 % of 989.5 TFLOP/s.
    least = 6 * roformer.parameters * roformer.tokens / (8 * 0.4 * 989.5e12)
    assert least < roformer.training < 1.2 * least
    assert 16 * roformer.parameters < roformer.memory < 0.9 * 80e9
    assert costs["Roles"].training < roformer.training
    assert costs_of(ReproduceSettings(**{**vars(h100), "devices": 1}))[0].training == pytest.approx(
        8 * costs["RoFormer"].training
    )
    fitted = costs_of(ReproduceSettings(device="H200", dry_run=True, minutes_per_model=8.0))
    assert max(cost.training for cost in fitted) == pytest.approx(480, rel=0.01)
    assert main(["reproduce", "--size=350m", "--dry-run", "--device=H100", "--devices=8"]) == 0
    assert "hours in all" in capsys.readouterr().out


def test_tokens_that_are_read_in_given_minutes(tokenised, tmp_path):
    chosen = settings(
        tokenised, tmp_path / "run", tokens=None, minutes_per_model=0.1, models=["Roles"]
    )
    (cost,) = costs_of(chosen)
    assert 8 * 256 < cost.tokens < 10**8
    assert 1 < cost.training < 20  # 6 seconds, on a busy machine
    assert not (tmp_path / "run").exists()


def test_too_large_a_batch_is_halved(tokenised, tmp_path, monkeypatch):
    import coca_attention.training as training

    train, seen = training.train, []

    def short_of_memory(recipe, *args, **kwargs):
        seen.append(recipe.training.micro_batch_size)
        if seen[-1] > 2:
            module.write_text(args[0] / "recipe.yaml", training.as_yaml(recipe))
            raise torch.OutOfMemoryError("no")
        return train(recipe, *args, **kwargs)

    monkeypatch.setattr(training, "train", short_of_memory)
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ["Roformer"]}, "did you mean RoFormer"),
        ({"minutes": 1.0, "hours": 1.0}, "say the same"),
        ({"device": "H100"}, "is for --dry-run"),
        ({"device": "H1", "dry_run": True}, "device must be one of"),
        ({"tokens_per_parameter": 0.0}, "must be above 0"),
        ({}, "name the text to tokenise with --text"),
    ],
)
def test_invalid_settings(changes, message, tmp_path):
    given = ReproduceSettings(output=str(tmp_path / "run"), **changes)
    with pytest.raises(UserError, match=message):
        costs_of(given) if given.dry_run else reproduce(given)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_killed_and_continued_by_the_command(tmp_path):
    """The size toy from text to page, killed and cut by minutes, beside a whole run."""

    def command(output, *more):
        words = ["--size=toy", "--text=stdlib", "--tokens=300000", f"--output={output}", *more]
        return [sys.executable, "-m", "coca_attention.cli", "reproduce", *words]

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command(whole), check=True, env=environment)
    for reached in ("CoCA-Slack/checkpoints", "suite/journal.jsonl"):
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
    assert_same(*(outcome(folder, list(module.MODELS)) for folder in (whole, cut)))
