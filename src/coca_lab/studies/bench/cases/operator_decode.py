"""Attention of one query over a cache: SDPA over whole keys, and CoCA's forms over half keys."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from coca_attention import ops
from coca_lab.studies.bench.case import Case
from coca_lab.studies.bench.operators import VANILLA, gpu_run, random_inputs, relative_error
from coca_lab.studies.bench.settings import TITLES, BenchSettings
from coca_lab.studies.bench.timing import Variant

COPY = "copy of as many bytes"
CUDA_BACKENDS = {
    "FlashAttention": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def make(length: int, settings: BenchSettings) -> list[Variant]:
    """SDPA, every form, and a copy of as many bytes as keys and values have.

    No kernel that reads keys and values can be faster than the copy. On CUDA, each of PyTorch's
    kernels that supports these shapes is a variant as well.
    """
    tensors = {name: x.contiguous() for name, x in random_inputs(length, settings).items()}
    value, width = tensors["value"], settings.head_width
    cos, sin = ops.Rotation(width).tables(torch.arange(length, device=value.device))
    key = ops.apply_rotary(tensors["key"], cos, sin)
    query = ops.apply_rotary(tensors["query"], cos, sin)[..., -1:, :].contiguous()
    variants = []

    def add(name: str, run: Callable[[], Tensor], keys: Tensor, form: str | None) -> None:
        with torch.inference_mode():
            error = relative_error(run(), tensors, form)
        read = (keys.numel() + value.numel()) * value.element_size() / 1e6
        timed = torch.inference_mode()(run)
        variants.append(Variant(name, timed, error, {"cache_megabytes": read}))

    add(VANILLA, partial(sdpa, query, key, value), key, None)
    for name, backend in CUDA_BACKENDS.items() if settings.device == "cuda" else ():
        run = partial(sdpa, query, key, value, backend)
        try:
            run()
        except RuntimeError:
            continue  # the kernel does not support these shapes
        add(f"{VANILLA}, {name}", run, key, None)
    for form in ops.FORMS:
        run = half_attention(tensors["query"], tensors["key_coefficients"], value, cos, sin, form)
        add(f"half keys, CoCA {form}", run, tensors["key_coefficients"], form)
    target = torch.empty_like(value)
    copied = {"cache_megabytes": 2 * value.numel() * value.element_size() / 1e6}
    variants.append(Variant(COPY, lambda: target.copy_(value), None, copied))
    return variants


def sdpa(query: Tensor, key: Tensor, value: Tensor, backend: SDPBackend | None = None) -> Tensor:
    """`scaled_dot_product_attention` with the given kernel, or with PyTorch's choice."""
    with sdpa_kernel(backend) if backend is not None else nullcontext():
        return F.scaled_dot_product_attention(
            query, key, value, enable_gqa=key.shape[1] != query.shape[1]
        )


def half_attention(
    query: Tensor, t: Tensor, value: Tensor, cos: Tensor, sin: Tensor, form: Any
) -> Callable[[], Tensor]:
    """Attention of the last query over key coefficients, without forming keys."""
    width, divisor = query.shape[-1], ops.score_scale(query.dtype)
    frames = ops.key_frames(
        torch.zeros(1, dtype=torch.long, device=query.device),
        t.shape[-2],
        ops.Rotation(width),
        tile=ops.tile_length(t, query.shape[1]),
        pairs=width // 2,
    )
    scale = width**-0.5 / divisor
    mapped = ops.query_map(
        query[..., -1:, :], cos[-1:], sin[-1:], form=form, scale=scale
    ).contiguous()
    return partial(ops.attend_half, mapped, t, value, frames, scale=divisor)


CASE = Case(
    "operator-decode",
    TITLES["operator-decode"],
    make,
    gpu_runs=(
        gpu_run(lengths=[8192, 32768, 131072], kv_heads=8),
        gpu_run(lengths=[8192, 32768, 131072]),
    ),
)
