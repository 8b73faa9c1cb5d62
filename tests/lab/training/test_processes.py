"""Many processes: FSDP2 and DDP compute what one process does, and resume their own runs.

Two CPU processes with gloo, started by the recipe for GPUs. Most tests share one launch, which
takes as long as importing everything twice.
"""

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from coca_attention.errors import UserError
from coca_lab.training import as_yaml, last_checkpoint, load_recipe, read_summary, retrieval, train
from coca_lab.training.folder import catch_read_errors, catch_write_errors
from coca_lab.training.sharding import check_kind, prepare_sharding
from conftest import VOCABULARY
from families import FAMILIES, vanilla
from runs import changed, recipe, unfinished, weights, write_recipe

CONFIGURATIONS = Path(__file__).parents[3] / "recipes" / "accelerate"

# Two processes sum gradients in another order, which changes the last bit of float32 (4.8e-7 for a
# loss between 4 and 8). Adam divides by the size of the gradient, so a weight with a tiny gradient
# may differ by more: a thousandth of one step's update (1e-2) is allowed over all steps.
LOSS = 5e-6
WEIGHT = 1e-5

STEPS = 20
SCRATCH = {
    "model__num_layers": 2, "data__separate_documents": True, "data__held_out": 0.05,
    "validation__every": "null", "training__report_to": "[]", "training__save_every": 10,
    "training__steps": STEPS, "training__log_every": 1,
    "training__global_batch_size": 8,  # two passes on two processes
}  # fmt: skip
TWO_PASSES = ["--training.log_every=1", "--training.global_batch_size=8"]
STAGED = [
    *TWO_PASSES, "--training.steps=4", "--training.learning_rate=3e-3",
    "--training.gradient_checkpointing=true", "--validation.every=2", "--validation.batches=1",
    "--validation.passkeys=3", "--validation.lengths=[270]",
]  # fmt: skip
STAGES = [
    {"name": "t", "train": "t"},
    {"name": "attention", "train": "qt", "objective": "attention"},
    {"name": "hidden_states", "objective": "hidden_states"},  # and logits
    {"name": "adapters", "train": "lora", "lora_rank": 2},
]
# The command line, for several runs in one launch, with faults in the second process.
COMMANDS = """
import os, signal, sys, time
from accelerate import DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import Trainer
from coca_lab.cli import main
from coca_lab.training import retrieval
from coca_lab.training.trainer import RecipeTrainer

retrieval.ANSWER = 4  # tokens; longer answers only take longer

fault, *words = sys.argv[1:]
kind, _, step = fault.partition(" ")

create = Trainer.create_accelerator_and_postprocess
def with_shards(self):
    # Accelerate leaves FSDP out on CPUs, where PyTorch computes it as on GPUs.
    create(self)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        state = self.accelerator.state
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.fsdp_plugin = FullyShardedDataParallelPlugin()
            state.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.is_fsdp_enabled = True
Trainer.create_accelerator_and_postprocess = with_shards

def wrong(trainer):
    return trainer.args.process_index == 1 and str(trainer.state.global_step) == step

save = RecipeTrainer._save_optimizer_and_scheduler
def cut_short(self, folder):
    if kind == "kill" and wrong(self):
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, folder)
RecipeTrainer._save_optimizer_and_scheduler = cut_short

checkpoint = RecipeTrainer._save_checkpoint
def poisoned(self, *args, **kwargs):
    if kind == "nan" and wrong(self):
        next(self.model.parameters()).to_local().data[:] = float("nan")
    checkpoint(self, *args, **kwargs)
RecipeTrainer._save_checkpoint = poisoned

for recipe, output in zip(words[::2], words[1::2], strict=True):
    code = main(["train", recipe, "--output", output])
    if code:
        time.sleep(5)  # the launcher stops the others as soon as one exits
        sys.exit(code)
"""


def started(folder, launcher, runs, fault="none"):
    """Run recipes with a launcher, which fails with a fault alone; returns the finished process."""
    (folder / "commands.py").write_text(COMMANDS)
    words = [str(word) for run in runs for word in run]
    done = subprocess.run(
        [sys.executable, "-m", *map(str, launcher), folder / "commands.py", fault, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert bool(done.returncode) == (fault != "none"), done.stderr
    return done


def fsdp2(processes=2):
    configured = ["--config_file", CONFIGURATIONS / "8-gpus-fsdp2.yaml"]
    return ["accelerate.commands.launch", *configured, "--num_processes", processes]


DDP = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def original(family, tokenizer, folder):
    """A folder with a rotary model of a family to start from."""
    vanilla(family, vocab_size=VOCABULARY).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def recipes(text_folder, tokenizer, tmp_path_factory):
    """Recipe files: models from scratch, and all kinds of stages from a rotary model."""
    folder = tmp_path_factory.mktemp("recipes")
    base = original("Llama", tokenizer, folder / "base")
    stages = load_recipe(write_recipe(base, text_folder, folder / "r.yaml", STAGES), STAGED)
    rounded = {**SCRATCH, "training__steps": 2, "training__precision": "bfloat16"}
    for name, content in (
        ("scratch", recipe(text_folder, **SCRATCH)),
        ("rounded", recipe(text_folder, **rounded)),
        ("staged", stages),
    ):
        (folder / f"{name}.yaml").write_text(as_yaml(content))
    return folder


@pytest.fixture(scope="module")
def runs(recipes, tmp_path_factory):
    """The folder with the runs of two processes (two-…) and of one (one-…)."""
    folder = tmp_path_factory.mktemp("runs")
    names = ("scratch", "staged", "rounded")
    both = [(recipes / f"{name}.yaml", folder / f"two-{name}") for name in names]
    done = started(folder, fsdp2(), both)
    assert done.stdout.count("parameters") == len(names)  # only one process prints
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "ANSWER", 4)
        for name in names:
            train(load_recipe(recipes / f"{name}.yaml"), folder / f"one-{name}")
    return folder


BY_GRADIENT = "--training.trainer={adam_epsilon: 1.0e-3}"
"""AdamW divides a gradient by its own size: where that is round-off, a step is as large as any.
Beside this epsilon a step is at most 1,000 learning rates times the gradient."""


def assert_the_same(ours, theirs, steps):
    """The losses of every step, and the weights."""
    curves = [read_summary(folder)["curve"] for folder in (ours, theirs)]
    assert len(curves[0]) == len(curves[1]) == steps
    for one, other in zip(*curves, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=LOSS), one
    torch.testing.assert_close(weights(ours), weights(theirs), atol=WEIGHT, rtol=0)


@pytest.mark.slow
def test_two_sharded_processes_learn_what_one_does_and_leave_an_ordinary_model(runs):
    two, one = (runs / f"{name}-scratch" for name in ("two", "one"))
    assert_the_same(two, one, STEPS)
    first, *_, last = read_summary(two)["curve"]
    assert last["loss"] < first["loss"] - 0.5  # training has an effect
    assert {path.name for path in two.iterdir()} == {path.name for path in one.iterdir()}
    assert (two / "config.json").read_text() == (one / "config.json").read_text()


@pytest.mark.slow
def test_the_weights_of_a_layer_lie_on_both_processes(runs):
    checkpoint = last_checkpoint(runs / "two-scratch" / "checkpoints")
    assert checkpoint is not None and checkpoint.name == "checkpoint-20"
    for part, name in (
        ("pytorch_model_fsdp_0", "model.gpt_neox.layers.1.attention.t_proj.weight"),
        ("optimizer_0", "optimizer.state.gpt_neox.layers.1.attention.t_proj.weight.exp_avg"),
    ):
        known = FileSystemReader(checkpoint / part).read_metadata()
        chunks = known.state_dict_metadata[name].chunks  # pyright: ignore
        assert [tuple(chunk.sizes) for chunk in chunks] == [(4, 16), (4, 16)]
        stored = {place.relative_path for place in known.storage_data.values()}
        assert len(stored) == 2, "each process writes its own file"


@pytest.mark.slow
def test_bfloat16_on_two_processes(runs):
    """Later losses differ where a last bit of the weights decides how an activation is rounded."""
    curves = [read_summary(runs / f"{name}-rounded")["curve"] for name in ("two", "one")]
    (first, second), (alone, later) = ([entry["loss"] for entry in curve] for curve in curves)
    assert first == pytest.approx(alone, abs=LOSS)
    assert second == pytest.approx(later, rel=1e-2)


@pytest.mark.slow
def test_stages_and_recomputed_activations_on_two_processes(runs):
    """Frozen parameters, every objective beside a whole teacher, adapters merged, validation."""
    assert_the_same(runs / "two-staged", runs / "one-staged", 4 * len(STAGES))
    measured = [read_summary(runs / f"{name}-staged") for name in ("two", "one")]
    ours, theirs = (
        [entry["perplexity"] for entry in (summary["start"], *summary["validation"])]
        for summary in measured
    )
    assert len(ours) == 1 + 3 * len(STAGES)  # the start; before, during and after each stage
    assert ours == pytest.approx(theirs, rel=LOSS)
    for summary in measured:
        found = [entry["retrieval"] for entry in (summary["start"], *summary["validation"])]
        assert found == [{"passkey_270": 0.0}] * len(ours)
    stages = read_summary(runs / "two-staged")["stages"]
    assert stages == [
        {**stage, "seconds": ours["seconds"], "throughput": ours["throughput"]}
        for stage, ours in zip(read_summary(runs / "one-staged")["stages"], stages, strict=True)
    ]
    before, after = (weights(runs / "two-staged" / "stages" / n) for n in ("t", "attention"))
    assert changed(before, after) == {"q_proj", "t_proj"}


@pytest.mark.slow
def test_a_run_is_resumed_as_it_was_written(runs, recipes, tmp_path):
    output = unfinished(runs / "two-scratch", tmp_path / "run", 10)
    with pytest.raises(UserError, match=r"checkpoint-10 was written with FSDP, .* is without it"):
        train(load_recipe(recipes / "scratch.yaml"), output)
    checkpoints = [runs / f"{n}-scratch" / "checkpoints" / "checkpoint-20" for n in ("two", "one")]
    check_kind(checkpoints[0], sharded=True)
    with pytest.raises(UserError, match="was written without FSDP, and this run is with it"):
        check_kind(checkpoints[1], sharded=True)


@pytest.mark.slow
def test_every_family_in_parts(text_folder, tokenizer, tmp_path):
    paths = []
    for name in FAMILIES:
        base, path = original(name, tokenizer, tmp_path / f"{name} base"), tmp_path / f"{name}.yaml"
        write_recipe(base, text_folder, path, [], attention="strict")
        words = [*TWO_PASSES, "--training.steps=3", "--validation.every=null", BY_GRADIENT]
        path.write_text(as_yaml(load_recipe(path, words)))
        paths.append(path)
    started(tmp_path, fsdp2(), [(path, path.with_suffix(".two")) for path in paths])
    for path in paths:
        alone = train(load_recipe(path), path.with_suffix(".one"))
        assert_the_same(path.with_suffix(".two"), alone, 3)


@pytest.mark.slow
def test_killed_while_writing_it_resumes_with_any_number_of_processes(runs, text_folder, tmp_path):
    """Two processes, one dies between its weights and its optimizer's; then one; then two."""
    path, output = tmp_path / "r.yaml", tmp_path / "run"
    path.write_text(as_yaml(recipe(text_folder, **SCRATCH | {"training__save_every": 5})))
    started(tmp_path, fsdp2(), [(path, output)], fault="kill 10")
    checkpoints = output / "checkpoints"
    assert (checkpoints / "checkpoint-10" / "pytorch_model_fsdp_0").is_dir()
    assert last_checkpoint(checkpoints) == checkpoints / "checkpoint-5"
    started(tmp_path, fsdp2(1), [(path, output)])
    assert_the_same(output, runs / "one-scratch", STEPS)
    again = unfinished(output, tmp_path / "again", 15)
    started(tmp_path, fsdp2(2), [(path, again)])
    assert_the_same(again, runs / "one-scratch", STEPS)


@pytest.mark.slow
def test_a_value_that_is_not_finite_in_one_part_stops_all(recipes, tmp_path):
    run = tmp_path / "run"
    stopped = started(tmp_path, fsdp2(), [(recipes / "scratch.yaml", run)], fault="nan 20")
    said = "has values that are not finite"
    assert stopped.stderr.count(said) == 2, stopped.stderr  # neither waits for the other
    assert re.search(rf"{said} .*the last good checkpoint is \S*checkpoint-10", stopped.stderr)
    assert not (run / "checkpoints" / "checkpoint-20" / "trainer_state.json").exists()


@pytest.mark.slow
def test_a_teacher_beside_unsharded_processes(runs, recipes, tmp_path):
    started(tmp_path, DDP, [(recipes / "staged.yaml", tmp_path / "staged")])
    assert_the_same(tmp_path / "staged", runs / "one-staged", 4 * len(STAGES))


@pytest.mark.parametrize(
    ("plugin", "parallel", "compiled", "message"),
    [
        ({}, {"dp_shard_size": 2}, False, None),
        ({}, {"cp_size": 2}, False, "set cp_size, sp_size and tp_size of"),
        ({}, {"tp_size": 2}, False, "set cp_size, sp_size and tp_size of"),
        ({}, {}, True, r"training\.compile cannot be combined with FSDP"),
        ({"fsdp_version": 1, "reshard_after_forward": "FULL_SHARD"}, {}, False, "fsdp_version: 2"),
        ({"cpu_ram_efficient_loading": True}, {}, False, "cpu_ram_efficient_loading: false"),
        ({"activation_checkpointing": True}, {}, False, "training.gradient_checkpointing"),
        (None, {}, False, "no process per GPU: start with accelerate launch"),
    ],
)
def test_configurations_that_are_not_supported(monkeypatch, plugin, parallel, compiled, message):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # Accelerate sets it
    if plugin is not None:
        known = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}
        plugin = FullyShardedDataParallelPlugin(**{**known, **plugin})
    accelerator: Any = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        parallelism_config=ParallelismConfig(**parallel),
        gradient_state=SimpleNamespace(plugin_kwargs={}),
    )
    arguments: Any = SimpleNamespace(torch_compile=compiled)
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        prepare_sharding(accelerator, arguments, is_sharded=True)
    assert accelerator.gradient_state.plugin_kwargs == (
        {"sync_each_batch": True} if message is None else {}
    )


def test_what_fails_in_one_process_is_reported_in_one_line(tmp_path):
    def failed(action, error):
        return CheckpointException(action, {1: (error, None)})  # pyright: ignore

    said = r"checkpoint-10 cannot be read \(__1_0.distcp\): restore its files, or remove"
    with pytest.raises(UserError, match=said), catch_read_errors(tmp_path / "checkpoint-10"):
        raise failed("read", FileNotFoundError("__1_0.distcp"))
    said = r"cannot be written: .* all is well\. No space left on device: free disk space"
    with pytest.raises(UserError, match=said), catch_write_errors(tmp_path, lambda: "all is well"):
        raise failed("write", OSError(ENOSPC, os.strerror(ENOSPC)))
    with pytest.raises(CheckpointException), catch_write_errors(tmp_path, str):
        raise failed("write", RuntimeError("a defect"))


def test_every_configuration_names_the_version_and_leaves_the_precision_to_the_recipe():
    paths = sorted(CONFIGURATIONS.glob("*.yaml"))
    assert len(paths) == 3
    for path in paths:
        content = yaml.safe_load(path.read_text())
        assert "mixed_precision" not in content
        assert content["num_processes"] % content["num_machines"] == 0
        if content["distributed_type"] == "FSDP":
            assert content["fsdp_config"]["fsdp_version"] == 2
            assert content["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] is False
