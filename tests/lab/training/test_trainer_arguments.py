"""Fields of TrainingArguments: each takes effect in `training.trainer`, or is refused."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import transformers
from transformers import Trainer, TrainingArguments, training_args
from transformers.integrations import integration_utils

from coca_attention.errors import UserError
from coca_lab.recipe import Recipe
from coca_lab.recipe_sections import TrainingRecipe
from coca_lab.training import train
from coca_lab.training.arguments import FREE, INSTEAD, training_arguments
from coca_lab.training.precision import with_precision
from runs import changed, recipe, weights

NAMES = [item.name for item in fields(TrainingArguments)]
PRESENT = [name for name in FREE if name in NAMES]


def arguments(trainer, **settings):
    made = Recipe(training=TrainingRecipe(trainer=trainer, **settings))
    made = with_precision(made, Path("unused"))
    return training_arguments(made, *made.schedules, Path("unused"))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FREE])
def test_a_field_that_is_not_free_is_refused_with_its_name(name):
    """Also the default, and the next one that Transformers adds."""
    with pytest.raises(UserError, match=rf"training\.trainer.*\b{name}\b"):
        arguments({name: getattr(TrainingArguments("unused"), name)})


@pytest.mark.parametrize("name", INSTEAD)
def test_what_the_recipe_sets_is_said_with_its_field(name):
    if name not in NAMES:
        pytest.skip(f"Transformers {transformers.__version__} has no {name}")
    with pytest.raises(UserError, match=rf"sets {name} itself; set {re.escape(INSTEAD[name])}$"):
        arguments({name: None})
    last = INSTEAD[name].rpartition(" ")[2].removeprefix("training.")
    known = {item.name for item in fields(TrainingRecipe)} | {"--output", "validation.every"}
    assert last in known


def test_a_name_that_does_not_exist_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="has no field optimm; did you mean optim"):
        arguments({"optimm": "sgd"})


# What is free has an effect


@pytest.mark.parametrize(
    "name", [name for name in PRESENT if name != "gradient_checkpointing_kwargs"]
)
def test_transformers_reads_what_is_free(name):
    sources = (inspect.getsource(each) for each in (Trainer, training_args, integration_utils))
    assert any(re.search(rf"\b(args|self)\.{name}\b", source) for source in sources)


WEIGHTS = {
    "optim": ({"optim": "sgd"}, {}),
    "optim_args": ({"optim": "sgd", "optim_args": "momentum=0.9"}, {"optim": "sgd"}),
    "adam_epsilon": ({"adam_epsilon": 0.1}, {}),
    "neftune_noise_alpha": ({"neftune_noise_alpha": 5.0}, {}),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_changes_a_step_changes_the_weights(text_folder, tmp_path, name):
    runs = []
    for number, trainer in enumerate(WEIGHTS[name]):
        made = recipe(text_folder, training__steps=3, validation__every="null")
        made.training.trainer = trainer
        runs.append(weights(train(made, tmp_path / str(number))))
    assert changed(*runs)


def test_what_needs_another_setting_is_refused_without_it():
    values = {
        "torch_compile_backend": "eager", "torch_compile_mode": "default",
        "activation_checkpointing_kwargs": {"use_reentrant": False},
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "fsdp_config": {"fsdp_version": 2},
    }  # fmt: skip
    assert set(values) == {name for name, needs in FREE.items() if needs}
    for name in [name for name in values if name in NAMES]:
        with pytest.raises(UserError, match=rf"{name} has no effect without .*{FREE[name][:5]}"):
            arguments({name: values[name]})
    on = arguments(
        {"torch_compile_mode": "default", "torch_compile_backend": "eager"}, compile=True
    )
    assert (on.torch_compile_mode, on.torch_compile_backend) == ("default", "eager")
    names = [name for name in NAMES if name.endswith("checkpointing_kwargs")]
    for name in names:  # the second is another name of the first
        kept = arguments({name: values[name]}, gradient_checkpointing=True)
        assert getattr(kept, names[0])["use_reentrant"] is False


def test_an_optimizer_that_ignores_a_setting_says_so():
    """AdamW has no arguments of its own, and plain descent no epsilon."""
    with pytest.raises(UserError, match=r"adamw_torch.* has no use for optim_args"):
        arguments({"optim_args": "momentum=0.9"})
    with pytest.raises(UserError, match="sgd has no use for adam_epsilon"):
        arguments({"optim": "sgd", "adam_epsilon": 0.1})
    arguments({"optim": "sgd", "adam_epsilon": 1e-8})  # the default, which says nothing


def test_settings_of_fsdp_are_taken_and_the_recipe_is_left_as_it_is():
    trainer = {"fsdp": True, "fsdp_config": {"fsdp_version": 1}}
    assert arguments(trainer).fsdp_plugin_args["fsdp_version"] == 1
    assert trainer == {"fsdp": True, "fsdp_config": {"fsdp_version": 1}}
