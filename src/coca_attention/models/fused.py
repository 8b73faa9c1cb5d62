"""Attention of Transformers' own models in blocks, where its implementation forms all scores.

Under `sdpa` a layer with a window has a mask of every query and key, and computes what it hides.
GraniteSWA has a learned score per head for attending to nothing, too, a sink, for which
Transformers has `eager` alone: of a text of 16,384 tokens it keeps more than 11 GB of scores.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import sdpa_mask

from coca_attention.errors import check_is_loaded
from coca_attention.models.configuration import GLOBAL, LOCAL, layer_types, own_window
from coca_attention.models.layer_pass import Band
from coca_attention.ops import attend
from coca_attention.ops.attention import in_blocks
from coca_attention.ops.opaque import compiling
from coca_attention.ops.sight import Sight

FUSED = "fused"
"""Name of the attention implementation, as for ``attn_implementation`` in Transformers."""


def use_fused_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Let a model of Transformers with windows or sinks compute attention in blocks.

    Args:
        model: A model. GraniteSWA changes from `eager`, and on a CPU one with windows from `sdpa`;
            others stay as they are. What it saves is the same.

    Returns:
        The model.

    Raises:
        UserError: For a path or a name in place of a model.
    """
    check_is_loaded(model)
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
    module: Any,
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
    segments = window = None
    is_causal = isinstance(attention_mask, Band)
    if isinstance(attention_mask, Band):
        segments, window = attention_mask
        attention_mask = None
    if s_aux is None:
        output = attend(
            query,
            key,
            value,
            attention_mask=attention_mask,
            is_causal=is_causal,
            window=window,
            segments=segments,
            scale=scaling,
            dropout=dropout,
        )
        return output.transpose(1, 2).contiguous(), None
    # Here, because earlier versions of Transformers have no GraniteSWA.
    from transformers.models.granite_swa.modeling_granite_swa import eager_attention_forward

    sight = Sight(
        queries=query.shape[-2],
        keys=key.shape[-2],
        mask=attention_mask,
        segments=segments,
        is_causal=is_causal,
        window=window,
        device=query.device,
    )

    def block(start: int, rows: Tensor) -> Tensor:
        """The `eager` attention of GraniteSWA for some queries, (B, H, t, D)."""
        seen, mask = sight.of(start, start + rows.shape[-2])
        if mask is not None and mask.dtype == torch.bool:
            # Half of the lowest number, so that its sum with a score is finite in float16.
            hidden = torch.finfo(query.dtype).min / 2
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, hidden)
        output, _ = eager_attention_forward(
            module, rows, key[..., seen, :], value[..., seen, :], mask, scaling, dropout
        )
        return output.transpose(1, 2)

    # Under torch.compile blocks would make a graph of their own for every length.
    output = block(0, query) if compiling() else in_blocks(block, query, window)
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
