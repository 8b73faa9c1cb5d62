"""Half-cache decoding (`coca_attention.ops.decoding`) in one pass over t and V.

The keys are split among programs, so that a single sequence fills the device. Each program keeps a
running maximum and sum (online softmax), and a second kernel combines the parts. Keys are formed in
registers. Arithmetic is in float32. Where several query heads share a key head, products are on
tensor cores in the dtype of the cache. For a single query those would compute 16 rows, so products
are sums, and each key of a tile has a maximum and sum of its own, which are merged at the end: no
thread waits for another until then.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from coca_attention.ops.decoding import KeyFrames

# Programs per multiprocessor, enough to hide memory latency; those of a single query are one warp.
PROGRAMS = 4
SINGLE_PROGRAMS = 32
SPLITS = 256


@triton.jit
def _merged(highest, weight, weighted):
    """Maximum, sum of weights and weighted sum of parts along the first axis."""
    top = tl.max(highest, 0)
    # Without a visible key the maximum is -inf, and -inf - -inf would be NaN.
    factor = tl.exp(highest - tl.where(top == float("-inf"), 0.0, top))
    return top, tl.sum(factor * weight, 0), tl.sum(factor[:, None] * weighted, 0)


@triton.jit
def _scores(
    q0, q1, t, cos_r, sin_r, dtype: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Scores (M, N) of the keys of a tile, or (N,) of a single query."""
    if ROWS == 1:
        scores = tl.sum(t * (q0 * cos_r + q1 * sin_r), 1)
    else:
        first = tl.trans((t * cos_r).to(dtype))
        second = tl.trans((t * sin_r).to(dtype))
        scores = tl.dot(q0.to(dtype), first, input_precision=PRECISION)
        scores += tl.dot(q1.to(dtype), second, input_precision=PRECISION)
    return scores


@triton.jit
def _added(
    highest, weight, weighted, scores, v, ROWS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Maximum, sum of weights and weighted sum with those of a tile."""
    top = tl.maximum(highest, scores if ROWS == 1 else tl.max(scores, 1))
    base = tl.where(top == float("-inf"), 0.0, top)  # as in _merged
    rescale = tl.exp(highest - base)
    weighted = weighted * rescale[:, None]
    if ROWS == 1:
        weights = tl.exp(scores - base)
        weight = weight * rescale + weights
        weighted += weights[:, None] * v.to(tl.float32)
    else:
        weights = tl.exp(scores - base[:, None])
        weight = weight * rescale + tl.sum(weights, 1)
        weighted += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return top, weight, weighted


@triton.jit
def _parts(
    query, coefficients, value, mask, cos, sin, first, second, sums, largest, total,
    q_batch, q_head, t_batch, t_head, t_row, v_batch, v_head, v_row, m_batch, c_batch,
    scale, keys, tiles, splits, tiles_per_split,
    KV_HEADS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    M: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, N: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    split = tl.program_id(1)
    row = tl.arange(0, M)
    pair = tl.arange(0, PAIRS)
    slot = tl.arange(0, N)
    column = tl.arange(0, COLUMNS)
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
    LANES: tl.constexpr = N if ROWS == 1 else M
    highest = tl.full([LANES], float("-inf"), tl.float32)
    weight = tl.zeros([LANES], tl.float32)
    weighted = tl.zeros([LANES, COLUMNS], tl.float32)
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
        r0 = q0 * c + q1 * s
        r1 = q1 * c - q0 * s
        scores = scale * _scores(r0, r1, t, cos_r, sin_r, dtype, ROWS, PRECISION)
        if MASKED:
            scores += tl.load(mask + batch * m_batch + index, mask=in_range, other=float("-inf"))
        scores = tl.where(in_range, scores, float("-inf"))
        v = tl.load(
            v_start + index[:, None] * v_row + column[None, :],
            mask=in_range[:, None] & (column[None, :] < WIDTH), other=0.0,
        )  # fmt: skip
        highest, weight, weighted = _added(highest, weight, weighted, scores, v, ROWS, PRECISION)

    if ROWS == 1:
        highest, weight, weighted = _merged(highest, weight, weighted)
        weighted = tl.expand_dims(weighted, 0)

    head = (batch * KV_HEADS + kv_head) * ROWS + row
    offset = head * splits + split
    tl.store(largest + offset, highest, mask=row < ROWS)
    tl.store(total + offset, weight, mask=row < ROWS)
    offset = offset[:, None] * WIDTH + column[None, :]
    tl.store(sums + offset, weighted, mask=(row[:, None] < ROWS) & (column[None, :] < WIDTH))


@triton.jit
def _combine(
    sums, largest, total, output, splits,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, COLUMNS)
    offset = head * splits + split
    highest = tl.load(largest + offset, mask=split < splits, other=float("-inf"))
    weight = tl.load(total + offset, mask=split < splits, other=0.0)
    offset = offset[:, None] * WIDTH + column[None, :]
    inside = (split[:, None] < splits) & (column[None, :] < WIDTH)
    _, weight, weighted = _merged(highest, weight, tl.load(sums + offset, mask=inside, other=0.0))
    weighted = weighted / tl.where(weight == 0, 1.0, weight)
    offset = output + head * WIDTH + column
    tl.store(offset, weighted.to(output.dtype.element_ty), mask=column < WIDTH)


def attend_half(
    query: Tensor,
    coefficients: Tensor,
    value: Tensor,
    frames: "KeyFrames",
    attention_mask: Tensor | None,
    scale: float,
) -> Tensor:
    """See `coca_attention.ops.decoding.attend_half`."""
    batch, heads, _, width = query.shape
    kv_heads, keys = coefficients.shape[1:3]
    half = width // 2
    value_width = value.shape[-1]
    query, coefficients, value = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query, coefficients, value)
    )
    mask = query  # a placeholder that is never read
    if attention_mask is not None:
        mask = attention_mask
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, float("-inf"))
        mask = mask.to(torch.float32).view(-1, keys).contiguous()
    tiles = frames.cos.shape[1]
    rows = heads // kv_heads
    programs = SINGLE_PROGRAMS if rows == 1 else PROGRAMS
    multiprocessors = 4  # of Triton's interpreter
    if query.is_cuda:
        multiprocessors = torch.cuda.get_device_properties(query.device).multi_processor_count
    wanted = triton.cdiv(programs * multiprocessors, batch * kv_heads)
    tiles_per_split = triton.cdiv(tiles, max(1, min(wanted, tiles, SPLITS)))
    splits = triton.cdiv(tiles, tiles_per_split)
    sums = query.new_empty(batch * heads, splits, value_width, dtype=torch.float32)
    largest, total = sums.new_empty(2, batch * heads, splits)
    output = query.new_empty(batch, heads, 1, value_width)
    columns, pairs = (max(16, triton.next_power_of_2(x)) for x in (value_width, half))
    # Registers for a tile of 64 pairs and 128 columns are those of one warp.
    warps = max(1, pairs // 64, columns // 128) if rows == 1 else 4
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
            KV_HEADS=kv_heads, ROWS=rows, HALF=half, WIDTH=value_width,
            M=1 if rows == 1 else max(16, triton.next_power_of_2(rows)),
            PAIRS=pairs, COLUMNS=columns, N=frames.tile, MASKED=attention_mask is not None,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32", num_warps=warps,
        )  # fmt: skip
        combine[(batch * heads,)](
            sums, largest, total, output, splits,
            WIDTH=value_width, COLUMNS=columns, SPLITS=triton.next_power_of_2(splits),
        )  # fmt: skip
    return output
