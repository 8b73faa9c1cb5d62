"""Recipes: the committed ones, overrides, what is rejected, and the model that each configures."""

import re
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from coca_attention.errors import UserError
from coca_attention.models.configuration import attention_of, rotation
from coca_attention.ops import FORMS
from coca_lab.recipe import DataRecipe, ModelRecipe, Recipe
from coca_lab.recipe_sections import TrainingRecipe
from coca_lab.studies import load_study
from coca_lab.training import as_yaml, load_recipe
from coca_lab.training.arguments import training_arguments
from coca_lab.training.model import _load_start, model_config
from coca_lab.training.precision import with_precision
from coca_lab.training.trainer import learning_rate_share
from families import vanilla

RECIPES = Path(__file__).parents[3] / "recipes"


def test_every_committed_recipe_loads():
    found = sorted(RECIPES.glob("*.yaml"))
    assert len(found) >= 3
    for path in found:
        recipe = with_precision(load_recipe(path), Path("unused"))
        for settings in recipe.schedules:
            training_arguments(recipe, settings, Path("unused"))


def test_the_recommended_recipe_is_the_one_that_the_study_ran(tmp_path):
    """`results/retrieval` says how often it learns: of nothing else."""
    trials = load_study("retrieval").trials(tmp_path)
    (ran,) = [x.recipe for x in trials if (x.name, x.seed) == ("cohere 8 x 4000", 0)]
    written = {"save_every", "keep_checkpoints", "report_to"}
    recipe = load_recipe(RECIPES / "native-1m.yaml")
    kept = {name: value for name, value in asdict(recipe.training).items() if name in written}
    ran = ran.changed("training", **kept)
    assert asdict(recipe) == asdict(ran)


def test_the_papers_llama_recipes_say_what_the_paper_says():
    """Section 3.3 and App. B.4: 15,000 steps a stage of 7.5 billion tokens, 6,000 steps of PI."""
    stages = load_recipe(RECIPES / "llama-7b-three-stages.yaml")
    assert [stage.train for stage in stages.stages] == ["t", "qtv", "all"]
    for stage, settings in zip(stages.stages, stages.schedules, strict=True):
        assert (settings.steps, settings.global_batch_size) == (15000, 32 * 8)
        assert stage.objective == "next_token"
    assert stages.data.block_length == 2048
    pi = load_recipe(RECIPES / "llama-7b-pi-32k.yaml")
    assert (pi.model.interpolation, pi.data.block_length) == (16, 32768)
    assert (pi.training.steps, pi.training.global_batch_size) == (6000, 32)
    assert (pi.training.learning_rate, pi.training.final_share) == (2e-5, 1.0)


@pytest.mark.parametrize(
    ("name", "attention", "rows_per_pair"),
    [("roformer", "rope", 3), ("coca", "slack", 2.5), ("alibi", "alibi", 3)],
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


def test_defaults_are_the_papers_and_the_rate_rises_from_1e_7_and_falls_to_a_tenth():
    training = load_recipe(None, ["--training.steps", "1000"]).training
    assert (training.beta1, training.beta2) == (0.9, 0.95)
    assert Recipe().data.block_length == 512
    rates = [learning_rate_share(step, training) * 1e-4 for step in range(1000)]
    assert rates[0] == pytest.approx(1e-7)
    assert max(rates) == rates[10] == pytest.approx(1e-4)
    assert rates[-1] == pytest.approx(1e-5)
    rises = [b - a for a, b in pairwise(rates[:11])]
    falls = [a - b for a, b in pairwise(rates[10:])]
    assert rises == pytest.approx([rises[0]] * 10)
    assert falls == pytest.approx([falls[0]] * 989)


def test_overrides_win_over_the_file_the_rest_is_default_and_all_is_written(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("model:\n  attention: strict\ntraining:\n  steps: 5\n  seed: 3\n")
    words = ["--training.steps", "7", "--data.source=x.txt", "--data.block-length", "64"]
    recipe = load_recipe(path, [*words, "--training.trainer", '{"tf32": true}'])
    assert recipe.model == ModelRecipe("strict")
    assert (recipe.training.steps, recipe.training.seed) == (7, 3)
    assert (recipe.data.source, recipe.data.block_length) == ("x.txt", 64)
    path.write_text(as_yaml(recipe))
    assert load_recipe(path) == recipe
    assert yaml.safe_load(path.read_text())["training"]["beta2"] == 0.95


INVALID = [
    ("model.attenton=slack", r"no option --model\.attenton; did you mean --model\.attention"),
    ("model.attention=loose", "one of slack, .*, rope, alibi, own, got 'loose'"),
    ("model.attention=alibi model.body=llama", "model.body must be gpt_neox for .*alibi"),
    ("model.body=gemma3_text", "one of llama, .*, got gemma3_text; with .* own"),
    ("model.attention=alibi model.interpolation=2", "attention alibi has no interpolation"),
    ("model.attention=alibi model.layers=lg", "attention alibi has no layers"),
    ("model.num_heads=3", "multiple of num_heads"),
    ("model.hidden_size=48", "hidden_size / num_heads must be even, got 3"),
    ("model.num_key_value_heads=2", "gpt_neox has no num_key_value_heads"),
    ("model.body=llama model.num_key_value_heads=3", "must divide num_heads"),
    ("model.layers=lx", "letters l and g, got 'lx'"),
    ("model.layers=llg model.num_layers=2", "at most num_layers letters, got 'llg' for 2 layers"),
    ("model.layers=lg model.start=folder", "leave out layers"),
    ("model.start=folder model.hidden_size=64", "leave out hidden_size"),
    ("model.window=8", "window is for local layers: set layers"),
    ("model.decay=null", r"--model\.decay: expected float, got None \(see coca train --help\)"),
    ("model.decay_length=5", "decay_length 5.0 requires a decay"),
    ("model.turning_pairs=99", "turning_pairs must be at most 32"),
    ("model.near=9", "got attention slack: use rope, strict or"),
    ("model.linear=true", "linear is for new models with a shift-invariant form"),
    ("model.attention=strict model.linear=true model.layers=lg", "linear is for new models"),
    ("data.held_out=1.5", r"--data\.held-out: must be less than 1, got 1\.5"),
    ("data.source=x.npy data.held_out=0", "x.npy has token ids, which need data.tokenizer"),
    ("data.source=x.npy data.tokenizer=t", "x.npy has token ids, .* set data.held_out to 0"),
    ("data.source=x.npy model.start=m", "set data.held_out to 0"),
    ("data.tasks={passkey:0.1}", "passkeys have a field of their own: set data.passkey_share"),
    ("data.tasks={recall:0.6} data.passkey_share=0.5", "must sum to less than 1"),
    ("data.mixture={a:{source:x,weight:0.95}}", r"data\.mixture needs .* sum to 1, got 0\.95"),
    ("data.mixture={a:{weight:1}}", r"data\.mixture\.a\.source is missing"),
    (
        "data.mixture={a:{source:x}}",
        r"data\.mixture\.weight: must be greater than 0, got 0",
    ),
    ("data.mixture={a:{sauce:x}}", r"--data\.mixture\.sauce: there is no such field \(see"),
    ("data.mixture={a:{source:x,weight:1}} data.source=y", r"data\.source cannot be combined"),
    ("data.mixture={a:{source:x,weight:1}} data.max_tokens=9", r"max_tokens cannot be combined"),
    ("data.mixture={7:{source:x,weight:1}}", r"names of a mixture are text, got 7"),
    ("data.mixture={passkey:{source:x,weight:1}} data.passkey_share=0.5", "name of a task"),
    ("data.mixture={validation:{source:x,weight:1}}", "a task or validation: rename it"),
    ("validation.every=1 data.held_out=0", r"needs validation\.source.*data\.held_out is 0"),
    ("validation.passkeys=1", r"validation\.passkeys and needles are asked for"),
    ("validation.every=1 validation.lengths=[300]", "lengths are those of prompts"),
    (
        "validation.every=1 validation.passkeys=1 validation.lengths=[0]",
        r"--validation\.lengths: .* equal",
    ),
    ("training.steps=0", r"--training\.steps: must be .* equal to 1, got 0"),
    ("training.step=5", r"there is no option --training\.step;"),  # no abbreviations
    ("stages=[{name:x,train:k}]", r"--stages\.train: expected one of 't', .*, got k"),
    ("stages=[{name:x,stepz:3}]", r"--stages\.stepz: there is no such field \(see"),
    ("stages=[{name:../x}]", "stage '../x': name is also"),
    ("stages=[{name:x},{name:x}]", "stages must have different names, got x, x"),
    ("stages=[{name:x,objective:logits}]", "needs a teacher"),
    ("model.start=a stages=[{name:x,objective:attention}]", "set train to t, qt or qtv, got all"),
    ("model.attention=rope stages=[{name:x,train:t}]", "stage 'x': train t needs T projections"),
]


@pytest.mark.parametrize(("words", "message"), INVALID, ids=[words for words, _ in INVALID])
def test_invalid_recipes_are_rejected_in_one_line(words, message):
    # In YAML's flow style, a colon needs a space.
    given = ["--" + word.replace(":", ": ") for word in words.split()]
    with pytest.raises(UserError, match=message) as raised:
        load_recipe(None, given)
    assert "\n" not in str(raised.value)


def test_what_looks_wrong_and_is_not(monkeypatch):
    monkeypatch.setitem(FORMS, "mine", FORMS["slack"])
    for words in (
        "data.source=x.npy data.tokenizer=t data.held_out=0",
        "data.source=x.npy model.start=m data.held_out=0",
        "data.mixture={a:{source:x,weight:0.7500004},b:{source:y,weight:0.25}}",  # up to rounding
        "model.attention=mine",  # any registered form
    ):
        load_recipe(None, ["--" + word.replace(":", ": ") for word in words.split()])


def test_a_recipe_made_in_python_is_checked_too():
    recipe = Recipe()
    recipe.training.steps = 0
    with pytest.raises(UserError, match=r"training\.steps: must be"):
        recipe.check()


def test_lora_without_peft_is_rejected(monkeypatch):
    monkeypatch.setattr("coca_lab.recipe.find_spec", lambda name: None)
    with pytest.raises(UserError, match="stage 'x': lora needs peft"):
        load_recipe(None, ["--stages=[{name: x, train: lora}]"])


def test_the_recipes_of_the_documentation_load(tmp_path):
    page = (RECIPES.parent / "docs" / "training.md").read_text(encoding="utf-8")
    mixture, validation = re.findall(r"```yaml\n(.*?)```", page, re.S)
    for text in (mixture, validation):
        (tmp_path / "r.yaml").write_text(text)
        recipe = load_recipe(tmp_path / "r.yaml")
        assert (text is validation) == (recipe.validation.every == 100)
        assert (text is mixture) == ("code" in recipe.data.mixture)
        (tmp_path / "written.yaml").write_text(as_yaml(recipe))
        assert load_recipe(tmp_path / "written.yaml") == recipe


def test_accumulation_fills_the_batch_and_precision_is_the_recipes(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    chosen = TrainingRecipe(precision="float32", compile=True, gradient_checkpointing=True)
    recipe = Recipe(training=chosen)
    arguments = training_arguments(recipe, *recipe.schedules, tmp_path, processes=8)
    assert arguments.torch_compile and arguments.gradient_checkpointing
    assert arguments.gradient_accumulation_steps == 2  # the paper's 256 over 8 GPUs
    assert arguments.per_device_train_batch_size == 16
    assert arguments.mixed_precision == "no"


# From a recipe to the configuration of its model


BODIES = ["gpt_neox", "llama", "mistral", "qwen2", "qwen3", "granite", "phi3", "olmo2", "cohere"]
BODIES += ["glm4"]


def configured(attention, body="gpt_neox", **fields):
    """The configuration of a new model with 4 heads of 8 for blocks of 64 tokens."""
    sizes = {"hidden_size": 32, "num_layers": 5, "num_heads": 4}
    model = ModelRecipe(attention, body, **sizes, **fields)
    recipe = Recipe(model, DataRecipe(block_length=64))
    recipe.check()
    return model_config(recipe, 100)


KINDS = [("strict", 0), ("slack", 0), ("rope", 4)]


@pytest.mark.parametrize(
    ("body", "attention", "free"),
    [(body, *KINDS[index % len(KINDS)]) for index, body in enumerate(BODIES)],
)
def test_a_recipe_fits_every_body_and_gives_layers_their_roles(body, attention, free):
    config = configured(attention, body, layers="llg", window=8, decay=2.0)
    local, whole = "sliding_attention", "full_attention"
    assert config.layer_types == [local, local, whole, local, local]
    assert config.sliding_window == 8
    assert config.coca_free_pairs == {local: free, whole: 4}
    assert attention_of(config) == attention
    assert rotation(config, local).frequencies().min() > 0
    assert rotation(config, local).temperature is None
    assert not rotation(config, whole).frequencies().any()
    assert rotation(config, whole).temperature == 64
    assert (rotation(config, whole).decay, rotation(config, whole).decay_length) == (2.0, 8.0)
    assert rotation(config, local).decay is None
    assert AutoModelForCausalLM.from_config(config)(torch.arange(20)[None]).logits.isfinite().all()
    made = {x: AutoModelForCausalLM.from_config(configured(x, body)) for x in ("strict", "rope")}
    assert {x: model.config.model_type for x, model in made.items()} == {
        "strict": f"coca_{body}", "rope": body
    }  # fmt: skip


def test_each_part_can_be_switched_off_or_on_alone():
    def found(attention, **fields):
        config = configured(attention, **fields)
        whole = rotation(config, "full_attention")
        return attention_of(config), whole.turning, whole.temperature, whole.decay

    assert found("rope", layers="lg") == ("rope", 0, 64, None)
    assert found("rope", layers="lg", temperature=False) == ("rope", 0, None, None)
    assert found("strict", layers="lg", turning_pairs=4) == ("strict", 4, 64, None)
    assert found("slack", decay=2.0) == ("slack", None, None, 2.0)
    assert found("rope", decay=2.0, temperature=True) == ("rope", None, 64, 2.0)
    assert found("rope", turning_pairs=2) == ("rope", 2, None, None)
    linear = configured("strict", "llama", linear=True)
    assert linear.coca_linear and linear.layer_types == ["hybrid"] * 5


def test_distances_can_be_limited(tmp_path):
    for attention in ("rope", "strict"):
        assert rotation(configured(attention, near=16)).distance_map.near == 16
    vanilla("Llama").save_pretrained(tmp_path / "base")
    started = ModelRecipe("rope", start=str(tmp_path / "base"), near=16)
    model = _load_start(started, str(started.start))
    assert rotation(model.config).distance_map.near == 16
    model.save_pretrained(tmp_path / "limited")
    with pytest.raises(UserError, match=r"already has attention rope.*leave out"):
        _load_start(started, str(tmp_path / "limited"))
