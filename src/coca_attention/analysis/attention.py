"""Attention weights of some queries of every layer, as the model computes them.

Legend: B batch, H query heads, G key/value heads, M sampled queries, T length, D head width.

What is captured are the arguments of Transformers' attention function: queries and keys after
rotation, with whatever a model adds to masks or as columns. Only the M rows of the score matrix are
computed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coca_attention.errors import UserError
from coca_attention.fields import attention_of, free_pairs, head_width
from coca_attention.models import layer_pass
from coca_attention.models.attention import CollinearAttention
from coca_attention.models.configuration import rotation

SDPA = "sdpa"


@dataclass(frozen=True)
class LayerAttention:
    """Attention weights of some queries of one layer."""

    layer: int
    """Index of the layer."""
    attention: str
    """What scores: a score form, ``rotary``, ``alibi``, ``dot product`` (no pair turns), or
    ``unknown``; a form and ``rotary``, if some pairs are free."""
    window: int | None
    """Sliding window in tokens, including the query's own; None for all."""
    weights: Tensor
    """(H, M, T), float32 or wider; 0 for keys that a query does not see."""
    visible: Tensor
    """Number of keys that each query sees, (H, M)."""


def attention_rows(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float | None,
    rows: Tensor,
    bias: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention weights of some queries, from the arguments of an attention function.

    Args:
        query: (1, H, T, D).
        key: (1, G, T, D).
        mask: Boolean (True: visible) or additive, broadcastable to (1, H, T, T); None for causal.
        scale: Multiplies the scores; None for D^-1/2.
        rows: Indices of queries, (M,).
        bias: Added to the scores of these queries, broadcastable to (1, H, M, T).
        window: Keys that a query sees if there is no mask; default: all before it.

    Returns:
        The weights (H, M, T), float32 or wider, and the number of visible keys (H, M).
    """
    wide, length = torch.promote_types(query.dtype, torch.float32), query.shape[-2]

    def of_rows(x: Tensor) -> Tensor:
        return x[0].expand(-1, length, -1)[:, rows]

    repeats = query.shape[1] // key.shape[1]
    query, key = query[0, :, rows].to(wide), key[0].to(wide).repeat_interleave(repeats, dim=0)
    scores = query @ key.transpose(-2, -1) * (scale or query.shape[-1] ** -0.5)
    if bias is not None:
        scores = scores + bias[0]
    if mask is None:
        distance = rows.unsqueeze(-1) - torch.arange(length, device=rows.device)
        visible = (distance >= 0) & (distance < (window or length))
    else:
        visible = mask = of_rows(mask)
        if mask.dtype != torch.bool:
            # Masks hide keys by the lowest number of their dtype.
            visible, scores = mask > torch.finfo(mask.dtype).min / 2, scores + mask
    visible = visible.expand_as(scores)
    return scores.masked_fill(~visible, float("-inf")).softmax(-1), visible.sum(-1)


def visit_attention(
    model: PreTrainedModel,
    input_ids: Tensor,
    rows: Tensor,
    visit: Callable[[LayerAttention], Any],
    **kwargs: Any,
) -> Any:
    """Run one forward pass and pass every layer's attention weights of some queries to a function.

    Args:
        model: A causal language model in evaluation mode.
        input_ids: (1, T), without padding.
        rows: Indices of queries, (M,).
        visit: Called once per layer, in order.
        **kwargs: Passed to the model.

    Returns:
        The model's output.

    Raises:
        UserError: If the model is in training mode, its attention does not pass through
            Transformers' attention interface, or its scores are not finite.
    """
    if model.training:
        raise UserError("the model is in training mode, with dropout: call model.eval()")
    rows = rows.to(model.device)
    layers = 0

    def look(module: Any, query: Tensor, key: Tensor, mask: Tensor | None, options: Any) -> None:
        nonlocal layers
        layers += 1
        bias = options.get("bias")
        if bias is not None:  # a function of positions, which a CoCA model passes to `attend`
            queries, keys = options["positions"]
            bias = bias(queries[:, rows], keys, torch.float32).unsqueeze(1)
        scale = options.get("scaling", options.get("scale"))
        window = options.get("window")  # instead of a mask
        weights, visible = attention_rows(query, key, mask, scale, rows, bias, window)
        if not weights.isfinite().all():
            raise UserError(
                f"layer {module.layer_idx}: attention is not finite; the model's weights are "
                "damaged, or its dtype overflows (try float32)"
            )
        kind = getattr(module, "layer_type", None)
        config: Any = model.config.get_text_config()
        visit(
            LayerAttention(
                layer=module.layer_idx,
                attention=_scored_by(config, kind),
                window=options.get("sliding_window", getattr(module, "sliding_window", None)),
                weights=weights.cpu(),
                visible=visible.cpu(),
            )
        )

    with _watched(model, look), torch.no_grad():
        output = model(input_ids=input_ids.to(model.device), use_cache=False, **kwargs)
    if not layers:
        raise UserError(
            f"{type(model).__name__} does not use Transformers' attention interface, so its "
            "attention cannot be read"
        )
    return output


@contextmanager
def _watched(model: Any, look: Callable[..., None]) -> Iterator[None]:
    """Show ``look`` the arguments of every call of the attention function."""
    implementation = model.config._attn_implementation
    function, attend = ALL_ATTENTION_FUNCTIONS[SDPA], layer_pass.attend
    reading: list[Any] = []

    def watch(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        look(module, query, key, mask, options)
        return function(module, query, key, value, mask, **options)

    def watch_attend(query: Any, key: Any, value: Any, **options: Any) -> Any:
        look(reading[-1], query, key, options.get("attention_mask"), options)
        return attend(query, key, value, **options)

    # `attend`, which takes biases, is not told the module.
    hooks = [
        module.register_forward_pre_hook(lambda module, _: reading.append(module))
        for module in model.modules()
        if isinstance(module, CollinearAttention)
    ]
    ALL_ATTENTION_FUNCTIONS[SDPA], layer_pass.attend = watch, watch_attend  # pyright: ignore
    try:
        # Other implementations have masks of their own format, or none to look at.
        if implementation != SDPA:
            model.set_attn_implementation(SDPA)
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[SDPA], layer_pass.attend = function, attend
        for hook in hooks:
            hook.remove()
        if implementation != SDPA:
            model.set_attn_implementation(implementation)


def _scored_by(config: Any, kind: str | None) -> str:
    """What scores in layers of a type."""
    if not hasattr(config, "coca_form"):
        found = attention_of(config) or "unknown"
        return "rotary" if found == "rope" else found
    pairs, free = head_width(config) // 2, free_pairs(config, kind)
    if free < pairs:
        return f"{config.coca_form} and rotary" if free else config.coca_form
    return "rotary" if rotation(config, kind).frequencies().any() else "dot product"
