"""The query and key maps and their gradients; each reads its input once and writes its output once.

One program handles one position of one batch row and several heads, and loads cos and sin once for
all of them. Arithmetic is in float32. Legend as in `coca_attention.ops.maps`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coca_attention.ops.forms import Pairing

# Heads per program: enough to share cos and sin, few enough to fill the device with programs.
MOST_HEADS = 8


@triton.jit
def _indices(heads, length, HALF: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    """Indices of a program: batch, row, head (HEADS, 1), pair (1, PAIRS); and their bounds mask."""
    # Offsets into large tensors exceed int32, so indices that are multiplied by strides are int64.
    batch = (tl.program_id(0) // length).to(tl.int64)
    row = (tl.program_id(0) % length).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]).to(tl.int64)
    pair = tl.arange(0, PAIRS)[None, :]
    return batch, row, head, pair, (head < heads) & (pair < HALF)


@triton.jit
def _load_tables(first, second, batch, row, pair, c_batch, c_row, HALF: tl.constexpr):
    """One row of two tables, such as cos and sin, (1, PAIRS) each."""
    offset = batch * c_batch + row * c_row + pair
    x = tl.load(first + offset, mask=pair < HALF, other=0.0)
    y = tl.load(second + offset, mask=pair < HALF, other=0.0)
    return x, y


@triton.jit
def _load(pointer, mask):
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _members(pair, SPAN: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Offsets of both members of every pair in a head (`split_pairs`)."""
    unrotated: tl.constexpr = (WIDTH - SPAN) // 2
    if INTERLEAVED:
        first = tl.where(pair < SPAN // 2, 2 * pair, SPAN // 2 + pair)
        second = tl.where(pair < SPAN // 2, 2 * pair + 1, SPAN // 2 + pair + unrotated)
    else:
        first = tl.where(pair < SPAN // 2, pair, SPAN // 2 + pair)
        second = tl.where(pair < SPAN // 2, SPAN // 2 + pair, SPAN // 2 + pair + unrotated)
    return first, second


@triton.jit
def _query_map(
    query, output, cos, sin,
    q_batch, q_head, q_row, q_width,
    o_batch, o_head, o_row,
    c_batch, c_row,
    heads, length,
    FORM: tl.constexpr, SPAN: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr,
    FREE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    batch, row, head, pair, mask = _indices(heads, length, WIDTH // 2, HEADS, PAIRS)
    c, s = _load_tables(cos, sin, batch, row, pair, c_batch, c_row, WIDTH // 2)
    first, second = _members(pair, SPAN, WIDTH, INTERLEAVED)
    pointer = query + batch * q_batch + head * q_head + row * q_row
    q0 = _load(pointer + first * q_width, mask)
    q1 = _load(pointer + second * q_width, mask)
    squares = q0 * q0 + q1 * q1
    if FORM == "slack":
        out0 = squares * c
        out1 = out0 - 2 * q0 * (q0 * c - q1 * s)
    else:
        if FORM == "magnitude":
            squares = tl.sqrt(squares)
        out0, out1 = squares * c, squares * s
    if FREE:
        free = pair >= WIDTH // 2 - FREE
        out0 = tl.where(free, q0 * c - q1 * s, out0)
        out1 = tl.where(free, q0 * s + q1 * c, out1)
    pointer = output + batch * o_batch + head * o_head + row * o_row + pair
    tl.store(pointer, out0, mask=mask)
    tl.store(pointer + WIDTH // 2, out1, mask=mask)


@triton.jit
def _query_gradient(
    query, grad, output, cos, sin,
    q_batch, q_head, q_row, q_width,
    g_batch, g_head, g_row, g_width,
    o_batch, o_head, o_row,
    c_batch, c_row,
    heads, length,
    FORM: tl.constexpr, SPAN: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr,
    FREE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    batch, row, head, pair, mask = _indices(heads, length, WIDTH // 2, HEADS, PAIRS)
    c, s = _load_tables(cos, sin, batch, row, pair, c_batch, c_row, WIDTH // 2)
    first, second = _members(pair, SPAN, WIDTH, INTERLEAVED)
    pointer = query + batch * q_batch + head * q_head + row * q_row
    q0 = _load(pointer + first * q_width, mask)
    q1 = _load(pointer + second * q_width, mask)
    pointer = grad + batch * g_batch + head * g_head + row * g_row
    g0 = _load(pointer + pair * g_width, mask)
    g1 = _load(pointer + (pair + WIDTH // 2) * g_width, mask)
    if FORM == "slack":
        cross = 2 * g1 * s
        out0 = 2 * c * (g0 - g1) * q0 + cross * q1
        out1 = 2 * c * (g0 + g1) * q1 + cross * q0
    else:
        along = g0 * c + g1 * s
        if FORM == "strict":
            along = 2 * along
        else:
            square = q0 * q0 + q1 * q1
            along = tl.where(square > 0, along * tl.rsqrt(tl.where(square > 0, square, 1.0)), 0.0)
        out0 = along * q0
        out1 = along * q1
    if FREE:
        free = pair >= WIDTH // 2 - FREE
        out0 = tl.where(free, g0 * c + g1 * s, out0)
        out1 = tl.where(free, g1 * c - g0 * s, out1)
    pointer = output + batch * o_batch + head * o_head + row * o_row
    tl.store(pointer + first, out0, mask=mask)
    tl.store(pointer + second, out1, mask=mask)


@triton.jit
def _key_map(
    coefficients, output, cos, sin,
    t_batch, t_head, t_row, t_width,
    o_batch, o_head, o_row,
    c_batch, c_row,
    heads, length,
    HALF: tl.constexpr, FREE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    batch, row, head, pair, mask = _indices(heads, length, HALF, HEADS, PAIRS)
    c, s = _load_tables(cos, sin, batch, row, pair, c_batch, c_row, HALF)
    pointer = coefficients + batch * t_batch + head * t_head + row * t_row + pair * t_width
    t = _load(pointer, mask)
    out0 = t * c
    out1 = t * s
    if FREE:
        # The second members of free pairs follow the first members of all pairs.
        second = _load(pointer + FREE * t_width, mask & (pair >= HALF - FREE))
        out0 -= second * s
        out1 += second * c
    pointer = output + batch * o_batch + head * o_head + row * o_row + pair
    tl.store(pointer, out0, mask=mask)
    tl.store(pointer + HALF, out1, mask=mask)


@triton.jit
def _key_gradient(
    grad, output, cos, sin,
    g_batch, g_head, g_row, g_width,
    o_batch, o_head, o_row,
    c_batch, c_row,
    heads, length,
    HALF: tl.constexpr, FREE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    batch, row, head, pair, mask = _indices(heads, length, HALF, HEADS, PAIRS)
    c, s = _load_tables(cos, sin, batch, row, pair, c_batch, c_row, HALF)
    pointer = grad + batch * g_batch + head * g_head + row * g_row + pair * g_width
    g0 = _load(pointer, mask)
    g1 = _load(pointer + HALF * g_width, mask)
    pointer = output + batch * o_batch + head * o_head + row * o_row + pair
    tl.store(pointer, g0 * c + g1 * s, mask=mask)
    if FREE:
        tl.store(pointer + FREE, g1 * c - g0 * s, mask=mask & (pair >= HALF - FREE))


def query_map(query: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    """Q' of (B, H, T, D); cos and sin (1 or B, 1, 1 or T, P), with the scale folded in."""
    return _launch(_query_map, query.shape[-1], cos, sin, query, **_constants(query, pairing))


def query_gradient(
    query: Tensor, grad: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing
) -> Tensor:
    """Gradient of q from that of Q', both (B, H, T, D)."""
    constants = _constants(query, pairing)
    return _launch(_query_gradient, query.shape[-1], cos, sin, query, grad, **constants)


def _constants(query: Tensor, pairing: Pairing) -> dict[str, object]:
    layout = {"INTERLEAVED": pairing.interleaved, "SPAN": pairing.span, "FREE": pairing.free_pairs}
    return {"FORM": pairing.form.kernel, "WIDTH": query.shape[-1], **layout}


def key_map(coefficients: Tensor, cos: Tensor, sin: Tensor, free_pairs: int) -> Tensor:
    """K' (B, G, S, D) of coefficients (B, G, S, P + F)."""
    half = coefficients.shape[-1] - free_pairs
    return _launch(_key_map, 2 * half, cos, sin, coefficients, HALF=half, FREE=free_pairs)


def key_gradient(grad: Tensor, cos: Tensor, sin: Tensor, free_pairs: int) -> Tensor:
    """Gradient of the coefficients (B, G, S, P + F) from that of K' (B, G, S, D)."""
    half = grad.shape[-1] // 2
    return _launch(_key_gradient, half + free_pairs, cos, sin, grad, HALF=half, FREE=free_pairs)


def _launch(
    kernel: Any, width: int, cos: Tensor, sin: Tensor, *tensors: Tensor, **constants: Any
) -> Tensor:
    """The output (B, H, T, width) of a kernel, run over every position and all heads of tensors."""
    first, batch, heads, length = tensors[0], *tensors[0].shape[:3]
    shape = batch, heads, length, width
    if first.stride(1) < first.stride(2):  # heads and rows in the memory order of the tensor's
        output = first.new_empty(batch, length, heads, width).transpose(1, 2)
    else:
        output = first.new_empty(shape)
    if 0 in shape:
        return output
    cos = cos.float().contiguous()
    sin = sin.float().contiguous()
    strides = [stride for x in tensors for stride in x.stride()] + [*output.stride()[:3]]
    strides.append(cos.stride(0) if cos.dim() == 4 and cos.shape[0] > 1 else 0)
    strides.append(cos.stride(-2) if cos.shape[-2] > 1 else 0)
    half = constants.get("HALF", constants.get("WIDTH", 0) // 2)
    block = min(MOST_HEADS, triton.next_power_of_2(heads))
    constants |= {"HEADS": block, "PAIRS": triton.next_power_of_2(half)}
    grid = batch * length, triton.cdiv(heads, block)
    with torch.cuda.device_of(first):
        kernel[grid](*tensors, output, cos, sin, *strides, heads, length, **constants)
    return output
