"""Stages: what each trains, the order of the blocks, teachers, adapters, what is rejected."""

import json
import shutil

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from coca_attention import extend_context
from coca_attention.errors import UserError
from coca_lab.data import load_tokenizer
from coca_lab.loading import load_model
from coca_lab.recipe import StageRecipe
from coca_lab.training import BlockDataset, load_recipe, read_summary, train
from coca_lab.training.model import choose_parameters, make_model
from coca_lab.training.texts import apportion, block_order, mixture_order
from commands import run
from families import vanilla
from runs import (
    PAPER,
    TEACHER,
    TRAINING,
    AtStep,
    assert_the_same,
    changed,
    data_of,
    weights,
    write_recipe,
)


def test_each_stage_trains_what_it_names_and_leaves_an_ordinary_model(base, staged):
    _, run = staged
    first, second = (weights(run / "stages" / name) for name in ("first", "second"))
    original = weights(base)
    kept = {name for name in original if "k_proj" not in name}
    assert {name for name in first if "t_proj" not in name} == kept
    assert all(torch.equal(first[name], original[name]) for name in kept)
    assert changed(first, second) == {"q_proj", "t_proj", "v_proj"}
    third = changed(second, weights(run))
    assert {"q_proj", "t_proj", "v_proj", "o_proj", "embed_tokens", "norm", "up_proj"} <= third
    for folder in (run, run / "stages" / "first", run / "stages" / "second"):
        assert AutoModelForCausalLM.from_pretrained(folder).config.coca_form == "slack"
        assert (folder / "tokenizer.json").is_file()
    assert not (run / "stages" / "first" / "checkpoints").exists()


def test_the_summary_says_what_each_stage_did(staged):
    _, run = staged
    summary = read_summary(run)
    stages = summary["stages"]
    assert [stage["name"] for stage in stages] == ["first", "second", "third"]
    assert [stage["steps"] for stage in stages] == [6, 6, 5]
    assert summary["steps"] == 17 and summary["tokens"] == 17 * 4 * 16
    # 2 layers, hidden 16, 4 heads of 4, 2 kv_heads: T is 16 to 2 * 2, Q 16 to 16, V 16 to 8.
    assert [stage["trained"] for stage in stages[:2]] == [2 * 16 * 4, 2 * 16 * (4 + 16 + 8)]
    assert stages[2]["trained"] == stages[2]["parameters"] == summary["parameters"]
    assert stages[0]["trained_share"] == stages[0]["trained"] / summary["parameters"]
    assert [e["step"] for e in summary["curve"] if e["stage"] == "second"] == [7, 8, 10, 12]
    rates = {e["step"]: e["learning_rate"] for e in summary["curve"]}
    assert rates[8] == pytest.approx(5e-3, rel=0.2) and rates[16] == pytest.approx(1e-2)


def measured(folder, recipe):
    """Perplexity on the validation blocks, computed without the Trainer."""
    model = load_model(folder, device="cpu").eval()
    tokenizer = load_tokenizer(recipe.model.start)
    blocks = [*data_of(recipe, tokenizer).validation]
    inputs, targets = (torch.stack([b[n] for b in blocks]) for n in ("input_ids", "shift_labels"))
    assert inputs.shape == (2 * 4, 16)
    with torch.no_grad():
        logits = model(input_ids=inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).exp().item()


@pytest.fixture(scope="module")
def taught(base, text_folder, tmp_path_factory):
    """The recipe file and the folder of a run with a teacher."""
    folder = tmp_path_factory.mktemp("taught")
    sharp = shutil.copytree(base, folder / "sharp")
    # The trained one's attention is nearly uniform, so that there would be nothing to learn.
    vanilla("Llama", vocab_size=300).save_pretrained(sharp)
    stages = [{**stage, "steps": 40, "learning_rate": 3e-3} for stage in TEACHER]
    path = write_recipe(sharp, text_folder, folder / "r.yaml", stages, attention="strict")
    path.write_text(path.read_text().replace("every: 4", "every: 32"))
    return path, train(load_recipe(path), folder / "run")


@pytest.mark.parametrize("trained_by", ["staged", "taught"])
def test_validation_is_the_next_token_whatever_a_stage_minimises(request, trained_by):
    path, run = request.getfixturevalue(trained_by)
    recipe, summary = load_recipe(path), read_summary(run)
    found = {(e["stage"], e["step"]): e["perplexity"] for e in summary["validation"]}
    steps = [settings.steps for settings in recipe.schedules]
    expected, done = [], 0
    for stage, count in zip(recipe.stages, steps, strict=True):
        within = sorted({*range(0, count, recipe.validation.every), count})
        expected += [(stage.name, done + step) for step in within]
        done += count
    assert list(found) == expected
    first = recipe.stages[0].name
    assert found[first, steps[0]] == pytest.approx(
        measured(run / "stages" / first, recipe), rel=1e-5
    )
    assert found[recipe.stages[-1].name, done] == pytest.approx(measured(run, recipe), rel=1e-5)
    # A stage starts where the previous one has ended.
    assert found[recipe.stages[1].name, steps[0]] == found[first, steps[0]]
    assert summary["start"] == {
        "name": recipe.model.start.rpartition("/")[2],
        "perplexity": pytest.approx(measured(recipe.model.start, recipe), rel=1e-5),
    }


def test_no_block_is_read_twice_before_all_were_read(staged, tmp_path, monkeypatch):
    read: list[int] = []
    plain = BlockDataset.__getitem__
    monkeypatch.setattr(
        BlockDataset,
        "__getitem__",
        lambda self, index: read.append(int(index)) or plain(self, index),
    )
    path, run = staged
    unmeasured = train(load_recipe(path, ["--validation.every=null"]), tmp_path / "run")
    blocks = round(17 * 4 / read_summary(run)["epochs"])
    assert len(read) == 17 * 4
    assert blocks > 17 * 4 and len(set(read)) == len(read)  # not one pass
    assert read == block_order(blocks, 17 * 4, seed=0).tolist()
    # Measuring changes nothing in what is trained.
    assert changed(weights(unmeasured), weights(run)) == set()


def test_stages_read_a_mixture_in_its_own_order(base, text_folder, tmp_path):
    path = write_recipe(base, text_folder, tmp_path / "r.yaml", PAPER)
    content = yaml.safe_load(path.read_text())
    half = {"source": content["data"].pop("source"), "weight": 0.5}
    content["data"]["mixture"] = {"a": half, "b": dict(half)}
    path.write_text(yaml.safe_dump(content))
    recipe = load_recipe(path)
    parts = data_of(recipe, load_tokenizer(str(base))).stages
    steps = [stage.get("steps", TRAINING["steps"]) for stage in PAPER]
    assert [len(part) for part in parts] == [TRAINING["global_batch_size"] * n for n in steps]
    sizes = [len(source) for source in parts[0].dataset.datasets]
    order = mixture_order(sizes, apportion([0.5, 0.5], 4, 17), recipe.training.seed)
    assert [index for part in parts for index in part.indices] == order.tolist()


def test_the_order_of_blocks_is_one_permutation_after_the_other():
    order = block_order(10, 25, seed=3)
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert len(set(order[20:])) == 5
    assert order[:10].tolist() != order[10:20].tolist()
    assert np.array_equal(order[:7], block_order(10, 7, seed=3))
    assert not np.array_equal(order, block_order(10, 25, seed=4))


def test_learning_from_the_original(taught):
    """Both objectives fall, and the teacher itself is not touched or saved."""
    path, run = taught
    curve = read_summary(run)["curve"]
    for name in ("attention", "logits"):
        losses = [entry["loss"] for entry in curve if entry["stage"] == name]
        assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), (name, losses)
    assert changed(weights(run / "stages" / "attention"), weights(run)) > {"o_proj", "v_proj"}
    original = vanilla("Llama", vocab_size=300).state_dict()
    teacher = weights(path.parent / "sharp")
    assert all(torch.equal(weight, original[name]) for name, weight in teacher.items())
    assert not [name for name in weights(run) if "k_proj" in name or "teacher" in name]


def test_adapters_train_resume_and_are_merged(base, text_folder, tmp_path):
    """Interrupted in the stage, and after its last step, before the model is saved."""
    stages = [{"name": "adapters", "train": "lora", "lora_rank": 2}, {"name": "rest", "steps": 1}]
    path = write_recipe(base, text_folder, tmp_path / "r.yaml", stages)
    options = ["--validation.every=null"]

    class Stop(AtStep):
        def on_train_end(self, *args, **kwargs):
            raise KeyboardInterrupt

    for step in (3, -1):
        with pytest.raises(KeyboardInterrupt):
            callbacks = [Stop(step, Stop.on_train_end)]
            train(load_recipe(path, options), tmp_path / "two", callbacks=callbacks)
    run, resumed = (train(load_recipe(path, options), tmp_path / name) for name in ("one", "two"))
    assert_the_same(resumed, run)
    stage = run / "stages" / "adapters"
    model = AutoModelForCausalLM.from_pretrained(stage)
    assert not list(stage.glob("adapter*"))
    original, merged = weights(base), weights(stage)
    assert not [name for name in merged if "lora" in name]
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.linalg.matrix_rank(merged[name] - original[name], tol=1e-5) == 2
    assert torch.equal(merged["model.norm.weight"], original["model.norm.weight"])
    summary = read_summary(run)["stages"][0]
    assert summary["parameters"] == sum(p.numel() for p in model.parameters())
    assert 0 < summary["trained"] < 0.5 * summary["parameters"]


@pytest.fixture(scope="module")
def separate(base, tmp_path_factory):
    """A model whose head is its own although its configuration says that it is the embeddings."""
    folder = shutil.copytree(base, tmp_path_factory.mktemp("separate") / "start")
    model = vanilla("Llama", vocab_size=300)
    model.config.tie_word_embeddings = True
    model.save_pretrained(folder)
    assert "lm_head.weight" in weights(folder)
    return folder


SEPARATE = {
    "one": ([], {"attention": "strict"}),
    "limited": ([], {"attention": "rope", "near": 8}),
    "as it is": ([], {"attention": "rope"}),
    "two": ([{"name": "t", "train": "t"}, {"name": "all"}], {"attention": "strict"}),
    "taught": (TEACHER, {"attention": "strict"}),
    "adapters": ([{"name": "adapters", "train": "lora"}], {"attention": "rope"}),
    "adapters twice": (
        [{"name": "adapters", "train": "lora"}, {"name": "more", "train": "lora"}],
        {"attention": "strict"},
    ),
}


@pytest.mark.parametrize("kind", SEPARATE)
def test_a_separate_head_is_trained_and_saved(separate, text_folder, tmp_path, kind):
    stages, model = SEPARATE[kind]
    path = write_recipe(separate, text_folder, tmp_path / "r.yaml", stages, **model)
    recipe = load_recipe(path)

    def killed(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "run", callbacks=[AtStep(5, killed)])
    run = train(recipe, tmp_path / "run")
    assert_the_same(run, train(recipe, tmp_path / "whole"))
    for folder in (*(run / "stages" / each["name"] for each in stages[:-1]), run):
        saved = weights(folder)
        assert not AutoModelForCausalLM.from_pretrained(folder).config.tie_word_embeddings
        head, embeddings = saved["lm_head.weight"], saved["model.embed_tokens.weight"]
        assert (head - embeddings).abs().max() > 0.1
        if "adapters" in kind or folder.name in ("t", "attention"):
            assert torch.equal(head, weights(separate)["lm_head.weight"])
    summary = read_summary(run)
    assert summary["validation"][-1]["perplexity"] == pytest.approx(measured(run, recipe), rel=1e-5)
    start = summary["start"]["perplexity"]
    assert start == pytest.approx(measured(separate, recipe), rel=1e-5)
    if kind == "as it is":
        assert summary["validation"][0]["perplexity"] == pytest.approx(start, rel=1e-5)


def test_a_start_is_read_farther_without_stages(base, staged, text_folder, tmp_path):
    """By position interpolation or limited distances, for blocks longer than its own."""

    def made(start, **model):
        path = write_recipe(start, text_folder, tmp_path / "r.yaml", [], **model)
        recipe = load_recipe(path, ["--data.block_length=32"])
        config = make_model(recipe, load_tokenizer(start)).config
        assert config.max_position_embeddings == 32
        return config

    yarn = made(base, attention="rope", interpolation=2.0, scaling="yarn").rope_parameters
    expected = {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 16}
    assert yarn.items() >= expected.items()
    limited = made(base, attention="rope", near=6).rope_parameters
    assert (limited["distance_map"]["near"], limited["temperature"]) == (6, 16)
    converted = made(staged[1], interpolation=2.0)
    assert converted.coca_form == "slack"
    linear = converted.rope_parameters
    assert (linear["rope_type"], linear["factor"]) == ("linear", 2)
    # What a start reads already is read by block, too: here extended, or by Vicuna's field.
    model = extend_context(load_model(base), "yarn", to=32)
    model.save_pretrained(extended := shutil.copytree(base, tmp_path / "extended"))
    assert made(extended, attention="rope").rope_parameters == model.config.rope_parameters
    # Trained on longer blocks since: no further interpolation is asked for.
    later = load_model(extended)
    later.config.context_extension["to"] = 24
    later.save_pretrained(extended)
    assert made(extended, attention="rope").max_position_embeddings == 32
    vicuna = shutil.copytree(base, tmp_path / "vicuna")
    config = json.loads((vicuna / "config.json").read_text()) | {"max_sequence_length": 64}
    (vicuna / "config.json").write_text(json.dumps(config))
    recipe = write_recipe(vicuna, text_folder, tmp_path / "r.yaml", [], attention="rope")
    recipe = load_recipe(recipe, ["--data.block_length=32"])
    assert make_model(recipe, load_tokenizer(vicuna)).config.max_position_embeddings == 16


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ({}, ["--data.block_length", "32"], "was made for 16 tokens and `block_length` is 32"),
        ({"attention": "alibi"}, [], "has attention rope, which cannot be converted to alibi"),
        ({"start": "nowhere"}, [], "nowhere: there is no such folder"),
        ({"teacher": "nowhere"}, [], "there is no such folder here"),
        ({"start": "STAGED"}, [], "already has attention slack"),  # and teaches itself nothing
    ],
)
def test_starts_and_teachers_that_do_not_fit(
    base, staged, text_folder, tmp_path, model, options, message
):
    model = {name: str(staged[1]) if x == "STAGED" else x for name, x in model.items()}
    stages = [] if options or "attention" in model else TEACHER[:1]
    path = write_recipe(base, text_folder, tmp_path / "r.yaml", stages, **model)
    with pytest.raises(UserError, match=message):
        train(load_recipe(path, options), tmp_path / "run")


@pytest.mark.parametrize("attention", ["rope", "strict"])
@pytest.mark.parametrize("kind", ["config.json", "hf_quant_config.json"])
def test_a_quantised_start_is_refused_before_the_text_is_read(base, tmp_path, kind, attention):
    start, gptq = shutil.copytree(base, tmp_path / "start"), {"quant_method": "gptq", "bits": 4}
    content = {"quantization": {"quant_algo": "FP8"}}
    if kind == "config.json":
        content = json.loads((start / kind).read_text()) | {"quantization_config": gptq}
    (start / kind).write_text(json.dumps(content))
    path = write_recipe(start, "nowhere.txt", tmp_path / "r.yaml", [], attention=attention)
    with pytest.raises(UserError, match=r"start is quantised, .*: set model\.start to the model"):
        train(load_recipe(path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_token_without_an_embedding_is_refused_where_it_occurs(
    base, text_folder, tmp_path, capsys
):
    """CodeLlama's tokenizer has four more entries than some of its models have embeddings."""
    start = shutil.copytree(base, tmp_path / "start")
    tokenizer = load_tokenizer(base)
    tokenizer.add_tokens(["<PRE>", "<SUF>", "<MID>", "<EOT>"])
    tokenizer.save_pretrained(start)
    path = write_recipe(start, text_folder, tmp_path / "r.yaml", [{"name": "t", "train": "t"}])
    texts = shutil.copytree(text_folder, tmp_path / "texts")
    with (texts / "00.txt").open("a") as file:
        file.write(" <MID>")
    measure = ["eval", "perplexity", start, "--windows=16", "--dtype=float32"]
    commands = {
        "train": ["train", path, "--output", tmp_path / "run", "--data.source"],
        "eval": [*measure, "--output", tmp_path / "found.json", "--source"],
    }
    size = len(tokenizer)
    message = f"has token {size - 2} ('<MID>'), the tokenizer {size} entries and the model"
    for words in commands.values():
        code, _, said = run(capsys, *words, texts)
        assert code == 2 and message in said
    assert not list((tmp_path / "run").rglob("checkpoint-*"))
    for words in commands.values():
        assert run(capsys, *words, text_folder)[0] == 0
    assert run(capsys, "generate", start, "alpha", "--max-new-tokens=2")[0] == 0
    code, _, said = run(capsys, "generate", start, "alpha <MID>", "--max-new-tokens=2")
    assert code == 2 and message in said


def test_a_stage_whose_parameters_the_model_lacks_is_rejected(base):
    rotary = AutoModelForCausalLM.from_pretrained(base)
    with pytest.raises(UserError, match="stage 'x' would train nothing: LlamaForCausalLM has no"):
        choose_parameters(rotary, StageRecipe("x", train="t"))


def dtypes(weights):
    return {weight.dtype for weight in weights.values()}


def test_the_model_is_saved_in_the_dtype_of_its_start(base, text_folder, tmp_path):
    model = load_model(base, dtype="bfloat16", device="cpu")
    model.save_pretrained(tmp_path / "start", max_shard_size="5KB")
    load_tokenizer(base).save_pretrained(tmp_path / "start")
    stages = [{"name": "t", "train": "t"}, {"name": "adapters", "train": "lora"}]
    path = write_recipe(tmp_path / "start", text_folder, tmp_path / "recipe.yaml", stages)
    recipe = load_recipe(path, ["--training.steps=2", "--validation.every=null"])
    run = train(recipe, tmp_path / "run")
    assert dtypes(weights(run)) == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(run, dtype="auto").dtype == torch.bfloat16
    assert read_summary(run)["dtype"] == "bfloat16"
    # Training itself is in float32, from one stage to the next.
    assert dtypes(weights(run / "stages" / "t")) == {torch.float32}
    checkpoint = run / "stages" / "adapters" / "checkpoints" / "checkpoint-2"
    assert dtypes(load_file(checkpoint / "adapter_model.safetensors")) == {torch.float32}


def test_a_weight_that_the_dtype_cannot_hold_is_not_saved(base, text_folder, tmp_path):
    model = load_model(base, device="cpu")
    with torch.no_grad():
        model.model.embed_tokens.weight[3] = 1e6
    model.save_pretrained(tmp_path / "start")
    load_tokenizer(base).save_pretrained(tmp_path / "start")
    stages = [{"name": "t", "train": "t", "steps": 1}]
    path = write_recipe(tmp_path / "start", text_folder, tmp_path / "recipe.yaml", stages)
    recipe = load_recipe(path, ["--model.dtype", "float16", "--validation.every", "null"])
    with pytest.raises(UserError, match=r"embed_tokens.* too large for float16: set model.dtype"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "model.safetensors").exists()
    again = load_recipe(path, ["--model.dtype", "bfloat16", "--validation.every", "null"])
    run = train(again, tmp_path / "run")
    assert load_recipe(run / "recipe.yaml").model.dtype == "bfloat16"
    assert dtypes(weights(run)) == {torch.bfloat16}
    with pytest.raises(UserError, match=r"another recipe \(different: model.dtype\)"):
        train(recipe, run)


def test_the_record_has_the_steps_of_the_run_and_no_sizes_that_do_not_apply(staged):
    path, run = staged
    recorded = read_summary(run)["recipe"]
    assert [stage["steps"] for stage in recorded["stages"]] == [6, 6, 5]
    assert recorded["stages"][0]["learning_rate"] == 1e-2 and recorded["training"]["steps"] == 17
    assert recorded["model"]["attention"] == "slack" and "hidden_size" not in recorded["model"]
    text = (run / "recipe.yaml").read_text()
    assert yaml.safe_load(text) == recorded
    # Both recipes are those of the run, and so is one written before stages were filled in.
    for same in (run / "recipe.yaml", path):
        assert train(load_recipe(same), run) == run
    (run / "recipe.yaml").write_text(path.read_text())
    assert train(load_recipe(path), run) == run
    (run / "recipe.yaml").write_text(text)
