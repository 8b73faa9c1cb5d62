"""The operator on random tensors: rotary attention, CoCA's forms, and the paper's contraction."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from coca_attention.ops import FORMS, Rotation, coca_attention, oracle
from coca_lab.studies.bench.settings import CHECKED_QUERIES, BenchSettings
from coca_lab.studies.bench.timing import Variant

VANILLA, CONTRACTION = "RoPE + SDPA", "paper's contraction"
# The attention of a 7B model, for runs on a GPU.
gpu_run = partial(BenchSettings, heads=32, head_width=128, longest_contraction=8192)


class Operator(NamedTuple):
    """A function of the tensors of `random_inputs`, and its score form (None: rotary scores)."""

    function: Callable[..., Tensor]
    form: str | None


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


def coca(
    query: Tensor, key_coefficients: Tensor, value: Tensor, *, form: Any, **_: Tensor
) -> Tensor:
    """`coca_attention` as users call it."""
    return coca_attention(query, key_coefficients, value, form=form)


def contraction(query: Tensor, key_coefficients: Tensor, value: Tensor, **_: Tensor) -> Tensor:
    """Slack scores contracted into a matrix (paper, Eq. 18), mask, softmax, times V.

    The order is the one opt_einsum chooses: q with its own rotation first, then with the keys.
    """
    length, width = query.shape[-2:]
    positions = torch.arange(length, device=query.device)
    cos, sin = Rotation(width).tables(positions, query.dtype)
    cos, sin = (torch.cat((x, x), dim=-1) for x in (cos, sin))
    rotated, key = apply_rotary_pos_emb(
        query, torch.cat((key_coefficients, key_coefficients), dim=-1), cos[None], sin[None]
    )
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = torch.einsum("bhqd,bhqd,bhkd->bhqk", query, rotated, key) / width**0.5
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ value


def random_inputs(length: int, settings: BenchSettings) -> dict[str, Tensor]:
    """q, k, t and V (B, H or G, T, D or D/2), with the strides that projections give them."""
    generator = torch.Generator(settings.device).manual_seed(0)

    def draw(heads: int, width: int) -> Tensor:
        shape = (settings.batch, length, heads, width)
        drawn = torch.randn(shape, generator=generator, device=settings.device)
        return drawn.to(getattr(torch, settings.dtype)).transpose(1, 2)

    heads, width = settings.heads, settings.head_width
    kv_heads = settings.kv_heads or heads
    return {
        "query": draw(heads, width),
        "key": draw(kv_heads, width),
        "key_coefficients": draw(kv_heads, width // 2).relu(),
        "value": draw(kv_heads, width),
    }


def operators(length: int, settings: BenchSettings) -> dict[str, Operator]:
    """The operators compared at a length, by name."""
    found = {VANILLA: Operator(rotary_attention, None)}
    found |= {f"CoCA {form}": Operator(partial(coca, form=form), form) for form in FORMS}
    if length <= settings.longest_contraction:
        found[CONTRACTION] = Operator(contraction, "slack")
    return found


def relative_error(output: Tensor, tensors: dict[str, Tensor], form: str | None) -> float:
    """Largest error against the oracle, relative to the largest exact value.

    Args:
        output: (B, H, T, D); only the last queries of the first and last heads are compared.
        tensors: Those of `random_inputs`.
        form: The score form; None for rotary scores.
    """
    error = largest = 0.0
    heads, rows = output.shape[1], min(CHECKED_QUERIES, output.shape[-2])
    keys = torch.arange(tensors["key"].shape[-2])
    for head in {0, heads - 1}:
        kv_head = head * tensors["value"].shape[1] // heads
        q = tensors["query"][:1, head : head + 1, -rows:].cpu()
        k, t, v = (
            tensors[name][:1, kv_head : kv_head + 1].cpu()
            for name in ("key", "key_coefficients", "value")
        )
        scores = (
            oracle.rope_scores(q, k, keys[-rows:], keys)
            if form is None
            else oracle.form_scores(form, q, t, keys[-rows:], keys)
        )
        exact = oracle.attention(scores, v, scale=q.shape[-1] ** -0.5)
        ours = output[:1, head : head + 1, -rows:].cpu().double()
        error = max(error, (ours - exact).abs().max().item())
        largest = max(largest, exact.abs().max().item())
    return error / largest


def operator_variants(
    length: int,
    settings: BenchSettings,
    make_run: Callable[[Callable[..., Tensor], dict[str, Tensor]], Callable[[], None]],
) -> list[Variant]:
    """A variant per operator, compared with the oracle.

    Args:
        length: Tokens.
        settings: Sizes.
        make_run: From the operator's function and its tensors to what is timed.
    """
    tensors = random_inputs(length, settings)
    variants = []
    for name, (function, form) in operators(length, settings).items():
        with torch.inference_mode():
            error = relative_error(function(**tensors), tensors, form)
        variants.append(Variant(name, make_run(function, tensors), error))
    return variants


def forward_run(function: Callable[..., Tensor], tensors: dict[str, Tensor]) -> Callable[[], None]:
    """One call without gradients."""

    @torch.inference_mode()
    def run() -> None:
        function(**tensors)

    return run
