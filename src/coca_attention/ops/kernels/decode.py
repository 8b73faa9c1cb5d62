"""Half-cache decoding (`coca_attention.ops.decoding`) in one pass over t and V.

The keys are split among programs, so that a single sequence fills the device. Each program keeps a
running maximum and sum (online softmax), and a second kernel combines the parts. Keys are formed in
registers. Arithmetic is in float32, with products on tensor cores in the dtype of the cache.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs per multiprocessor, enough to hide memory latency.
PROGRAMS = 4
SPLITS = 256


@triton.jit
def _parts(
    query, coefficients, value, mask, cos, sin, first, second, sums, largest, total,
    q_batch, q_head, t_batch, t_head, t_row, v_batch, v_head, v_row, m_batch, c_batch,
    scale, keys, tiles, splits, tiles_per_split,
    KV_HEADS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
    M: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, N: tl.constexpr,  # noqa: N803
    MASKED: tl.constexpr, PRECISION: tl.constexpr,  # noqa: N803
):  # fmt: skip
    batch = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    split = tl.program_id(1)
    row, pair = tl.arange(0, M), tl.arange(0, PAIRS)
    slot, column = tl.arange(0, N), tl.arange(0, COLUMNS)
    dtype = coefficients.dtype.element_ty

    inside = (row[:, None] < ROWS) & (pair[None, :] < HALF)
    offset = query + batch * q_batch + (kv_head * ROWS + row[:, None]) * q_head + pair[None, :]
    q0 = tl.load(offset, mask=inside, other=0.0).to(tl.float32)
    q1 = tl.load(offset + HALF, mask=inside, other=0.0).to(tl.float32)
    offset = slot[:, None] * HALF + pair[None, :]
    cos_r = tl.load(first + offset, mask=pair[None, :] < HALF, other=0.0)
    sin_r = tl.load(second + offset, mask=pair[None, :] < HALF, other=0.0)

    t_start = coefficients + batch * t_batch + kv_head * t_head
    v_start = value + batch * v_batch + kv_head * v_head
    highest = tl.full([M], float("-inf"), tl.float32)
    weight = tl.zeros([M], tl.float32)
    weighted = tl.zeros([M, COLUMNS], tl.float32)
    for tile in range(split * tiles_per_split, min((split + 1) * tiles_per_split, tiles)):
        table = batch * c_batch + tile * HALF + pair
        c = tl.load(cos + table, mask=pair < HALF, other=0.0)[None, :]
        s = tl.load(sin + table, mask=pair < HALF, other=0.0)[None, :]
        index = (tile * N + slot).to(tl.int64)
        in_range = index < keys
        t = tl.load(
            t_start + index[:, None] * t_row + pair[None, :],
            mask=in_range[:, None] & (pair[None, :] < HALF), other=0.0,
        ).to(tl.float32)  # fmt: skip
        scores = tl.dot(
            (q0 * c + q1 * s).to(dtype), tl.trans((t * cos_r).to(dtype)), input_precision=PRECISION
        )
        scores += tl.dot(
            (q1 * c - q0 * s).to(dtype), tl.trans((t * sin_r).to(dtype)), input_precision=PRECISION
        )
        if MASKED:
            added = tl.load(mask + batch * m_batch + index, mask=in_range, other=float("-inf"))
            scores = scores * scale + added[None, :]
        else:
            scores = scores * scale
        scores = tl.where(in_range[None, :], scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, 1))
        # Before any visible key the maximum is -inf, and -inf - -inf would be NaN.
        base = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp(scores - base[:, None])
        rescale = tl.exp(highest - base)
        weight = weight * rescale + tl.sum(weights, 1)
        v = tl.load(
            v_start + index[:, None] * v_row + column[None, :],
            mask=in_range[:, None] & (column[None, :] < WIDTH), other=0.0,
        )  # fmt: skip
        weighted = weighted * rescale[:, None]
        weighted += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        highest = top

    head = (batch * KV_HEADS + kv_head) * ROWS + row
    offset = head * splits + split
    tl.store(largest + offset, highest, mask=row < ROWS)
    tl.store(total + offset, weight, mask=row < ROWS)
    offset = offset[:, None] * WIDTH + column[None, :]
    tl.store(sums + offset, weighted, mask=(row[:, None] < ROWS) & (column[None, :] < WIDTH))


@triton.jit
def _combine(
    sums, largest, total, output, splits,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS), tl.arange(0, COLUMNS)
    offset = head * splits + split
    highest = tl.load(largest + offset, mask=split < splits, other=float("-inf"))
    overall = tl.max(highest, 0)
    factor = tl.exp(highest - tl.where(overall == float("-inf"), 0.0, overall))
    weight = tl.sum(factor * tl.load(total + offset, mask=split < splits, other=0.0), 0)
    offset = offset[:, None] * WIDTH + column[None, :]
    inside = (split[:, None] < splits) & (column[None, :] < WIDTH)
    weighted = tl.sum(factor[:, None] * tl.load(sums + offset, mask=inside, other=0.0), 0)
    weighted = weighted / tl.where(weight == 0, 1.0, weight)
    offset = output + head * WIDTH + column
    tl.store(offset, weighted.to(output.dtype.element_ty), mask=column < WIDTH)


def attend_half(
    query: Tensor,
    coefficients: Tensor,
    value: Tensor,
    frames: Any,
    attention_mask: Tensor | None,
    scale: float,
) -> Tensor:
    """See `coca_attention.ops.decoding.attend_half`."""
    batch, heads, _, width = query.shape
    kv_heads, keys = coefficients.shape[1:3]
    half, value_width = width // 2, value.shape[-1]
    query, coefficients, value = (_dense_rows(x) for x in (query, coefficients, value))
    mask = query  # a placeholder that is never read
    if attention_mask is not None:
        mask = attention_mask
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, float("-inf"))
        mask = mask.to(torch.float32).view(-1, keys).contiguous()
    tiles = frames.cos.shape[1]
    wanted = triton.cdiv(PROGRAMS * _multiprocessors(query.device), batch * kv_heads)
    tiles_per_split = triton.cdiv(tiles, max(1, min(wanted, tiles, SPLITS)))
    splits = triton.cdiv(tiles, tiles_per_split)
    sums = query.new_empty(batch * heads, splits, value_width, dtype=torch.float32)
    largest, total = sums.new_empty(2, batch * heads, splits)
    output = query.new_empty(batch, heads, 1, value_width)
    columns = max(16, triton.next_power_of_2(value_width))
    parts: Any = _parts
    combine: Any = _combine
    with torch.cuda.device_of(query):
        parts[(batch * kv_heads, splits)](
            query, coefficients, value, mask,
            frames.cos, frames.sin, frames.first, frames.second, sums, largest, total,
            query.stride(0), query.stride(1), *coefficients.stride()[:3], *value.stride()[:3],
            mask.stride(0) if mask.shape[0] > 1 else 0,
            frames.cos.stride(0) if frames.cos.shape[0] > 1 else 0,
            scale, keys, tiles, splits, tiles_per_split,
            KV_HEADS=kv_heads, ROWS=heads // kv_heads, HALF=half, WIDTH=value_width,
            M=max(16, triton.next_power_of_2(heads // kv_heads)),
            PAIRS=max(16, triton.next_power_of_2(half)), COLUMNS=columns, N=frames.tile,
            MASKED=attention_mask is not None,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        )  # fmt: skip
        combine[(batch * heads,)](
            sums, largest, total, output, splits,
            WIDTH=value_width, COLUMNS=columns, SPLITS=triton.next_power_of_2(splits),
        )  # fmt: skip
    return output


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count
