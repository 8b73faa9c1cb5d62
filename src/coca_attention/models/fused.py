"""Attention of Transformers' own models in blocks, where its implementation forms all scores.

Under `sdpa` a layer with a window has a mask of every query and key, and computes what it hides.
GraniteSWA has a learned score per head for attending to nothing, too, for which Transformers has
`eager` alone: a window and a sink for each layer, which vLLM, SGLang and llama.cpp run.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import sdpa_mask

from coca_attention.models.configuration import GLOBAL, LOCAL, layer_types, own_window
from coca_attention.models.layer_pass import Band
from coca_attention.ops import attend
from coca_attention.ops.opaque import compiling

FUSED = "fused"
"""Name of the attention implementation, as for ``attn_implementation`` in Transformers."""


def use_fused_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Let a model of Transformers with windows or sinks compute attention in blocks.

    Args:
        model: A model. GraniteSWA changes from `eager`, and on a CPU one with windows from `sdpa`;
            others stay as they are. What it saves is the same.

    Returns:
        The model.
    """
    theirs = model.config._attn_implementation
    sinks = theirs == "eager" and model.config.model_type == "granite_swa"
    windows = (
        theirs == "sdpa"
        and model.device.type == "cpu"
        and own_window(model.config) is not None
        and set(layer_types(model.config)) in ({LOCAL}, {LOCAL, GLOBAL})
        and model._supports_attention_backend
        and not hasattr(model.config, "coca_form")  # which has this already
    )
    if sinks or windows:
        model.set_attn_implementation(FUSED)
    return model


def fused_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Band | Tensor | None,
    *,
    scaling: float,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """`attend` for Transformers' `AttentionInterface`; `s_aux` (H,) are the sinks."""
    band = attention_mask if isinstance(attention_mask, Band) else None
    output = attend(
        query,
        key,
        value,
        attention_mask=None if isinstance(attention_mask, Band) else attention_mask,
        is_causal=band is not None,
        window=None if band is None else band.window,
        segments=None if band is None else band.segments,
        scale=scaling,
        dropout=dropout,
        sinks=s_aux,
    )
    return output.transpose(1, 2).contiguous(), None


def fused_mask(**made: Any) -> Band | Tensor | None:
    """A band if the queries are the last tokens; otherwise the mask of `sdpa`."""
    first, offset, mask = made["q_offset"], made["kv_offset"], made.get("attention_mask")
    keys = offset + made["kv_length"]
    last = isinstance(first, int) and first + made["q_length"] == keys
    known = mask is None or mask.shape[-1] == keys
    plain = made.get("allow_is_causal_skip", True)  # no documents, and no mask of the model's own
    if not (last and known and plain) or torch.compiler.is_exporting():
        made["allow_is_causal_skip"] = False
        return sdpa_mask(**made)
    if mask is not None:
        mask = mask[:, offset:].long() if compiling() or not mask.all() else None
    return Band(mask, made.get("local_size"))
