"""Attention weights of some queries of every layer, as the model computes them.

Legend: B batch, H query heads, G key/value heads, M sampled queries, T length, D head width.

What is captured are the arguments of Transformers' attention function: queries and keys after
rotation, with whatever a model adds to masks or as columns; and those of the function that takes
its place for a decay, a window or limited distances. Only M rows of the score matrix are computed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coca_attention.errors import UserError
from coca_attention.models.configuration import rotation
from coca_attention.models.fields import attention_of, free_pairs, head_width
from coca_attention.models.layer_pass import COLLINEAR
from coca_attention.models.scaling import rotary_restored
from coca_attention.ops import attend_clipped, hidden_by

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
            visible, scores = ~hidden_by(mask), scores + mask
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

    def look(module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> None:
        nonlocal layers
        layers += 1
        if options.get("far") is not None:
            weights, visible = _clipped_rows(query, key, value, rows, **options)
        else:
            bias = options.get("bias")
            if bias is not None:  # a function of positions, which a CoCA model passes to `attend`
                queries, keys = options["positions"]
                bias = bias(queries[:, rows], keys, torch.float32).unsqueeze(1)
            scale = options.get("scaling", options.get("scale"))
            window = options.get("window")  # instead of a mask
            mask = options.get("attention_mask")
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
                window=options.get("sliding_window", options.get("window"))
                or getattr(module, "sliding_window", None),
                weights=weights.cpu(),
                visible=visible.cpu(),
            )
        )

    # Transformers' own dynamic scaling would keep the frequencies of this text for the next.
    with rotary_restored(model), _watched(model, look), torch.no_grad():
        output = model(input_ids=input_ids.to(model.device), use_cache=False, **kwargs)
    if not layers:
        raise UserError(
            f"{type(model).__name__} does not use Transformers' attention interface, so its "
            "attention cannot be read"
        )
    return output


def _clipped_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    *,
    far: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`attention_rows` from the arguments of `collinear_attention` with limited distances."""
    queries, keys = options["positions"]
    mask, length = attention_mask, query.shape[-2]
    if mask is None:
        distance = rows.unsqueeze(-1) - torch.arange(length, device=rows.device)
        mask = (distance >= 0) & (distance < (options["window"] or length))
        mask = mask.expand(1, query.shape[1], -1, -1)
    else:
        mask = mask.expand(1, query.shape[1], length, -1)[..., rows, :]
    wide = torch.promote_types(query.dtype, torch.float32)
    _, weights = attend_clipped(
        query[..., rows, :],
        key,
        far[0][..., rows, :],
        far[1],
        value.to(wide),
        **options
        | {
            "positions": (queries[..., rows], keys),
            "consecutive": False,
            "attention_mask": mask,
            "is_causal": False,
            "with_weights": True,
        },
    )
    assert weights is not None
    visible = mask if mask.dtype == torch.bool else ~hidden_by(mask)
    return weights[0], visible[0].sum(-1)


@contextmanager
def _watched(model: Any, look: Callable[..., None]) -> Iterator[None]:
    """Show ``look`` the arguments of every call of the attention functions."""
    implementation = model.config._attn_implementation
    functions = {name: ALL_ATTENTION_FUNCTIONS[name] for name in (SDPA, COLLINEAR)}

    def watch(name: str, module: Any, *tensors: Any, **options: Any) -> Any:
        query, key, value, mask = tensors
        look(module, query, key, value, attention_mask=mask, **options)
        return functions[name](module, *tensors, **options)

    for name in functions:
        ALL_ATTENTION_FUNCTIONS[name] = partial(watch, name)  # pyright: ignore
    try:
        # Other implementations have masks of their own format, or none to look at.
        if implementation != SDPA:
            model.set_attn_implementation(SDPA)
        yield
    finally:
        for name, function in functions.items():
            ALL_ATTENTION_FUNCTIONS[name] = function
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
