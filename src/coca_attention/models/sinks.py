"""Attention with sinks for models of Transformers whose own implementation of it is `eager`.

GraniteSWA has a learned score per head for attending to nothing: a window and a sink for each
layer, which vLLM, SGLang and llama.cpp run, too. Transformers has no `sdpa` attention for it.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from coca_attention.ops import attend
from coca_attention.ops.opaque import compiling

SINKS = "sinks"
"""Name of the attention implementation, as for ``attn_implementation`` in Transformers."""


def use_fused_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Let a model with sinks compute attention through SDPA in place of `eager`.

    Args:
        model: A model; others than GraniteSWA stay as they are. What it saves is the same.

    Returns:
        The model.
    """
    config: PreTrainedConfig = model.config
    if config.model_type == "granite_swa" and config._attn_implementation == "eager":
        model.set_attn_implementation(SINKS)
    return model


def sink_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    s_aux: Tensor,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention with a sink per head, `s_aux` (H,), for Transformers' `AttentionInterface`."""
    causal = attention_mask is None  # and within the window; otherwise the mask says all
    output = attend(
        query,
        key,
        value,
        attention_mask=attention_mask,
        is_causal=causal,
        window=sliding_window if causal else None,
        scale=scaling,
        dropout=dropout,
        sinks=s_aux,
    )
    return output.transpose(1, 2).contiguous(), None


def sink_mask(**made: Any) -> Tensor | None:
    """None if the queries are the last tokens, without padding; otherwise that of `sdpa`."""
    mask, first = made.get("attention_mask"), made["q_offset"]
    last = made["kv_offset"] + made["kv_length"] - made["q_length"]
    padded = mask is not None and (compiling() or not mask.all())
    skips = made.get("allow_is_causal_skip", True) and isinstance(first, int) and first == last
    made["allow_is_causal_skip"] = False
    return None if skips and not padded else sdpa_mask(**made)
