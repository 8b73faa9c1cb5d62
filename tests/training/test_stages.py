"""Stages: what each trains, the order of the blocks, going on after a kill, what is refused."""

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import yaml
from coca_attention.training.blocks import validation_blocks, validation_text
from coca_attention.training.model import choose_parameters, parameter_counts
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from coca_attention.data import BlockDataset, Mixture, load_tokenizer
from coca_attention.errors import UserError
from coca_attention.models import CoCALlamaConfig
from coca_attention.models.loading import load_model
from coca_attention.training import is_finished, load_recipe, read_summary, train
from coca_attention.training.sections import StageRecipe
from coca_attention.training.stages import block_order
from families import vanilla

PAPER = [
    {"name": "first", "train": "t"},
    {"name": "second", "train": "qtv", "learning_rate": 5e-3},
    {"name": "third", "train": "all", "steps": 5, "warmup_share": 0.5, "final_share": 1.0},
]
TEACHER = [
    {"name": "attention", "train": "qt", "objective": "attention"},
    {"name": "logits", "objective": "logits"},
]


@pytest.fixture(scope="module")
def base(text_folder, tmp_path_factory):
    """A small trained rotary model with grouped heads, its folder."""
    folder = tmp_path_factory.mktemp("base")
    path = folder / "base.yaml"
    content = {
        "model": {
            "attention": "rope",
            "body": "llama",
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 4,
            "num_key_value_heads": 2,
        },
        "data": {"source": str(text_folder), "vocab_size": 300, "block_length": 16},
        "training": {**TRAINING, "steps": 40},
    }
    path.write_text(yaml.safe_dump(content))
    return train(load_recipe(path), folder / "run")


TRAINING = {
    "steps": 6,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "precision": "float32",
    "learning_rate": 1e-2,
    "save_every": 2,
    "log_every": 2,
    "report_to": [],
}


def staged(base, text_folder, path, stages, **model):
    """A recipe file of several stages; returns its path."""
    content = {
        "model": {"start": str(base), "attention": "slack", **model},
        "data": {"source": str(text_folder), "block_length": 16},
        "validation": {"every": 4, "batches": 2, "source": str(text_folder)},
        "training": TRAINING,
        "stages": stages,
    }
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def straight(base, text_folder, tmp_path_factory):
    """The paper's three stages, undisturbed: the recipe, the run folder, the blocks read."""
    folder = tmp_path_factory.mktemp("straight")
    path = staged(base, text_folder, folder / "recipe.yaml", PAPER)
    read: list[int] = []
    plain = BlockDataset.__getitem__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            BlockDataset,
            "__getitem__",
            lambda self, index: read.append(int(index)) or plain(self, index),
        )
        train(load_recipe(path, ["--validation.every", "null"]), folder / "unmeasured")
    train(load_recipe(path), folder / "run")
    # Measuring changes nothing in what is trained.
    assert changed(weights(folder / "unmeasured"), weights(folder / "run")) == set()
    return path, folder / "run", read


def weights(folder):
    return load_file(folder / "model.safetensors")


def changed(first, second) -> set[str]:
    """Names of the modules whose weights differ."""
    assert first.keys() == second.keys()
    return {
        name.removesuffix(".weight").rpartition(".")[2]
        for name in first
        if not torch.equal(first[name], second[name])
    }


def test_each_stage_trains_what_it_names(base, straight):
    _, run, _ = straight
    first, second = (weights(run / "stages" / name) for name in ("first", "second"))
    original = weights(base)
    kept = {name for name in original if "k_proj" not in name}
    assert {name for name in first if "t_proj" not in name} == kept
    assert all(torch.equal(first[name], original[name]) for name in kept)
    assert changed(first, second) == {"q_proj", "t_proj", "v_proj"}
    third = changed(second, weights(run))
    assert {"q_proj", "t_proj", "v_proj", "o_proj", "embed_tokens", "norm", "up_proj"} <= third


def test_the_summary_says_what_each_stage_did(straight):
    _, run, _ = straight
    summary = read_summary(run)
    stages = summary["stages"]
    assert [stage["name"] for stage in stages] == ["first", "second", "third"]
    assert [stage["steps"] for stage in stages] == [6, 6, 5]
    assert summary["steps"] == 17 and summary["tokens"] == 17 * 4 * 16
    # 2 layers, hidden 16, 4 heads of 4, 2 groups: T is 16 to 2 * 2, Q 16 to 16, V 16 to 8.
    assert [stage["trained"] for stage in stages[:2]] == [2 * 16 * 4, 2 * 16 * (4 + 16 + 8)]
    assert stages[2]["trained"] == stages[2]["parameters"] == summary["parameters"]
    assert stages[0]["trained_share"] == stages[0]["trained"] / summary["parameters"]
    assert [e["step"] for e in summary["curve"] if e["stage"] == "second"] == [7, 8, 10, 12]
    rates = {e["step"]: e["learning_rate"] for e in summary["curve"]}
    assert rates[8] == pytest.approx(5e-3, rel=0.2) and rates[16] == pytest.approx(1e-2)


def measured(folder, recipe):
    """Perplexity of the validation blocks, computed apart from the Trainer."""
    model = load_model(folder, device="cpu").eval()
    tokenizer = load_tokenizer(recipe.model.start)
    text = validation_text(recipe, tokenizer)
    blocks = [*validation_blocks(recipe, text, tokenizer)]
    inputs, targets = (torch.stack([b[n] for b in blocks]) for n in ("input_ids", "shift_labels"))
    assert inputs.shape == (2 * 4, 16)
    with torch.no_grad():
        logits = model(input_ids=inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).exp().item()


@pytest.mark.parametrize("stages", [PAPER, TEACHER], ids=["next token", "teacher"])
def test_validation_is_the_next_token_whatever_a_stage_minimises(
    base, text_folder, tmp_path, straight, stages
):
    if stages is PAPER:
        path, run, _ = straight
    else:
        path = staged(base, text_folder, tmp_path / "r.yaml", stages)
        run = train(load_recipe(path), tmp_path / "run")
    recipe, summary = load_recipe(path), read_summary(run)
    found = {(e["stage"], e["step"]): e["perplexity"] for e in summary["validation"]}
    steps = [stage.settings(recipe.training).steps for stage in recipe.stages]
    expected, done = [], 0
    for stage, count in zip(recipe.stages, steps, strict=True):
        within = sorted({*range(0, count, 4), count})
        expected += [(stage.name, done + step) for step in within]
        done += count
    assert list(found) == expected
    first = recipe.stages[0].name
    assert found[first, steps[0]] == pytest.approx(
        measured(run / "stages" / first, recipe), rel=1e-5
    )
    assert found[recipe.stages[-1].name, done] == pytest.approx(measured(run, recipe), rel=1e-5)
    # A stage begins where the one before has ended.
    assert found[recipe.stages[1].name, steps[0]] == found[first, steps[0]]
    assert summary["start"] == {
        "name": base.name,
        "perplexity": pytest.approx(measured(base, recipe), rel=1e-5),
    }


def test_an_ordinary_model_is_left_and_what_only_training_needs_is_gone(straight):
    _, run, _ = straight
    for folder in (run, run / "stages" / "first", run / "stages" / "second"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.config.coca_form == "slack"
        assert (folder / "tokenizer.json").is_file()
    assert not (run / "stages" / "first" / "checkpoints").exists()


def test_no_block_is_read_twice_before_all_were_read(straight):
    _, _, read = straight
    blocks = round(17 * 4 / read_summary(straight[1])["epochs"])
    assert len(read) == 17 * 4
    assert blocks > 17 * 4 and len(set(read)) == len(read)  # not one pass
    assert read == block_order(blocks, 17 * 4, seed=0).tolist()


def test_stages_read_a_mixture_in_its_own_order(base, text_folder, tmp_path, monkeypatch):
    path = staged(base, text_folder, tmp_path / "r.yaml", PAPER)
    content = yaml.safe_load(path.read_text())
    content.pop("validation")
    half = {"source": content["data"].pop("source"), "weight": 0.5}
    content["data"]["mixture"] = {"a": half, "b": dict(half)}
    path.write_text(yaml.safe_dump(content))
    read: list[int] = []
    plain = Mixture.__getitem__
    monkeypatch.setattr(
        Mixture, "__getitem__", lambda self, index: read.append(int(index)) or plain(self, index)
    )
    train(load_recipe(path), tmp_path / "run")
    steps = sum(stage.get("steps", TRAINING["steps"]) for stage in PAPER)
    assert read == list(range(steps * TRAINING["global_batch_size"]))


def test_the_order_of_blocks_is_one_permutation_after_the_other():
    order = block_order(10, 25, seed=3)
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert len(set(order[20:])) == 5
    assert order[:10].tolist() != order[10:20].tolist()
    assert np.array_equal(order[:7], block_order(10, 7, seed=3))
    assert not np.array_equal(order, block_order(10, 25, seed=4))


KILLED = """
import os, signal, sys
from pathlib import Path
from transformers import TrainerCallback
from coca_attention.training import load_recipe, train, stages, fit

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

summary = stages.write_json
def write(*args):
    if where == "before the summary":
        die()
    summary(*args)
    if where == "after the summary":
        die()
stages.write_json = write

print("begins", flush=True)
train(load_recipe(path), output, callbacks=[Kill()])
"""


def program(where, path, output):
    return [sys.executable, "-c", KILLED, where, str(path), str(output)]


def killed(where, path, output):
    result = subprocess.run(program(where, path, output), capture_output=True)
    assert result.returncode == -signal.SIGKILL, result.stderr.decode()


def assert_the_same(output, straight):
    assert changed(weights(output), weights(straight)) == set()
    ours, theirs = read_summary(output), read_summary(straight)
    assert ours["curve"] == theirs["curve"]
    assert ours["validation"] == theirs["validation"] and ours["start"] == theirs["start"]
    for name in ("first", "second"):
        assert changed(weights(output / "stages" / name), weights(straight / "stages" / name)) == (
            set()
        )


def test_killed_in_a_stage_and_between_stages_it_ends_in_the_same_weights(straight, tmp_path):
    path, run, _ = straight
    output = tmp_path / "killed"
    killed("before the summary", path, output)  # of the first stage
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
@pytest.mark.parametrize("where", ["first 1", "moving", "after the summary", "third 5"])
def test_killed_anywhere_it_ends_in_the_same_weights(straight, tmp_path, where):
    path, run, _ = straight
    output = tmp_path / "killed"
    killed(where, path, output)
    train(load_recipe(path), output)
    assert_the_same(output, run)


@pytest.mark.slow
def test_killed_at_ten_random_moments_it_ends_in_the_same_weights(base, text_folder, tmp_path):
    """From outside, some steps and a moment after each start, all over three stages."""
    stages = [
        {"name": "first", "train": "qt", "objective": "attention"},
        {"name": "second", "train": "qtv"},
        {"name": "third", "objective": "logits"},
    ]
    stages = [{**stage, "steps": 30} for stage in stages]
    path = staged(base, text_folder, tmp_path / "r.yaml", stages, init="calibrated")
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


@pytest.mark.parametrize(
    ("save", "kept"),
    [
        (1, "no checkpoint was saved yet"),
        (2, r"the last good checkpoint is .*checkpoint-2\b"),
        (4, r"the last good checkpoint is .*checkpoint-6\b"),  # the stage's model
    ],
)
def test_a_full_disk_leaves_the_last_checkpoint_and_says_so(
    straight, tmp_path, monkeypatch, save, kept
):
    from transformers import modeling_utils

    path, run, _ = straight
    output, write, count = tmp_path / "run", modeling_utils.safe_save_file, []

    def full(tensors, name, **kwargs):
        count.append(name)
        if len(count) == save:
            with open(name, "wb") as file:
                file.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(tensors, name, **kwargs)

    monkeypatch.setattr(modeling_utils, "safe_save_file", full)
    with pytest.raises(UserError, match=f"No space left on device.*training stopped, {kept}"):
        train(load_recipe(path), output)
    assert not is_finished(output)
    train(load_recipe(path), output)
    assert_the_same(output, run)


def test_a_disk_that_is_full_within_an_optimizer_state(straight, tmp_path):
    """PyTorch's own writer, under a real limit: the third stage's state is twice its weights."""
    path, run, _ = straight
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = (run / "model.safetensors").stat().st_size + 2000
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(UserError, match=r"third.checkpoints cannot be written"):
            train(load_recipe(path), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    train(load_recipe(path), tmp_path)
    assert_the_same(tmp_path, run)


def test_teacher_loss_the_original(base, text_folder, tmp_path):
    """Both objectives fall, and the teacher itself is not touched or saved."""
    base = shutil.copytree(base, tmp_path / "sharp")
    # The trained one's attention is nearly uniform, so that there would be nothing to learn.
    vanilla("Llama", vocab_size=300).save_pretrained(base)
    stages = [{**stage, "steps": 40, "learning_rate": 3e-3} for stage in TEACHER]
    path = staged(base, text_folder, tmp_path / "r.yaml", stages, attention="strict")
    before = weights(base)
    run = train(load_recipe(path), tmp_path / "run")
    curve = read_summary(run)["curve"]
    for name in ("attention", "logits"):
        losses = [entry["loss"] for entry in curve if entry["stage"] == name]
        assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), (name, losses)
    assert changed(weights(run / "stages" / "attention"), weights(run)) > {"o_proj", "v_proj"}
    assert changed(before, weights(base)) == set()
    assert not [name for name in weights(run) if "k_proj" in name or "teacher" in name]


def test_accumulated_passes_average_the_loss_of_an_objective(base, text_folder, tmp_path):
    """Two passes of two blocks a step are one pass of four: the mean, not the sum."""
    runs = []
    for size in (2, 4):
        path = staged(base, text_folder, tmp_path / f"{size}.yaml", TEACHER[1:])
        recipe = load_recipe(path, ["--training.micro_batch_size", str(size)])
        runs.append(read_summary(train(recipe, tmp_path / str(size)))["curve"])
    for ours, theirs in zip(*runs, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


def test_adapters_train_and_are_merged(base, text_folder, tmp_path):
    stages = [{"name": "adapters", "train": "lora", "lora_rank": 2}, {"name": "rest", "steps": 1}]
    path = staged(base, text_folder, tmp_path / "r.yaml", stages)
    run = train(load_recipe(path), tmp_path / "run")
    stage = run / "stages" / "adapters"
    model = AutoModelForCausalLM.from_pretrained(stage)
    assert not [name for name in weights(stage) if "lora" in name]
    assert not list(stage.glob("adapter*"))
    original, merged = weights(base), weights(stage)
    assert not torch.equal(merged[Q], original[Q])
    difference = torch.linalg.matrix_rank(merged[Q] - original[Q], tol=1e-5)
    assert difference == 2
    assert torch.equal(merged["model.norm.weight"], original["model.norm.weight"])
    summary = read_summary(run)["stages"][0]
    assert 0 < summary["trained"] < 0.5 * sum(p.numel() for p in model.parameters())


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("step", [3, 6])
def test_adapters_go_on_where_they_were_interrupted(base, text_folder, tmp_path, step):
    """Also after the last step, before the model was saved."""
    path = staged(base, text_folder, tmp_path / "r.yaml", [{"name": "a", "train": "lora"}])

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if step == 3 and state.global_step == 3:
                raise KeyboardInterrupt

        def on_train_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(load_recipe(path), tmp_path / "two", callbacks=[Stop()])
    runs = [train(load_recipe(path), tmp_path / name) for name in ("one", "two")]
    assert changed(*map(weights, runs)) == set()


def test_a_model_is_trained_on_from_a_start_without_stages(base, straight, text_folder, tmp_path):
    """The converted model under position interpolation, longer blocks; and the vanilla one."""
    _, run, _ = straight
    options = ["--data.block_length", "32", "--training.steps", "2"]
    path = staged(run, text_folder, tmp_path / "a.yaml", [], interpolation=2.0)
    longer = AutoModelForCausalLM.from_pretrained(
        train(load_recipe(path, options), tmp_path / "a")
    ).config
    assert (longer.rope_parameters["rope_type"], longer.rope_parameters["factor"]) == ("linear", 2)
    assert longer.max_position_embeddings == 32 and longer.coca_form == "slack"
    path = staged(base, text_folder, tmp_path / "b.yaml", [], attention="rope")
    assert changed(weights(base), weights(train(load_recipe(path), tmp_path / "b")))


def test_a_start_is_calibrated_on_the_runs_own_blocks(base, straight, text_folder, tmp_path):
    path = staged(base, text_folder, tmp_path / "r.yaml", PAPER[:1], init="calibrated")
    runs = [train(load_recipe(path), tmp_path / name) for name in ("one", "two")]
    assert changed(*map(weights, runs)) == set()
    assert changed(weights(runs[0]), weights(straight[1] / "stages" / "first")) == {"t_proj"}


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ({}, ["--data.block_length", "32"], "was trained on 16 tokens and block_length is 32"),
        ({"attention": "alibi"}, [], "has the attention rope, which cannot become alibi"),
        ({"start": "nowhere"}, [], "no tokenizer could be loaded"),
        ({"teacher": "nowhere"}, [], "no model could be loaded"),
        ({"teacher": "OTHER"}, [], "num_hidden_layers 1 in place of 2"),
    ],
)
def test_starts_and_teachers_that_do_not_fit(base, text_folder, tmp_path, model, options, message):
    if model.get("teacher") == "OTHER":
        other = AutoModelForCausalLM.from_pretrained(base, num_hidden_layers=1)
        other.save_pretrained(tmp_path / "other")
        model = {"teacher": str(tmp_path / "other")}
    stages = TEACHER[:1] if "teacher" in model else []
    path = staged(base, text_folder, tmp_path / "r.yaml", stages, **model)
    with pytest.raises(UserError, match=message):
        train(load_recipe(path, options), tmp_path / "run")


def test_a_converted_start_is_no_teacher_of_itself(straight, text_folder, tmp_path):
    path = staged(straight[1], text_folder, tmp_path / "r.yaml", TEACHER)
    with pytest.raises(UserError, match="has the attention slack already"):
        train(load_recipe(path), tmp_path / "run")


def test_a_stage_whose_parameters_the_model_lacks_is_refused(base):
    rotary = AutoModelForCausalLM.from_pretrained(base)
    with pytest.raises(UserError, match="stage 'x' would train nothing: a LlamaForCausalLM has no"):
        choose_parameters(rotary, StageRecipe("x", train="t"))


def test_lora_without_peft_is_refused(monkeypatch):
    from coca_attention.training import recipe

    monkeypatch.setattr(recipe, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="stage 'x': lora needs peft"):
        load_recipe(None, ["--stages", '[{"name": "x", "train": "lora"}]'])


@pytest.mark.parametrize(
    ("model", "stage", "message"),
    [
        ({}, {"train": "k"}, "'train':: Expected"),
        ({}, {"objective": "perplexity"}, "'objective':: Expected"),
        ({}, {"stepz": 3}, "stepz"),
        ({}, {"name": "../x"}, "a name becomes a folder"),
        ({}, {"steps": 0}, "stage 'x': steps must be at least 1"),
        ({}, {"learning_rate": -1}, "stage 'x': learning_rate must be above 0"),
        ({}, {"warmup_share": 2}, "stage 'x': warmup_share"),
        ({}, {"lora_rank": 0}, "lora_rank must be at least 1"),
        ({}, {"objective": "logits"}, "needs a teacher"),
        ({"start": "a"}, {"objective": "attention"}, "train t, qt or qtv, got all"),
        ({"attention": "rope"}, {"train": "t"}, "'x' would train nothing"),
        ({"start": "a", "hidden_size": 64}, {}, "leave out hidden_size"),
        ({"interpolation": 0.5}, {}, "interpolation must be at least 1"),
        ({"attention": "alibi", "interpolation": 2}, {}, "which alibi has not"),
    ],
)
def test_unfit_stages_are_refused_in_one_line(tmp_path, model, stage, message):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump({"model": model, "stages": [{"name": "x", **stage}]}))
    with pytest.raises(UserError) as raised:
        load_recipe(path)
    assert message.replace("'", '"') in str(raised.value).replace("'", '"')
    assert "\n" not in str(raised.value)
    path.write_text(yaml.safe_dump({"stages": [{"name": "x"}, {"name": "x"}]}))
    with pytest.raises(UserError, match="stages need names of their own, got x, x"):
        load_recipe(path)


@pytest.mark.parametrize(("train", "share"), [("t", 0.0415), ("qtv", 0.20745), ("all", 1.0)])
def test_shares_of_llama_7b(train, share):
    """The paper says 7 % and 21 %; T is stored folded here, half as large as a key projection."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CoCALlamaConfig())
    choose_parameters(model, StageRecipe("x", train=train))
    trained, every = parameter_counts(model)
    assert every == 6_738_415_616 - 32 * 4096 * 2048
    assert trained / every == pytest.approx(share, abs=5e-5)
    assert all(weight.is_meta for weight in model.parameters())
