"""From a recipe to an untrained Transformers model."""

from typing import Any

from transformers import GPTNeoXConfig, LlamaConfig, PretrainedConfig

from coca_attention.models import AlibiGPTNeoXConfig, CoCAGPTNeoXConfig, CoCALlamaConfig
from coca_attention.training.recipe import Recipe


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
