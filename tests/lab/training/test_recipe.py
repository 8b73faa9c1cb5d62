"""Recipes: the committed ones, overrides, and what is rejected."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from coca_attention.errors import UserError
from coca_attention.ops import FORMS
from coca_lab.training import Recipe, as_yaml, load_recipe, model_config
from coca_lab.training.trainer import learning_rate_share, training_arguments

RECIPES = Path(__file__).parents[3] / "recipes"


def test_every_committed_recipe_loads():
    found = sorted(RECIPES.glob("*.yaml"))
    assert len(found) >= 3
    for path in found:
        recipe = load_recipe(path)
        for settings in [recipe.training, *(s.settings(recipe.training) for s in recipe.stages)]:
            training_arguments(settings, Path("unused"), world_size=1)


def test_the_papers_llama_recipes_say_what_the_paper_says():
    """Section 3.3 and App. B.4: 15,000 steps a stage of 7.5 billion tokens, 6,000 steps of PI."""
    stages = load_recipe(RECIPES / "llama-7b-three-stages.yaml")
    assert [stage.train for stage in stages.stages] == ["t", "qtv", "all"]
    for stage in stages.stages:
        settings = stage.settings(stages.training)
        assert (settings.steps, settings.global_batch_size) == (15000, 32 * 8)
        assert stage.objective == "next_token"
    assert stages.data.block_length == 2048
    pi = load_recipe(RECIPES / "llama-7b-pi-32k.yaml")
    assert (pi.model.interpolation, pi.data.block_length) == (16, 32768)
    assert (pi.training.steps, pi.training.global_batch_size) == (6000, 32)
    assert (pi.training.learning_rate, pi.training.final_share) == (2e-5, 1.0)


@pytest.mark.parametrize(
    ("name", "attention", "rows_per_pair"), [("roformer", "rope", 3), ("coca", "slack", 2.5)]
)
def test_the_papers_models_have_their_size(name, attention, rows_per_pair):
    """24 layers of 1024, 16 heads, length 512; counted without allocating a weight."""
    recipe = load_recipe(RECIPES / f"{name}-350m.yaml")
    assert recipe.model.attention == attention
    assert recipe.training.global_batch_size == 256
    config = model_config(recipe, 50432)
    assert config.max_position_embeddings == 512
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    parameters = {id(p): p.numel() for p in model.parameters()}
    d, layers = 1024, 24
    projections = int(rows_per_pair * d) * (d + 1) + d * (d + 1)
    feed_forward = 4 * d * (d + 1) + d * (4 * d + 1)
    norms = 2 * 2 * d
    expected = layers * (projections + feed_forward + norms) + 2 * d + 50432 * d
    assert sum(parameters.values()) == expected
    assert all(weight.is_meta for weight in model.parameters())
    assert 340e6 < expected < 356e6


def test_alibi_has_roformers_size():
    counts = []
    for name in ("alibi", "roformer"):
        config = model_config(load_recipe(RECIPES / f"{name}-350m.yaml"), 50432)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        counts.append(sum(p.numel() for p in model.parameters()))
    assert counts[0] == counts[1]


def test_defaults_are_the_papers():
    training = Recipe().training
    assert (training.beta1, training.beta2) == (0.9, 0.95)
    assert (training.learning_rate, training.initial_learning_rate) == (1e-4, 1e-7)
    assert (training.warmup_share, training.final_share) == (0.01, 0.1)
    assert Recipe().data.block_length == 512


def test_the_schedule_rises_from_1e_7_and_falls_to_a_tenth():
    training = load_recipe(None, ["--training.steps", "1000"]).training
    rates = [learning_rate_share(step, training) * 1e-4 for step in range(1000)]
    assert rates[0] == pytest.approx(1e-7)
    assert max(rates) == rates[10] == pytest.approx(1e-4)
    assert rates[-1] == pytest.approx(1e-5)
    rises = [b - a for a, b in pairwise(rates[:11])]
    falls = [a - b for a, b in pairwise(rates[10:])]
    assert rises == pytest.approx([rises[0]] * 10)
    assert falls == pytest.approx([falls[0]] * 989)


def test_overrides_win_over_the_file_and_the_rest_is_default(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("model:\n  attention: strict\ntraining:\n  steps: 5\n  seed: 3\n")
    recipe = load_recipe(path, ["--training.steps", "7", "--data.source=x.txt"])
    assert recipe.model.attention == "strict"
    assert (recipe.training.steps, recipe.training.seed) == (7, 3)
    assert recipe.data.source == "x.txt"
    assert load_recipe(path, ["--data.block-length", "64"]).data.block_length == 64
    assert recipe.model.num_layers == Recipe().model.num_layers


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data.held_out=0", "x.npy has token ids, which need data.tokenizer"),
        ("--data.tokenizer=t", "x.npy has token ids, not documents.* set data.held_out to 0"),
        ("--model.start=m", "set data.held_out to 0"),
        ("--data.tokenizer=t --data.held_out=0", None),
        ("--model.start=m --data.held_out=0", None),
    ],
)
def test_token_ids_need_a_tokenizer_and_have_no_documents(words, message):
    given = ["--data.source=x.npy", *words.split()]
    if message is None:
        load_recipe(None, given)
        return
    with pytest.raises(UserError, match=message):
        load_recipe(None, given)


def test_the_written_recipe_reads_back_equal(tmp_path):
    recipe = load_recipe(
        None, ["--model.attention", "alibi", "--training.trainer", '{"tf32": true}']
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(as_yaml(recipe))
    assert load_recipe(path) == recipe
    assert yaml.safe_load(path.read_text())["training"]["beta2"] == 0.95


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  attenton: slack\n", "attenton"),
        ("modle: {}\n", "modle"),
        ("model:\n  attention: loose\n", "one of slack, .*, rope, alibi, own, got 'loose'"),
        ("training:\n  steps: many\n", "steps"),
        (
            "training:\n  steps: 0\n",
            r"r.yaml: training\.steps: Input should be .* equal to 1, got 0",
        ),
        (
            "training:\n  final_share: 2\n",
            "final_share: Input should be less than or equal to 1, got 2",
        ),
        ("model:\n  num_heads: 3\n", "multiple of num_heads"),
        ("model:\n  hidden_size: 48\n", "hidden_size / num_heads must be even, got 3"),
        ("model:\n  attention: alibi\n  body: llama\n", "model.body must be gpt_neox for .*alibi"),
        ("model:\n  num_key_value_heads: 2\n", "num_key_value_heads requires body llama"),
        ("data:\n  held_out: 1.5\n", "held_out: Input should be less than 1, got 1.5"),
        ("model:\n  rope_base: 0\n", "model.rope_base: Input should be greater than 0"),
        ("model:\n  intermediate_size: -1\n", "intermediate_size: Input should be .* equal to 1"),
        ("model:\n  body: llama\n  num_key_value_heads: 3\n", "must divide num_heads"),
        ("training:\n  learning_rate: 0\n", "learning_rate: Input should be greater than 0"),
        ("data:\n  max_tokens: 0\n", "max_tokens: Input should be .* equal to 1"),
        ("model: [1, 2\n", "not a readable recipe"),
        ("- model\n", "a recipe has sections with fields and values"),
    ],
)
def test_invalid_recipes_are_rejected_in_one_line(tmp_path, text, message):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        load_recipe(path)
    assert "\n" not in str(raised.value)


def test_the_attention_may_be_any_registered_form(monkeypatch):
    monkeypatch.setitem(FORMS, "mine", FORMS["slack"])
    assert load_recipe(None, ["--model.attention", "mine"]).model.attention == "mine"


def test_the_recipes_of_the_documentation_load(tmp_path):
    page = (RECIPES.parent / "docs" / "training.md").read_text(encoding="utf-8")
    _body, mixture, validation = re.findall(r"```yaml\n(.*?)```", page, re.S)
    for text in (mixture, validation):
        (tmp_path / "r.yaml").write_text(text)
        recipe = load_recipe(tmp_path / "r.yaml")
        assert (text is validation) == (recipe.validation.every == 100)
        assert (text is mixture) == ("code" in recipe.data.mixture)
        (tmp_path / "written.yaml").write_text(as_yaml(recipe))
        assert load_recipe(tmp_path / "written.yaml") == recipe


def test_a_missing_recipe_and_an_unknown_option_are_rejected():
    with pytest.raises(ValueError, match="no such recipe"):
        load_recipe("nowhere.yaml")
    with pytest.raises(ValueError, match=r"training\.stepz"):
        load_recipe(None, ["--training.stepz", "5"])
    with pytest.raises(ValueError, match=r"training\.step"):  # no abbreviations
        load_recipe(None, ["--training.step", "5"])


def test_batch_sizes_must_divide_and_trainer_fields_must_be_known(tmp_path):
    training = load_recipe(None, ["--training.global_batch_size", "100"]).training
    with pytest.raises(ValueError, match="must be a multiple of micro_batch_size"):
        training_arguments(training, tmp_path, world_size=3)
    training = load_recipe(None, ["--training.trainer", '{"no_such_field": 1}']).training
    with pytest.raises(ValueError, match="no_such_field"):
        training_arguments(training, tmp_path, world_size=1)
    training = load_recipe(None, ["--training.trainer", '{"seed": 1}']).training
    with pytest.raises(ValueError, match="repeats what the recipe sets itself: seed"):
        training_arguments(training, tmp_path, world_size=1)


def test_accumulation_fills_the_global_batch(tmp_path):
    training = load_recipe(None, []).training
    arguments = training_arguments(training, tmp_path, world_size=8)
    assert arguments.gradient_accumulation_steps == 2  # the paper's 256 over 8 GPUs
    assert arguments.per_device_train_batch_size == 16
