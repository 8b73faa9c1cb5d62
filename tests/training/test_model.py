"""Recipes with local and global layers."""

import pytest

from coca_attention.errors import UserError
from coca_attention.models.configuration import attention_of, rotation
from coca_attention.training.model import model_config
from coca_attention.training.recipe import Recipe
from coca_attention.training.sections import DataRecipe, ModelRecipe


@pytest.mark.parametrize("body", ["gpt_neox", "llama"])
@pytest.mark.parametrize(("attention", "free"), [("strict", 0), ("slack", 0), ("rope", 4)])
def test_a_recipe_gives_layers_their_roles(body, attention, free):
    sizes = {"hidden_size": 32, "num_layers": 5, "num_heads": 4}
    model = ModelRecipe(attention, body, **sizes, layers="llg", window=8)
    model.check()
    config = model_config(Recipe(model, DataRecipe(block_length=64)), 100)
    local, whole = "sliding_attention", "full_attention"
    assert config.layer_types == [local, local, whole, local, local]
    assert config.sliding_window == 8
    assert config.coca_free_pairs == {local: free, whole: 4}
    assert attention_of(config) == attention
    assert rotation(config, local).frequencies().min() > 0
    assert rotation(config, local).temperature is None
    assert not rotation(config, whole).frequencies().any()
    assert rotation(config, whole).temperature == 64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": "lx"}, "letters l and g, got 'lx'"),
        ({"layers": "lg", "window": 0}, "window must be at least 1"),
        ({"layers": "lg", "attention": "alibi"}, "layers requires a score form or rope"),
        ({"layers": "lg", "start": "folder"}, "leave out layers"),
    ],
)
def test_invalid_roles_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        ModelRecipe(**fields).check()
