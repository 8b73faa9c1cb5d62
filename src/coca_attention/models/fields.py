"""What the fields of a Transformers configuration say, read without Transformers."""

from typing import Any

LOCAL, GLOBAL = "sliding_attention", "full_attention"
"""Transformers' names for layers that see a window, and for layers that see the whole text."""


def rope_parameters(config: Any, layer_type: str | None = None) -> dict[str, Any]:
    """The rotary parameters of a configuration, of one layer type if they differ (Gemma 3)."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope and all(value is None or isinstance(value, dict) for value in rope.values()):
        rope = rope.get(layer_type or GLOBAL) or {}
    return rope


def layer_types(config: Any) -> list[str]:
    """The type of every layer: in a family without types but with a window (Mistral), `LOCAL`."""
    # Files of other families can name a window, which these ignore.
    known = getattr(type(config), "__dataclass_fields__", vars(config))
    kind = LOCAL if "sliding_window" in known and config.sliding_window else GLOBAL
    return list(getattr(config, "layer_types", None) or [kind] * config.num_hidden_layers)


def window_of(config: Any, layer_type: str | None = None) -> int | None:
    """Tokens that a query sees in layers of a type, its own included; None for all."""
    kinds = {layer_type} if layer_type else set(layer_types(config))
    return config.sliding_window if kinds == {LOCAL} else None


def free_pairs(config: Any, layer_type: str | None = None) -> int:
    """Free pairs F of a CoCA model's heads in layers of a type."""
    given = config.coca_free_pairs
    return given.get(layer_type or GLOBAL, 0) if isinstance(given, dict) else given


def attention_of(config: Any) -> str | None:
    """The name of a CoCA model's score form, ``rope``, ``alibi``, or None for any other model.

    A CoCA model whose pairs are all free is a rotary one.
    """
    if hasattr(config, "coca_form"):
        kinds = set(getattr(config, "layer_types", None) or (GLOBAL,))
        pairs = head_width(config) // 2
        return "rope" if all(free_pairs(config, k) == pairs for k in kinds) else config.coca_form
    if config.model_type == "alibi_gpt_neox" or getattr(config, "alibi", False):
        return "alibi"
    return "rope" if getattr(config, "rope_parameters", None) else None


def training_length(config: Any) -> int | None:
    """L, the longest text that a model was trained to read, in tokens; None if it does not say.

    With a rotary rule that is the length that training went on to with the rule (Llama 3.1:
    131,072), not `original_length`.
    """
    return getattr(config, "max_position_embeddings", None) or original_length(config)


def original_length(config: Any) -> int | None:
    """The length in tokens that a rotary rule scales from; without a rule, the training length."""
    given = rope_parameters(config).get("original_max_position_embeddings")
    return given or getattr(config, "max_position_embeddings", None)


def head_width(config: Any) -> int:
    """Head width D."""
    given = getattr(config, "head_dim", None)
    return given or config.hidden_size // config.num_attention_heads
