"""The operators that are compared, on random tensors, and their error against float64.

B batch, T length, H query heads, G key/value heads, D head width.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from coca_attention.ops import FORMS, Rotation, coca_attention
from coca_attention.testing import difference

ROTARY, CONTRACTION = "RoPE + SDPA", "paper's contraction"
CHECKED = 4
"""Number of queries compared with float64: the last ones, which see the whole text."""

Operator = Callable[..., Tensor]


def rotary_attention(query: Tensor, key: Tensor, value: Tensor, **_: Tensor) -> Tensor:
    """Rotary attention as Transformers' Llama computes it: angles, rotation, SDPA."""
    length = query.shape[-2]
    theta = Rotation(query.shape[-1]).frequencies().to(query.device, torch.float32)
    angles = torch.arange(length, device=query.device, dtype=torch.float32)[:, None] * theta
    angles = torch.cat((angles, angles), dim=-1)[None]
    cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
    )


def coca(query: Tensor, key_coefficients: Tensor, value: Tensor, *, form: Any, **_: Tensor):
    """`coca_attention` as users call it."""
    return coca_attention(query, key_coefficients, value, form=form)


def contraction(query: Tensor, key_coefficients: Tensor, value: Tensor, **_: Tensor) -> Tensor:
    """Slack scores contracted into a matrix (paper, Eq. 18), mask, softmax, times V.

    The order is the one opt_einsum chooses: q with its own rotation first, then with the keys.
    """
    length, width = query.shape[-2:]
    positions = torch.arange(length, device=query.device)
    cos, sin = Rotation(width).tables(positions, query.dtype)
    cos, sin = (torch.cat((x, x), dim=-1)[None] for x in (cos, sin))
    key = torch.cat((key_coefficients, key_coefficients), dim=-1)
    rotated, key = apply_rotary_pos_emb(query, key, cos, sin)
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = torch.einsum("bhqd,bhqd,bhkd->bhqk", query, rotated, key) / width**0.5
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ value


def operators(length: int, settings: Namespace) -> dict[str, tuple[Operator, str | None]]:
    """By name: functions of `random_inputs` and their score forms (None: rotary scores)."""
    compared: dict[str, tuple[Operator, str | None]] = {ROTARY: (rotary_attention, None)}
    compared |= {f"CoCA {form}": (partial(coca, form=form), form) for form in FORMS}
    if length <= settings.longest_contraction:
        compared[CONTRACTION] = (contraction, "slack")
    return compared


def random_inputs(length: int, settings: Namespace) -> dict[str, Tensor]:
    """q, k, t and V (B, H or G, T, D or D/2), with the strides that projections give them."""
    generator = torch.Generator(settings.device).manual_seed(0)

    def draw(heads: int, width: int) -> Tensor:
        shape = (settings.batch, length, heads, width)
        drawn = torch.randn(shape, generator=generator, device=settings.device)
        return drawn.to(getattr(torch, settings.dtype)).transpose(1, 2)

    kv_heads, width = settings.kv_heads or settings.heads, settings.head_width
    return {
        "query": draw(settings.heads, width),
        "key": draw(kv_heads, width),
        "key_coefficients": draw(kv_heads, width // 2).relu(),
        "value": draw(kv_heads, width),
    }


def error_of(output: Tensor, tensors: dict[str, Tensor], form: str | None) -> float:
    """Largest error against the operator in float64, relative to the largest exact value.

    Of ``output`` (B, H, T, D), the last queries of the last key head's query heads are compared.
    """
    group, rows = output.shape[1] // tensors["value"].shape[1], min(CHECKED, output.shape[-2])
    # Where all pairs are free, the key itself has the place of the coefficients.
    key, value = tensors["key" if form is None else "key_coefficients"], tensors["value"]
    compared = tensors["query"][-1:, -group:, -rows:], key[-1:, -1:], value[-1:, -1:]
    exact = coca_attention(*(x.cpu().double() for x in compared), form=form or "strict")
    return difference(output[-1:, -group:, -rows:].cpu().double(), exact)
