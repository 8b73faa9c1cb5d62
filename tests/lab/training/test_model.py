"""Recipes with local and global layers."""

import pytest

from coca_attention.errors import UserError
from coca_attention.models.configuration import attention_of, rotation
from coca_lab.training.model import _load_start, model_config
from coca_lab.training.recipe import DataRecipe, ModelRecipe, Recipe
from families import vanilla


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
    assert (rotation(config, whole).decay, rotation(config, whole).decay_length) == (1.0, 8.0)
    assert rotation(config, local).decay is None


def test_each_part_can_be_switched_off_or_on_alone():
    sizes = {"hidden_size": 32, "num_layers": 3, "num_heads": 4}
    data = DataRecipe(block_length=64)

    def found(attention, **fields):
        model = ModelRecipe(attention, **sizes, **fields)
        model.check()
        config = model_config(Recipe(model, data), 100)
        whole = rotation(config, "full_attention")
        return attention_of(config), whole.turning, whole.temperature, whole.decay

    assert found("rope", layers="lg", decay=0.0) == ("rope", 0, 64, None)
    assert found("rope", layers="lg", temperature=False) == ("rope", 0, None, 1.0)
    assert found("strict", layers="lg", turning_pairs=4) == ("strict", 4, 64, 1.0)
    assert found("slack", decay=2.0) == ("slack", None, None, 2.0)
    assert found("rope", decay=2.0, temperature=True) == ("rope", None, 64, 2.0)
    assert found("rope", turning_pairs=2) == ("rope", 2, None, None)


def test_distances_can_be_limited(tmp_path):
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4}
    data = DataRecipe(block_length=64)

    def limit(model, layer_type=None):
        return rotation(model_config(Recipe(model, data), 100), layer_type).max_distance

    assert limit(ModelRecipe("rope", **sizes, max_distance=16)) == 16
    assert limit(ModelRecipe("strict", **sizes, max_distance=16)) == 16
    roles = ModelRecipe("slack", **sizes, layers="lg", max_distance=16)
    assert (limit(roles, "sliding_attention"), limit(roles, "full_attention")) == (None, 16)
    vanilla("Llama").save_pretrained(tmp_path / "base")
    started = ModelRecipe("rope", start=str(tmp_path / "base"), max_distance=16)
    model = _load_start(started, str(started.start), 97)
    assert rotation(model.config).max_distance == 16
    model.save_pretrained(tmp_path / "limited")
    with pytest.raises(UserError, match=r"already has attention rope.*leave out"):
        _load_start(started, str(tmp_path / "limited"), 97)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": "lx"}, "letters l and g, at most num_layers of them, got 'lx'"),
        ({"layers": "lg", "window": 0}, "model.window: Input should be greater than or equal to 1"),
        ({"layers": "lg", "attention": "alibi"}, "attention alibi has no layers"),
        ({"layers": "lg", "start": "folder"}, "leave out layers"),
        ({"layers": "llg", "num_layers": 2}, "got 'llg' for 2 layers"),
        ({"window": 8}, "window is for local layers: set layers"),
        ({"decay_length": 5.0}, "decay_length 5.0 requires a decay"),
        ({"turning_pairs": 99}, "turning_pairs must be at most 32"),
        (
            {"attention": "alibi", "decay": 1.0},
            "attention alibi has no decay",
        ),
        ({"attention": "slack", "max_distance": 9}, "got attention slack: use rope, strict or"),
        ({"attention": "alibi", "max_distance": 9}, "attention alibi has no max_distance"),
        ({"max_distance": 0}, "max_distance: Input should be greater than or equal to 1, got 0"),
        ({"decay": -1.0}, "decay: Input should be greater than or equal to 0, got -1"),
        (
            {"layers": "lg", "decay_length": 0.0},
            "decay_length: Input should be greater than 0, got 0",
        ),
    ],
)
def test_invalid_roles_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Recipe(ModelRecipe(**fields)).check()
