"""From a recipe to a Transformers model: drawn, or begun from a trained one; and what of it learns.

A model that is begun from a trained one is converted where the recipe asks for another attention.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from coca_attention.errors import UserError
from coca_attention.models import AlibiGPTNeoXConfig, CoCAGPTNeoXConfig, CoCALlamaConfig
from coca_attention.models.alibi import AlibiGPTNeoXForCausalLM
from coca_attention.models.conversion import convert
from coca_attention.models.decoder import CollinearForCausalLM
from coca_attention.models.loading import load_model
from coca_attention.models.scaling import set_rotary_scaling
from coca_attention.ops import FORMS
from coca_attention.training.blocks import check_separable
from coca_attention.training.recipe import ModelRecipe, Recipe, StageRecipe

# Modules of an attention layer that learn, by what a stage says it trains.
LEARNING = {
    "t": ("t_proj", "t_norm"),
    "qt": ("q_proj", "q_norm", "t_proj", "t_norm"),
    "qtv": ("q_proj", "q_norm", "t_proj", "t_norm", "v_proj"),
}


CALIBRATION_TOKENS = 8192


def make_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, blocks: Dataset
) -> PreTrainedModel:
    """The model that a recipe's training begins with, in float32.

    Args:
        recipe: The recipe.
        tokenizer: Its tokenizer.
        blocks: The run's blocks; T projections are calibrated on some of them.

    Raises:
        UserError: If ``model.start`` cannot be loaded or converted, or does not fit the recipe.
    """
    if recipe.model.start is None:
        model: Any = AutoModelForCausalLM.from_config(
            model_config(recipe, len(tokenizer), tokenizer.eos_token_id)
        )
    else:
        model = _started(recipe.model, recipe.model.start, len(tokenizer), blocks)
        _extend(model, recipe)
    if recipe.model.interpolation is not None:
        set_rotary_scaling(model, "linear", factor=recipe.model.interpolation)
    if recipe.data.separate_documents:
        check_separable(model)
    return model


def attention_of(model: PreTrainedModel) -> str:
    """How a model attends, in a recipe's words: a form of CoCA, ``alibi`` or ``rope``."""
    if isinstance(model, CollinearForCausalLM):
        return model.config.coca_form
    return "alibi" if isinstance(model, AlibiGPTNeoXForCausalLM) else "rope"


def _started(recipe: ModelRecipe, start: str, vocab_size: int, blocks: Dataset) -> PreTrainedModel:
    model = load_model(start, device="cpu")
    entries: int = model.config.get_text_config().vocab_size
    if vocab_size > entries:
        raise UserError(
            f"the tokenizer has {vocab_size} entries and {start} has embeddings for {entries}: "
            "leave data.tokenizer out to take the model's own"
        )
    found, wanted = attention_of(model), recipe.attention
    if found != wanted:
        if found != "rope" or wanted not in FORMS:
            raise UserError(
                f"{start} has the attention {found}, which cannot become {wanted}: set "
                f"model.attention to {found}, or start from a rotary model"
            )
        read = _spread(blocks) if recipe.init == "calibrated" else None
        convert(model, wanted, init=recipe.init, calibration=read)  # pyright: ignore
    return model


def _spread(blocks: Any) -> Tensor:
    """Token ids of blocks from all over the text, some thousands of tokens."""
    count = min(len(blocks), max(CALIBRATION_TOKENS // len(blocks[0]["input_ids"]), 1))
    return torch.stack([blocks[i * len(blocks) // count]["input_ids"] for i in range(count)])


def _extend(model: PreTrainedModel, recipe: Recipe) -> None:
    """Let the configuration of a started model know a longer training length."""
    config: Any = model.config.get_text_config()
    known, length = getattr(config, "max_position_embeddings", None), recipe.data.block_length
    if known is not None and length > known:
        if recipe.model.interpolation is None:
            raise UserError(
                f"{recipe.model.start} was trained on {known} tokens and block_length is {length}: "
                f"set model.interpolation, for example to {length / known:g}, or use shorter blocks"
            )
        config.max_position_embeddings = length


def choose_parameters(model: PreTrainedModel, stage: StageRecipe) -> Any:
    """Let only the parameters learn that a stage names.

    Args:
        model: Changed in place.
        stage: For ``lora``, adapters are drawn by PyTorch's generator.

    Returns:
        The model; for ``lora`` wrapped by PEFT.

    Raises:
        UserError: If the model has no such parameters.
    """
    if stage.train == "all":
        return model.requires_grad_(True)
    if stage.train == "lora":
        from peft import LoraConfig, get_peft_model

        rank = stage.lora_rank
        return get_peft_model(
            model,
            LoraConfig(
                r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
        )
    model.requires_grad_(False)
    learning = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in LEARNING[stage.train]
    ]
    for module in learning:
        module.requires_grad_(True)
    if not learning:
        raise UserError(
            f"stage {stage.name!r} would train nothing: a {type(model).__name__} has no "
            f"{' or '.join(LEARNING[stage.train])}"
        )
    return model


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """How many numbers learn, and how many there are."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)


def model_config(recipe: Recipe, vocab_size: int, end_of_text: Any = None) -> PretrainedConfig:
    """Transformers configuration of a recipe's model.

    Args:
        recipe: The recipe.
        vocab_size: Entries of the tokenizer.
        end_of_text: Token id that starts and ends documents.
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
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_base}
    if model.body == "llama":
        common["num_key_value_heads"] = model.num_key_value_heads
        if model.attention == "rope":
            return LlamaConfig(**common, rope_parameters=rope)
        return CoCALlamaConfig(**common, rope_parameters=rope, coca_form=model.attention)
    rope["partial_rotary_factor"] = 1.0
    if model.attention == "rope":
        return GPTNeoXConfig(**common, rope_parameters=rope)
    if model.attention == "alibi":
        return AlibiGPTNeoXConfig(**common)
    return CoCAGPTNeoXConfig(**common, rope_parameters=rope, coca_form=model.attention)
