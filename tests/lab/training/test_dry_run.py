"""The dry run says what a run then does, and writes nothing."""

import os
import tempfile
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

import stage_runs
from coca_attention.errors import UserError
from coca_lab.cli import main
from coca_lab.data import load_tokenizer
from coca_lab.training import load_recipe, read_summary
from coca_lab.training.dry_run import _Clock, _sizes, dry_run, vocabulary_of
from stage_runs import TEACHER, weights, write_recipe

base, straight = stage_runs.base, stage_runs.straight


def test_it_says_what_the_run_does(straight):
    path, run, _ = straight
    cost, summary = dry_run(load_recipe(path), steps=2), read_summary(run)
    for found, done in zip(cost.stages, summary["stages"], strict=True):
        for name in ("name", "train", "objective", "parameters", "trained", "steps", "tokens"):
            assert getattr(found, name) == done[name], name
        assert found.passes == 2 and found.step_seconds > found.pass_seconds > 0
        assert found.weights == 4 * found.parameters and found.gradients == 4 * found.trained
        assert found.optimizer == 8 * found.trained and found.teacher == 0
        assert found.peak > found.memory
    assert cost.seconds == cost.start_seconds + sum(stage.seconds for stage in cost.stages)


def test_teachers_and_adapters(base, text_folder, tmp_path):
    stages = [*TEACHER, {"name": "adapters", "train": "lora", "lora_rank": 2}]
    path = write_recipe(base, text_folder, tmp_path / "recipe.yaml", stages, init="calibrated")
    cost = dry_run(load_recipe(path), steps=1)
    student, teacher = cost.stages[0].parameters, cost.stages[0].teacher // 4
    # Keys have twice the width of T: 2 layers, hidden 16, 2 kv_heads of 4.
    assert teacher == cost.stages[1].teacher // 4 == student + 2 * 16 * 4
    assert cost.stages[2].teacher == 0 and cost.stages[2].parameters > student
    assert 0 < cost.stages[2].trained < student and all(s.step_seconds for s in cost.stages)


def test_nothing_is_written(base, text_folder, tmp_path, monkeypatch, capsys):
    path = write_recipe(base, text_folder, tmp_path / "recipe.yaml", TEACHER)
    for folder in ("here", "temporary"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    cache = sorted(os.walk(os.environ["XDG_CACHE_HOME"]))
    words = ["train", str(path), "--dry-run", "--training.report_to=[tensorboard]"]
    assert main([*words, "--training.save_every=1"]) == 0
    printed = capsys.readouterr().out
    assert "Nothing was written" in printed
    assert printed.splitlines()[0].split() == ["attention", "logits", "run"]
    assert not [*(tmp_path / "here").iterdir(), *(tmp_path / "temporary").iterdir()]
    assert sorted(os.walk(os.environ["XDG_CACHE_HOME"])) == cache


def test_a_model_that_does_not_fit_is_only_described(base, text_folder, tmp_path):
    """LLaMA-7B by its configuration alone: 32 layers, T of half the width of its keys."""
    config = LlamaConfig(dtype=torch.float16, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path / "7b")
    load_tokenizer(base).save_pretrained(tmp_path / "7b")
    stages = [{"name": "attention", "train": "qt", "objective": "attention"}]
    path = write_recipe(tmp_path / "7b", text_folder, tmp_path / "recipe.yaml", stages)
    cost = dry_run(load_recipe(path), steps=0)
    [stage] = cost.stages
    assert stage.parameters == 6_738_415_616 - 32 * 4096 * 2048
    assert stage.trained == 32 * 4096 * (4096 + 2048)
    assert stage.teacher == 2 * 6_738_415_616  # in the dtype of its files
    assert cost.seconds is None and stage.seconds is None and stage.peak is None


def test_batches_are_shared_out_as_in_training():
    words = ["--model.hidden_size=32", "--model.num_layers=1", "--model.num_heads=2"]
    words.append("--training.global_batch_size=8")
    recipe = load_recipe(None, [*words, "--training.micro_batch_size=2"])
    two = SimpleNamespace(num_processes=2)
    [stage] = recipe.run_stages
    assert _sizes(recipe, stage, vocabulary_of(recipe), two, False).passes == 2
    with pytest.raises(UserError, match="must be a multiple of micro_batch_size"):
        dry_run(load_recipe(None, [*words, "--training.micro_batch_size=16"]))


def test_a_sharded_run_is_known_by_its_arguments_or_by_its_launcher(monkeypatch):
    def is_sharded(fsdp):
        words = ["--model.hidden_size=32", "--model.num_layers=1", "--model.num_heads=2"]
        words.append(f'--training.trainer={{"fsdp": {fsdp}}}')
        return dry_run(load_recipe(None, words), steps=0).is_sharded

    assert is_sharded("true") and not is_sharded("false")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert is_sharded("false")


def test_a_first_step_that_compiles_is_not_the_time_of_a_step(monkeypatch):
    times = iter([0.0, 0.0, 100.0, 100.0, 101.0])
    monkeypatch.setattr(_Clock, "_now", lambda self: next(times))
    clock, control = _Clock(3), SimpleNamespace(should_training_stop=False)
    clock.on_train_begin(None, None, control)
    for step in (1, 2):
        assert not control.should_training_stop
        clock.on_step_begin(None, None, control)
        clock.on_step_end(None, SimpleNamespace(global_step=step), control)
    assert control.should_training_stop and clock.last == [100.0, 1.0]


def test_too_large_for_the_device(base, text_folder, tmp_path, monkeypatch):
    path = write_recipe(base, text_folder, tmp_path / "recipe.yaml", TEACHER)
    monkeypatch.setattr("coca_lab.training.dry_run._device_memory", lambda device: 1000)
    cost = dry_run(load_recipe(path))
    assert "do not fit into cpu" in cost.why_not and cost.seconds is None


def test_a_conversion_says_what_it_then_writes(base, tmp_path, capsys):
    target = tmp_path / "target"
    words = ["convert", str(base), str(target), "--form", "strict", "--dtype", "bfloat16"]
    assert main([*words, "--dry-run"]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines()[1:-1])
    assert not [path for path in tmp_path.iterdir() if "target" in path.name]
    assert main(words) == 0
    written = weights(target)
    count = sum(weight.numel() for weight in written.values())
    before = sum(weight.numel() for weight in weights(base).values())
    assert rows["parameters"].split() == [f"{before:,}", "→", f"{count:,}"]
    assert rows["model"].split() == ["llama", "→", "coca_llama"]
    assert int(rows["attention layers replaced"]) == 2
    size = sum(weight.nbytes for weight in written.values())
    assert rows["weights to write"].strip() == f"{size / 1e6:.1f} MB, bfloat16"
