"""Softmax attention in parts that a fused kernel computes without a mask, and their sum.

A softmax over several sets of keys is the mean of the softmax over each, weighted by the
exponential of its logarithmic sum (Milakov and Gimelshein, 2018). Given the output and the
logarithmic sum of the whole, the backward pass of a fused kernel gives the gradients of a part,
because exp(score - sum) are then the weights of the whole (Ring Attention, Liu et al., 2023).

Legend: B batch, T query length, S key length, H query heads, G key/value heads, D head width.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Largest head width of which FlashAttention has a backward pass on every GPU that it runs on.
FLASH_WIDTH = 192


class Part(NamedTuple):
    """Queries (rows) and keys (columns) of which every query sees all, or part of a square.

    In ``lower`` a query sees the keys up to the diagonal, in ``upper`` those from it on.
    """

    rows: slice
    columns: slice
    shape: Literal["full", "lower", "upper"]
    far: bool = False
    # Only where `has_windows`: the last keys of a lower part that a query sees. There it need not
    # be a square; its last query sees the last key.
    window: int | None = None


def causal_parts(start: int, stop: int, columns: slice, far: bool = False) -> Iterator[Part]:
    """Queries of which the last sees all of the columns, and each before it one column less."""
    seen = columns.stop - (stop - start)
    if seen > columns.start:
        yield Part(slice(start, stop), slice(columns.start, seen), "full", far)
    yield Part(slice(start, stop), slice(seen, columns.stop), "lower", far)


def banded_parts(queries: int, keys: int, near: int) -> Iterator[Part]:
    """Parts as of `near_and_far_parts`, where `has_windows`: all near keys are one part."""
    yield Part(slice(0, queries), slice(0, keys), "lower", window=near)
    first = max(keys - queries, near)
    if first < keys:
        rows = slice(first - (keys - queries), queries)
        yield Part(rows, slice(0, keys - near), "lower", far=True)


def near_and_far_parts(queries: int, keys: int, near: int) -> Iterator[Part]:
    """Parts of causal attention whose keys are far from a distance of ``near`` on."""
    # Near keys are taken in blocks of as many: those in the query's block and in the one before.
    past = keys - queries
    for block in range(past // near * near, keys, near):
        first = max(block, past)
        last = min(block + near, keys)
        rows = slice(first - past, last - past)
        yield from causal_parts(rows.start, rows.stop, slice(block, last))
        if block and last - near < block:
            yield Part(rows, slice(last - near, block), "full")
        if block and last - first > 1:
            columns = slice(first - near + 1, last - near)
            yield Part(slice(rows.start, rows.stop - 1), columns, "upper")
    first = max(past, near)
    if first < keys:
        yield from causal_parts(first - past, queries, slice(0, keys - near), far=True)


def document_parts(lengths: list[int], queries: int, near: int, banded: bool = False) -> list[Part]:
    """The parts of documents of some lengths, which do not see each other."""
    make = banded_parts if banded else near_and_far_parts
    parts = []
    past = sum(lengths) - queries
    start = 0
    for length in lengths:
        stop = start + length
        first = max(start, past)
        if first < stop:
            row = first - past
            for part in make(stop - first, length, near):
                rows = slice(row + part.rows.start, row + part.rows.stop)
                columns = slice(start + part.columns.start, start + part.columns.stop)
                parts.append(part._replace(rows=rows, columns=columns))
        start = stop
    return parts


def in_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of autocast, which casts none for operators of our own."""
    dtype = _autocast_dtype(tensors[0])
    return tuple(x.to(dtype) for x in tensors)


def _autocast_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def can_attend_parts(*tensors: Tensor) -> bool:
    """Whether a kernel returns logarithmic sums for query, key and value, outside of a graph."""
    on_cpu = tensors[0].device.type == "cpu"
    return has_windows(*tensors) or (on_cpu and not torch.compiler.is_compiling())


def has_windows(*tensors: Tensor) -> bool:
    """Whether FlashAttention, which has windows, takes query, key and value."""
    query = tensors[0]
    width = max(x.shape[-1] for x in tensors)
    return (
        query.is_cuda
        and query.numel() > 0
        and not torch.compiler.is_compiling()
        and _autocast_dtype(query) in (torch.float16, torch.bfloat16)
        and width % 8 == 0
        and width <= FLASH_WIDTH
        and torch.version.hip is None
        and torch.backends.cuda.flash_sdp_enabled()
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def attend_parts(parts: list[Part], tensors: Sequence[Tensor], scale: float) -> Tensor:
    """softmax(scale * scores) V over disjoint parts, of which every query is in at least one.

    The tensors: query, key, far query, far key and value, see `attend_by_distance`.
    """
    output = _Parts.apply(parts, scale, *of_one_width(*tensors))
    return output[..., : tensors[-1].shape[-1]]


def of_one_width(*tensors: Tensor) -> list[Tensor]:
    """The tensors, padded to one width with zeros, which change neither scores nor output."""
    # With unequal widths PyTorch falls back to a kernel that materializes the score matrix.
    widths = [x.shape[-1] for x in tensors]
    if len(set(widths)) == 1:  # padding by nothing is a copy
        return list(tensors)
    return [F.pad(x, (0, max(widths) - n)) for x, n in zip(tensors, widths, strict=True)]


class _Parts(torch.autograd.Function):
    """`attend_parts` of tensors of one width."""

    @staticmethod
    def forward(ctx: Any, parts: list[Part], scale: float, *tensors: Tensor) -> Tensor:
        query = tensors[0]
        if len(parts) == 1:
            output, total = _kernel(parts[0], tensors, scale)
        else:
            wide = torch.promote_types(query.dtype, torch.float32)
            output = torch.zeros_like(query, dtype=wide)
            total = output.new_full(query.shape[:-1], float("-inf"))
            for part in parts:
                found, own = _kernel(part, tensors, scale)
                before = total[..., part.rows]
                after = torch.logaddexp(before, own)
                rows = output[..., part.rows, :]
                rows *= (before - after).exp().unsqueeze(-1)
                rows += found * (own - after).exp().unsqueeze(-1)
                before.copy_(after)
        output = output.to(query.dtype)
        ctx.parts = parts
        ctx.scale = scale
        ctx.save_for_backward(*tensors, output, total)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, output, total = ctx.saved_tensors
        if len(ctx.parts) == 1 and not ctx.parts[0].far:
            query, key, value = _kernel_backward(
                ctx.parts[0], tensors, gradients[0], output, total, ctx.scale
            )
            return None, None, query, key, None, None, value
        sums = [torch.zeros_like(x, dtype=total.dtype) for x in tensors]
        for part in ctx.parts:
            found = _kernel_backward(
                part,
                tensors,
                gradients[0][..., part.rows, :],
                output[..., part.rows, :],
                total[..., part.rows],
                ctx.scale,
            )
            for place, x in zip(_cut(part, sums), found, strict=True):
                place += x
        return None, None, *(x.to(y.dtype) for x, y in zip(sums, tensors, strict=True))


def _cut(part: Part, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the query, key and value of a part."""
    near_query, near_key, far_query, far_key, value = tensors
    query = far_query if part.far else near_query
    key = far_key if part.far else near_key
    columns = part.columns
    return query[..., part.rows, :], key[..., columns, :], value[..., columns, :]


def _kernel(part: Part, tensors: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, D) and logarithmic sums (B, H, T) of a part."""
    query, key, value = _cut(part, tensors)
    causal = part.shape != "full"
    if query.is_cuda:
        output, total, *_ = torch.ops.aten._flash_attention_forward(
            _rows_first(query), _rows_first(key), _rows_first(value), None, None,
            query.shape[-2], key.shape[-2], 0.0, causal, False, scale=scale, **_band(part),
        )  # fmt: skip
        return output.transpose(1, 2), total
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if part.shape != "upper":
        output, total = kernel(query, key, value, 0.0, causal, scale=scale)
        return output, total
    # Turned around it is causal.
    output, total = kernel(query.flip(-2), key.flip(-2), value.flip(-2), 0.0, causal, scale=scale)
    return output.flip(-2), total.flip(-1)


def _kernel_backward(
    part: Part,
    tensors: Sequence[Tensor],
    gradient: Tensor,
    output: Tensor,
    total: Tensor,
    scale: float,
) -> Sequence[Tensor]:
    """Gradients of a part, from the gradient, the output and the logarithmic sums of its rows."""
    query, key, value = _cut(part, tensors)
    causal = part.shape != "full"
    if gradient.is_cuda:
        found = torch.ops.aten._flash_attention_backward(
            _rows_first(gradient), _rows_first(query), _rows_first(key), _rows_first(value),
            _rows_first(output), total.contiguous(), None, None,
            query.shape[-2], key.shape[-2], 0.0, causal,
            torch.zeros(2, dtype=torch.uint64, device=gradient.device), total.new_empty(0),
            scale=scale, **_band(part),
        )  # fmt: skip
        return [x.transpose(1, 2) for x in found]
    upper = part.shape == "upper"
    if upper:
        query, key, value, gradient, output = (
            x.flip(-2) for x in (query, key, value, gradient, output)
        )
        total = total.flip(-1)
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, total, 0.0, causal, scale=scale
    )
    return [x.flip(-2) for x in found] if upper else found


def _rows_first(x: Tensor) -> Tensor:
    """(B, H, T, D) to (B, T, H, D), the last dimension of which is contiguous."""
    x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()


def _band(part: Part) -> dict[str, int]:
    """How FlashAttention names a window, which does not count the query's own key."""
    if part.window is None:
        return {}
    return {"window_size_left": part.window - 1, "window_size_right": 0}
