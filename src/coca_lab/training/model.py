"""From a recipe to a Transformers model: new or from a trained one, and which parameters train.

A trained model is converted if the recipe asks for a different attention.
"""

import logging
from dataclasses import asdict
from typing import Any

import torch
from accelerate import PartialState
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from coca_attention.errors import UserError, did_you_mean
from coca_attention.models import METHODS, AlibiGPTNeoXConfig
from coca_attention.models.configuration import (
    attention_of,
    extension_of,
    made_for,
    role_fields,
    rope_parameters,
)
from coca_attention.models.conversion import convert
from coca_attention.models.families import decoders
from coca_attention.models.fused import use_fused_attention
from coca_attention.models.scaling import set_rotary_scaling
from coca_attention.ops import FORMS, DistanceMap
from coca_lab.loading import load_model
from coca_lab.recipe import Recipe
from coca_lab.recipe_sections import OWN, ModelRecipe, StageRecipe
from coca_lab.weights import check_finite

log = logging.getLogger(__name__)

# Modules of an attention layer to train, by a stage's setting `train`.
TRAINED = {
    "t": ("t_proj", "t_norm"),
    "qt": ("q_proj", "q_norm", "t_proj", "t_norm"),
    "qtv": ("q_proj", "q_norm", "t_proj", "t_norm", "v_proj"),
}


def make_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model that training starts from, in float32; UserError if it does not fit the recipe."""
    if recipe.model.start is None:
        config = model_config(recipe, len(tokenizer), tokenizer.eos_token_id)
        model = use_fused_attention(AutoModelForCausalLM.from_config(config))
    else:
        model = _load_start(recipe.model, recipe.model.start)
    config: Any = model.config.get_text_config()
    # What it reads already: it was made for that, extended to it, or trained on such blocks since.
    reached = [made_for(config)[0], getattr(config, "max_position_embeddings", None)]
    extended = extension_of(config)
    if extended:
        reached.append(extended["to"])
    known = max((tokens for tokens in reached if tokens), default=None)
    if recipe.model.interpolation is not None:
        # Before the length is extended: some rules record it.
        rules = [
            each.name for each in METHODS.values() if each.changes == "frequencies" and each.folder
        ]
        if recipe.model.scaling not in rules:
            raise UserError(
                f"model.scaling must be a method that changes frequencies, one of "
                f"{', '.join(rules)}; got {recipe.model.scaling}"
            )
        set_rotary_scaling(model, recipe.model.scaling, factor=recipe.model.interpolation)
    length = recipe.data.block_length
    if recipe.model.start is not None and known is not None and length > known:
        if recipe.model.interpolation is None and "distance_map" not in rope_parameters(config):
            raise UserError(
                f"{recipe.model.start} was made for {known} tokens and `block_length` is {length}: "
                f"set model.near, at most {known}, or model.interpolation, for "
                f"example to {length / known:g}, or use shorter blocks"
            )
        config.max_position_embeddings = length
    if recipe.data.separate_documents:
        check_separable(model)
    return model


def load_teacher(recipe: Recipe) -> PreTrainedModel:
    """The teacher in the dtype of its files; UserError if there is nothing to learn from it."""
    name = recipe.model.teacher or recipe.model.start
    assert name is not None  # `Recipe.check`
    teacher = load_model(name, dtype="auto", device=str(PartialState().device))
    check_finite(name, teacher)
    if recipe.model.teacher is None and attention_of(teacher.config) == recipe.model.attention:
        raise UserError(
            f"{name} already has attention {recipe.model.attention}, so there is nothing to learn "
            "from it: set model.teacher to the model that it was converted from"
        )
    return teacher


def _load_start(recipe: ModelRecipe, start: str) -> PreTrainedModel:
    model = load_model(start, device=str(PartialState().device))
    check_finite(start, model)  # or the loss would be NaN, as of a rate that is too high
    present = attention_of(model.config) or "rope"
    wanted = recipe.attention
    near = recipe.near
    if present == wanted and near is not None:
        if present != "rope" or hasattr(model.config, "coca_form"):
            raise UserError(
                f"{start} already has attention {present}, and its distances stay as they are: "
                "leave out model.near"
            )
        convert(model, "rope", near=near)
    elif present != wanted:
        if present != "rope" or wanted not in FORMS:
            raise UserError(
                f"{start} has attention {present}, which cannot be converted to {wanted}: set "
                f"model.attention to {present}, or start from a rotary model"
            )
        log.info("%s: its rotary attention becomes %s, as model.attention says", start, wanted)
        convert(model, wanted, near=near)
    return model


def choose_parameters(model: PreTrainedModel, stage: StageRecipe) -> Any:
    """The model with all parameters frozen but those that a stage trains; PEFT's for ``lora``."""
    if stage.train == "all":
        return model.requires_grad_(True)
    if stage.train == "lora":
        from peft import LoraConfig, get_peft_model  # an optional package

        rank = stage.lora_rank
        return get_peft_model(
            model,
            LoraConfig(
                r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
        )
    model.requires_grad_(False)
    names = TRAINED[stage.train]
    trained = [m for name, m in model.named_modules() if name.rpartition(".")[2] in names]
    for module in trained:
        module.requires_grad_(True)
    if not trained:
        raise UserError(
            f"stage {stage.name!r} would train nothing: {type(model).__name__} has no "
            f"{' or '.join(names)}"
        )
    return model


def model_config(recipe: Recipe, vocab_size: int, end_of_text: object = None) -> PretrainedConfig:
    """Transformers configuration of a recipe's model.

    Args:
        recipe: The recipe.
        vocab_size: Number of entries of the tokenizer.
        end_of_text: Id of the token that starts and ends documents.
    """
    model = recipe.model
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.intermediate_size or 4 * model.hidden_size,
        "max_position_embeddings": recipe.data.block_length,
        "tie_word_embeddings": model.tie_embeddings,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
    }
    if model.attention == "alibi":
        return AlibiGPTNeoXConfig(**common, **model.options)
    rope: dict[str, str | float] = {"rope_type": "default", "rope_theta": model.rope_base}
    if model.body == "gpt_neox":
        rope["partial_rotary_factor"] = 1.0
    else:
        common["num_key_value_heads"] = model.num_key_value_heads or model.num_heads
        common["head_dim"] = model.hidden_size // model.num_heads
    common |= {"rope_parameters": rope} | model.options
    if model.body not in CONFIG_MAPPING:
        raise UserError(
            f"model.body {model.body!r} is no model_type of Transformers, and no module that "
            f"COCA_IMPORT names registers it{did_you_mean(model.body, CONFIG_MAPPING)}"
        )
    vanilla = AutoConfig.for_model(model.body, **common)
    if model.attention == OWN:
        return vanilla
    length = recipe.data.block_length
    if model.layers:
        fields = role_fields(model, model.attention, vanilla, length)
    else:
        rotation: dict[str, Any] = {**model.rotation_fields(length)}
        if model.near is not None:
            rotation["distance_map"] = asdict(DistanceMap.limited(model.near))
        fields = {
            "coca_form": model.attention,
            "rope_parameters": vanilla.rope_parameters | rotation,
            "coca_linear": model.linear,
        }
    changed = fields["rope_parameters"] != vanilla.rope_parameters
    if model.attention == "rope" and not model.layers and not changed:
        return vanilla
    return decoders()[model.body].config(**common | fields)


@torch.no_grad()
def check_separable(model: PreTrainedModel) -> None:
    """Raise UserError if a second document is read otherwise after another first document."""
    words = torch.arange(1, 9, device=model.device) % model.config.get_text_config().vocab_size
    positions = torch.arange(4, device=model.device).repeat(1, 2)
    training = model.training
    model.eval()
    first, second = (
        model(
            input_ids=torch.cat((start, words[4:])).unsqueeze(0),
            position_ids=positions,
            use_cache=False,
        ).logits[0, 4:]
        for start in (words[:4], words[4:])
    )
    model.train(training)
    if (first - second).abs().max() > 1e-5 * second.abs().max():
        raise UserError(
            f"{type(model).__name__} does not keep documents apart: its attention reaches earlier "
            "documents of the block although positions restart. Train without "
            "data.separate_documents, or with another attention implementation"
        )
