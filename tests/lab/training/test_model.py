"""From a recipe to the configuration of its model: roles of layers, decay, limited distances."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from coca_attention.errors import UserError
from coca_attention.models.configuration import attention_of, rotation
from coca_lab.recipe import DataRecipe, ModelRecipe, Recipe
from coca_lab.training.model import _load_start, model_config
from families import vanilla

BODIES = ["gpt_neox", "llama", "mistral", "qwen2", "qwen3", "granite", "phi3", "olmo2", "cohere"]
BODIES += ["glm4"]


def configured(attention, body="gpt_neox", **fields):
    """The configuration of a new model with 4 heads of 8 for blocks of 64 tokens."""
    sizes = {"hidden_size": 32, "num_layers": 5, "num_heads": 4}
    model = ModelRecipe(attention, body, **sizes, **fields)
    model.check()
    return model_config(Recipe(model, DataRecipe(block_length=64)), 100)


KINDS = [("strict", 0), ("slack", 0), ("rope", 4)]


@pytest.mark.parametrize(
    ("body", "attention", "free"),
    [(body, *KINDS[index % len(KINDS)]) for index, body in enumerate(BODIES)],
)
def test_a_recipe_gives_layers_their_roles(body, attention, free):
    config = configured(attention, body, layers="llg", window=8)
    local, whole = "sliding_attention", "full_attention"
    assert config.layer_types == [local, local, whole, local, local]
    assert config.sliding_window == 8
    assert config.coca_free_pairs == {local: free, whole: 4}
    assert attention_of(config) == attention
    assert rotation(config, local).frequencies().min() > 0
    assert rotation(config, local).temperature is None
    assert not rotation(config, whole).frequencies().any()
    assert rotation(config, whole).temperature == 64
    assert (rotation(config, whole).decay, rotation(config, whole).decay_length) == (1.0, 8.0)
    assert rotation(config, local).decay is None
    assert AutoModelForCausalLM.from_config(config)(torch.arange(20)[None]).logits.isfinite().all()


@pytest.mark.parametrize("body", BODIES)
def test_a_form_fits_every_body(body):
    model = AutoModelForCausalLM.from_config(configured("strict", body))
    assert attention_of(model.config) == "strict" and model.config.model_type == f"coca_{body}"
    assert AutoModelForCausalLM.from_config(configured("rope", body)).config.model_type == body


def test_each_part_can_be_switched_off_or_on_alone():
    def found(attention, **fields):
        config = configured(attention, **fields)
        whole = rotation(config, "full_attention")
        return attention_of(config), whole.turning, whole.temperature, whole.decay

    assert found("rope", layers="lg", decay=0.0) == ("rope", 0, 64, None)
    assert found("rope", layers="lg", temperature=False) == ("rope", 0, None, 1.0)
    assert found("strict", layers="lg", turning_pairs=4) == ("strict", 4, 64, 1.0)
    assert found("slack", decay=2.0) == ("slack", None, None, 2.0)
    assert found("rope", decay=2.0, temperature=True) == ("rope", None, 64, 2.0)
    assert found("rope", turning_pairs=2) == ("rope", 2, None, None)


def test_attention_can_be_linear():
    config = configured("strict", "llama", linear=True)
    assert config.coca_linear and config.layer_types == ["hybrid"] * 5


def test_distances_can_be_limited(tmp_path):
    for attention in ("rope", "strict"):
        assert rotation(configured(attention, max_distance=16)).max_distance == 16
    vanilla("Llama").save_pretrained(tmp_path / "base")
    started = ModelRecipe("rope", start=str(tmp_path / "base"), max_distance=16)
    model = _load_start(started, str(started.start))
    assert rotation(model.config).max_distance == 16
    model.save_pretrained(tmp_path / "limited")
    with pytest.raises(UserError, match=r"already has attention rope.*leave out"):
        _load_start(started, str(tmp_path / "limited"))
