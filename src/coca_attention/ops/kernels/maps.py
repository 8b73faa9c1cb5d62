"""The query and key maps and their gradients, each read once and written once.

One program takes one position of one row of the batch and several heads: cos and sin are loaded
once for all of them. Arithmetic in float32. Legend as in `coca_attention.ops.maps`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Heads handled by a program: enough to share cos and sin, few enough to fill the device.
HEADS = 8


@triton.jit
def _share(heads, length, HALF: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr):  # noqa: N803
    """What a program takes: batch, row, head (HEADS, 1) and pair (1, PAIRS); which of them exist.

    Offsets of large tensors leave the range of int32, so the numbers that strides multiply are
    int64.
    """
    batch = (tl.program_id(0) // length).to(tl.int64)
    row = (tl.program_id(0) % length).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]).to(tl.int64)
    pair = tl.arange(0, PAIRS)[None, :]
    return batch, row, head, pair, (head < heads) & (pair < HALF)


@triton.jit
def _load_tables(first, second, batch, row, pair, c_batch, c_row, HALF: tl.constexpr):  # noqa: N803
    """A row of two tables, such as cos and sin, (1, PAIRS) each."""
    place = batch * c_batch + row * c_row + pair
    x = tl.load(first + place, mask=pair < HALF, other=0.0)
    y = tl.load(second + place, mask=pair < HALF, other=0.0)
    return x, y


@triton.jit
def _load(place, there):
    return tl.load(place, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _members(pair, SPAN: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr):  # noqa: N803
    """Places of both members of every pair in a head (`split_pairs`)."""
    passed: tl.constexpr = (WIDTH - SPAN) // 2
    if INTERLEAVED:
        first = tl.where(pair < SPAN // 2, 2 * pair, SPAN // 2 + pair)
        second = tl.where(pair < SPAN // 2, 2 * pair + 1, SPAN // 2 + pair + passed)
    else:
        first = tl.where(pair < SPAN // 2, pair, SPAN // 2 + pair)
        second = tl.where(pair < SPAN // 2, SPAN // 2 + pair, SPAN // 2 + pair + passed)
    return first, second


@triton.jit
def _query_map(
    query, made, cos, sin,
    q_batch, q_head, q_row, q_width,
    m_batch, m_head, m_row,
    c_batch, c_row,
    heads, length,
    FORM: tl.constexpr, SPAN: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr,  # noqa: N803
    FREE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    batch, row, head, pair, there = _share(heads, length, WIDTH // 2, HEADS, PAIRS)
    c, s = _load_tables(cos, sin, batch, row, pair, c_batch, c_row, WIDTH // 2)
    first, second = _members(pair, SPAN, WIDTH, INTERLEAVED)
    place = query + batch * q_batch + head * q_head + row * q_row
    q0 = _load(place + first * q_width, there)
    q1 = _load(place + second * q_width, there)
    squares = q0 * q0 + q1 * q1
    if FORM == "slack":
        made0 = squares * c
        made1 = made0 - 2 * q0 * (q0 * c - q1 * s)
    else:
        if FORM == "magnitude":
            squares = tl.sqrt(squares)
        made0, made1 = squares * c, squares * s
    if FREE:
        free = pair >= WIDTH // 2 - FREE
        made0 = tl.where(free, q0 * c - q1 * s, made0)
        made1 = tl.where(free, q0 * s + q1 * c, made1)
    place = made + batch * m_batch + head * m_head + row * m_row + pair
    tl.store(place, made0, mask=there)
    tl.store(place + WIDTH // 2, made1, mask=there)


@triton.jit
def _query_gradient(
    query, grad, made, cos, sin,
    q_batch, q_head, q_row, q_width,
    g_batch, g_head, g_row, g_width,
    m_batch, m_head, m_row,
    c_batch, c_row,
    heads, length,
    FORM: tl.constexpr, SPAN: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr,  # noqa: N803
    FREE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    batch, row, head, pair, there = _share(heads, length, WIDTH // 2, HEADS, PAIRS)
    c, s = _load_tables(cos, sin, batch, row, pair, c_batch, c_row, WIDTH // 2)
    first, second = _members(pair, SPAN, WIDTH, INTERLEAVED)
    place = query + batch * q_batch + head * q_head + row * q_row
    q0 = _load(place + first * q_width, there)
    q1 = _load(place + second * q_width, there)
    place = grad + batch * g_batch + head * g_head + row * g_row
    g0 = _load(place + pair * g_width, there)
    g1 = _load(place + (pair + WIDTH // 2) * g_width, there)
    if FORM == "slack":
        crossed = 2 * g1 * s
        made0 = 2 * c * (g0 - g1) * q0 + crossed * q1
        made1 = 2 * c * (g0 + g1) * q1 + crossed * q0
    else:
        along = g0 * c + g1 * s
        if FORM == "strict":
            along = 2 * along
        else:
            square = q0 * q0 + q1 * q1
            along = tl.where(square > 0, along * tl.rsqrt(tl.where(square > 0, square, 1.0)), 0.0)
        made0, made1 = along * q0, along * q1
    if FREE:
        free = pair >= WIDTH // 2 - FREE
        made0 = tl.where(free, g0 * c + g1 * s, made0)
        made1 = tl.where(free, g1 * c - g0 * s, made1)
    place = made + batch * m_batch + head * m_head + row * m_row
    tl.store(place + first, made0, mask=there)
    tl.store(place + second, made1, mask=there)


@triton.jit
def _key_map(
    coefficients, made, cos, sin,
    t_batch, t_head, t_row, t_width,
    m_batch, m_head, m_row,
    c_batch, c_row,
    heads, length,
    HALF: tl.constexpr, FREE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    batch, row, head, pair, there = _share(heads, length, HALF, HEADS, PAIRS)
    c, s = _load_tables(cos, sin, batch, row, pair, c_batch, c_row, HALF)
    place = coefficients + batch * t_batch + head * t_head + row * t_row + pair * t_width
    t = _load(place, there)
    made0, made1 = t * c, t * s
    if FREE:
        # The second members of free pairs lie behind the first members of all.
        second = _load(place + FREE * t_width, there & (pair >= HALF - FREE))
        made0 -= second * s
        made1 += second * c
    place = made + batch * m_batch + head * m_head + row * m_row + pair
    tl.store(place, made0, mask=there)
    tl.store(place + HALF, made1, mask=there)


@triton.jit
def _key_gradient(
    grad, made, cos, sin,
    g_batch, g_head, g_row, g_width,
    m_batch, m_head, m_row,
    c_batch, c_row,
    heads, length,
    HALF: tl.constexpr, FREE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    batch, row, head, pair, there = _share(heads, length, HALF, HEADS, PAIRS)
    c, s = _load_tables(cos, sin, batch, row, pair, c_batch, c_row, HALF)
    place = grad + batch * g_batch + head * g_head + row * g_row + pair * g_width
    g0 = _load(place, there)
    g1 = _load(place + HALF * g_width, there)
    place = made + batch * m_batch + head * m_head + row * m_row + pair
    tl.store(place, g0 * c + g1 * s, mask=there)
    if FREE:
        tl.store(place + FREE, g1 * c - g0 * s, mask=there & (pair >= HALF - FREE))


def query_map(
    query: Tensor,
    cos: Tensor,
    sin: Tensor,
    form: str,
    interleaved: bool,
    span: int,
    free_pairs: int,
) -> Tensor:
    """Q' of (B, H, T, D); cos and sin (1 or B, 1, T, P), scale folded in."""
    made = _empty_like(query, query.shape[-1])
    cos, sin, *strides = _tables(cos, sin)
    _launch(
        _query_map, query,
        query, made, cos, sin, *query.stride(), *made.stride()[:3], *strides,
        FORM=form, SPAN=span, WIDTH=query.shape[-1], INTERLEAVED=interleaved, FREE=free_pairs,
    )  # fmt: skip
    return made


def query_gradient(
    query: Tensor,
    grad: Tensor,
    cos: Tensor,
    sin: Tensor,
    form: str,
    interleaved: bool,
    span: int,
    free_pairs: int,
) -> Tensor:
    """Gradient of q from that of Q', both (B, H, T, D)."""
    made = _empty_like(query, query.shape[-1])
    cos, sin, *strides = _tables(cos, sin)
    _launch(
        _query_gradient, query,
        query, grad, made, cos, sin,
        *query.stride(), *grad.stride(), *made.stride()[:3], *strides,
        FORM=form, SPAN=span, WIDTH=query.shape[-1], INTERLEAVED=interleaved, FREE=free_pairs,
    )  # fmt: skip
    return made


def key_map(coefficients: Tensor, cos: Tensor, sin: Tensor, free_pairs: int) -> Tensor:
    """K' (B, G, S, D) of coefficients (B, G, S, P + F)."""
    half = coefficients.shape[-1] - free_pairs
    made = _empty_like(coefficients, 2 * half)
    cos, sin, *strides = _tables(cos, sin)
    _launch(
        _key_map, coefficients,
        coefficients, made, cos, sin, *coefficients.stride(), *made.stride()[:3], *strides,
        HALF=half, FREE=free_pairs,
    )  # fmt: skip
    return made


def key_gradient(grad: Tensor, cos: Tensor, sin: Tensor, free_pairs: int) -> Tensor:
    """Gradient of the coefficients (B, G, S, P + F) from that of K' (B, G, S, D)."""
    half = grad.shape[-1] // 2
    made = _empty_like(grad, half + free_pairs)
    cos, sin, *strides = _tables(cos, sin)
    _launch(
        _key_gradient, grad,
        grad, made, cos, sin, *grad.stride(), *made.stride()[:3], *strides,
        HALF=half, FREE=free_pairs,
    )  # fmt: skip
    return made


def _empty_like(tensor: Tensor, width: int) -> Tensor:
    """An empty (B, H, T, width) whose heads and rows lie in memory as the tensor's do."""
    batch, heads, length, _ = tensor.shape
    if tensor.stride(1) < tensor.stride(2):
        return tensor.new_empty(batch, length, heads, width).transpose(1, 2)
    return tensor.new_empty(batch, heads, length, width)


def _tables(cos: Tensor, sin: Tensor) -> tuple[Any, ...]:
    """float32 tables (1 or B, 1, T, P) with dense rows, and the strides of batch and row."""
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    return cos, sin, cos.stride(0) if cos.dim() == 4 and cos.shape[0] > 1 else 0, cos.stride(-2)


def _launch(kernel: Any, shaped: Tensor, *arguments: Any, **constants: Any) -> None:
    """Run a kernel over every position and all heads of a (B, H, T, ...) tensor."""
    batch, heads, length, _ = shaped.shape
    half = constants.get("HALF", constants.get("WIDTH", 0) // 2)
    if 0 in shaped.shape:
        return
    block = min(HEADS, triton.next_power_of_2(heads))
    with torch.cuda.device_of(shaped):
        kernel[(batch * length, triton.cdiv(heads, block))](
            *arguments,
            heads,
            length,
            HEADS=block,
            PAIRS=triton.next_power_of_2(half),
            **constants,
        )
