"""The operator: rotary attention, CoCA's forms, and the paper's contraction of scores."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from coca_attention.benchmarks.timing import Variant
from coca_attention.ops import (
    FORMS,
    apply_rotary,
    attend_half,
    coca_attention,
    inverse_frequencies,
    key_frames,
    oracle,
    query_map,
    rotary_cos_sin,
    score_scale,
    tile_length,
)

VANILLA, CONTRACTION = "RoPE + SDPA", "paper's contraction"
COPY = "copy of as many bytes"
BACKENDS = {
    "FlashAttention": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# Queries that are compared with the oracle: the last ones, which see the whole text.
JUDGED = 4


def vanilla(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Rotary attention as Transformers' Llama computes it: angles, rotation, SDPA."""
    length = query.shape[-2]
    theta = inverse_frequencies(query.shape[-1]).to(query.device, torch.float32)
    angles = torch.arange(length, device=query.device, dtype=torch.float32)[:, None] * theta
    angles = torch.cat((angles, angles), dim=-1)[None]
    cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
    )


def contraction(query: Tensor, key_coefficients: Tensor, value: Tensor) -> Tensor:
    """Slack scores contracted into a matrix (paper, Eq. 18), mask, softmax, times V.

    The contraction goes as opt_einsum lets it: first q with its own rotation, then with the keys.
    """
    length, width = query.shape[-2:]
    cos, sin = rotary_cos_sin(torch.arange(length, device=query.device), width, dtype=query.dtype)
    cos, sin = (torch.cat((x, x), dim=-1) for x in (cos, sin))
    query_, key = apply_rotary_pos_emb(
        query, torch.cat((key_coefficients, key_coefficients), dim=-1), cos[None], sin[None]
    )
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = torch.einsum("bhqd,bhqd,bhkd->bhqk", query, query_, key) / width**0.5
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ value


def inputs(length: int, settings: Any, seed: int = 0) -> dict[str, Tensor]:
    """q, k, t and V as projections give them: rows before heads in memory."""
    device, dtype = settings.device, getattr(torch, settings.dtype)
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int, width: int) -> Tensor:
        shape = (settings.batch, length, heads, width)
        drawn = torch.randn(shape, generator=generator, device=device)
        return drawn.to(dtype).transpose(1, 2)

    heads, groups, width = settings.heads, settings.groups or settings.heads, settings.head_width
    return {
        "query": draw(heads, width),
        "key": draw(groups, width),
        "key_coefficients": draw(groups, width // 2).relu(),
        "value": draw(groups, width),
    }


def functions(length: int, settings: Any) -> dict[str, Callable[..., Tensor]]:
    """What is compared at a length, by name; each takes the tensors of `inputs` by name."""

    def coca(form: Any) -> Callable[..., Tensor]:
        return lambda query, key_coefficients, value, **_: coca_attention(
            query, key_coefficients, value, form=form
        )

    found: dict[str, Callable[..., Tensor]] = {
        VANILLA: lambda query, key, value, **_: vanilla(query, key, value)
    }
    found |= {f"CoCA {form}": coca(form) for form in FORMS}
    if length <= settings.longest_contraction:
        found[CONTRACTION] = lambda query, key_coefficients, value, **_: contraction(
            query, key_coefficients, value
        )
    return found


def error(name: str, output: Tensor, tensors: dict[str, Tensor]) -> float:
    """Largest error of the last queries of the first and last heads, against the oracle."""
    wrong = largest = 0.0
    heads = output.shape[1]
    for head in {0, heads - 1}:
        group = head * tensors["value"].shape[1] // heads
        rows = min(JUDGED, output.shape[-2])
        q, k, t, v = (
            tensors[key][:1, (head if key == "query" else group) :][:, :1].detach().cpu()
            for key in ("query", "key", "key_coefficients", "value")
        )
        keys = torch.arange(q.shape[-2])
        last = keys[-rows:]
        if name == VANILLA:
            scores = oracle.rope_scores(q[..., -rows:, :], k, last, keys)
        else:
            form = "slack" if name == CONTRACTION else name.split()[-1]
            scores = oracle.SCORES[form](q[..., -rows:, :], t, last, keys)
        exact = oracle.attention(scores, v, scale=q.shape[-1] ** -0.5)
        ours = output[:1, head : head + 1, -rows:].detach().cpu().double()
        wrong = max(wrong, (ours - exact).abs().max().item())
        largest = max(largest, exact.abs().max().item())
    return wrong / largest


def forward(length: int, settings: Any) -> list[Variant]:
    """Variants of the operator without gradients."""
    tensors = inputs(length, settings)
    variants = []
    for name, function in functions(length, settings).items():
        with torch.inference_mode():
            wrong = error(name, function(**tensors), tensors)
        variants.append(Variant(name, _inference(function, tensors), wrong))
    return variants


def _inference(function: Callable[..., Tensor], tensors: dict[str, Tensor]) -> Callable[[], Any]:
    @torch.inference_mode()
    def run() -> None:
        function(**tensors)

    return run


def training(length: int, settings: Any) -> list[Variant]:
    """Variants of the operator, forward and backward."""
    tensors = inputs(length, settings)
    variants = []
    for name, function in functions(length, settings).items():
        wrong = error(name, function(**tensors), tensors)
        variants.append(Variant(name, _backward(function, tensors), wrong))
    return variants


def _backward(function: Callable[..., Tensor], tensors: dict[str, Tensor]) -> Callable[[], Any]:
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}

    def run() -> None:
        output = function(**leaves)
        used = [x for x in leaves.values() if x.requires_grad]
        torch.autograd.grad(output, used, torch.ones_like(output), allow_unused=True)

    return run


def decode(length: int, settings: Any) -> list[Variant]:
    """One query over keys and values of a text, as SDPA reads them and from half keys.

    On CUDA every kernel that PyTorch has is tried, and beside them stands a copy that moves as many
    bytes as keys and values have: no kernel that reads them can be faster.
    """
    tensors = {name: x.contiguous() for name, x in inputs(length, settings).items()}
    query, t, value = (tensors[name] for name in ("query", "key_coefficients", "value"))
    width, scale = query.shape[-1], query.shape[-1] ** -0.5
    cos, sin = rotary_cos_sin(torch.arange(length, device=query.device), width)
    key = apply_rotary(tensors["key"], cos, sin)
    last = apply_rotary(query, cos, sin)[..., -1:, :].contiguous()

    def sdpa(backend: SDPBackend | None) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel(backend) if backend is not None else nullcontext():
                return F.scaled_dot_product_attention(
                    last, key, value, enable_gqa=key.shape[1] != last.shape[1]
                )

        return run

    found: dict[str, Callable[[], Tensor]] = {VANILLA: sdpa(None)}
    if settings.device == "cuda":
        for name, backend in BACKENDS.items():
            try:
                sdpa(backend)()
            except RuntimeError:
                continue  # it does not take these shapes
            found[f"{VANILLA}, {name}"] = sdpa(backend)
    theta, divisor = inverse_frequencies(width), score_scale(query.dtype)
    for form in ("slack", "strict"):
        frames = key_frames(
            torch.zeros(1, dtype=torch.long, device=query.device),
            length,
            theta,
            form=form,
            tile=tile_length(t, query.shape[1]),
            pairs=width // 2,
        )
        q = query_map(
            query[..., -1:, :], cos[-1:], sin[-1:], form=form, scale=scale / divisor
        ).contiguous()
        found[f"half keys, CoCA {form}"] = partial(attend_half, q, t, value, frames, scale=divisor)
    variants = []
    for name, run in found.items():
        judged = VANILLA if name.startswith(VANILLA) else name
        half = judged != VANILLA
        moved = (value.numel() + (t if half else key).numel()) * value.element_size() / 1e6
        with torch.inference_mode():
            wrong = error(judged, run(), tensors)
        variants.append(
            Variant(name, torch.inference_mode()(run), wrong, {"cache_megabytes": moved})
        )
    target = torch.empty_like(value)
    copied = {"cache_megabytes": 2 * value.numel() * value.element_size() / 1e6}
    variants.append(Variant(COPY, lambda: target.copy_(value), None, copied))
    return variants


def one_forward(name: str, length: int, settings: Any) -> Callable[[], Any]:
    """One variant alone, for a process that measures its memory; small things are warmed up."""
    small = inputs(64, settings)
    functions(64, settings)[name](**small)
    return _inference(functions(length, settings)[name], inputs(length, settings))
