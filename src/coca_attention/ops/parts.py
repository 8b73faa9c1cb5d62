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
from torch import Tensor

from coca_attention.ops.attention import of_one_width


class Part(NamedTuple):
    """Keys that some queries see: all of them, or of a square those up to or from the diagonal."""

    rows: slice
    columns: slice
    shape: Literal["full", "lower", "upper"]
    far: bool = False


def causal_parts(start: int, stop: int, columns: slice, far: bool = False) -> Iterator[Part]:
    """Queries of which the last sees all of the columns, and each before it one column less."""
    seen = columns.stop - (stop - start)
    if seen > columns.start:
        yield Part(slice(start, stop), slice(columns.start, seen), "full", far)
    yield Part(slice(start, stop), slice(seen, columns.stop), "lower", far)


def clipped_parts(queries: int, keys: int, max_distance: int) -> Iterator[Part]:
    """Parts of causal attention whose keys are far from W tokens back on."""
    # Near keys are taken in blocks of W: those in the query's block and those in the block before.
    past, width = keys - queries, max_distance
    for block in range(past // width * width, keys, width):
        first, last = max(block, past), min(block + width, keys)
        rows = slice(first - past, last - past)
        yield from causal_parts(rows.start, rows.stop, slice(block, last))
        if block and last - width < block:
            yield Part(rows, slice(last - width, block), "full")
        if block and last - first > 1:
            columns = slice(first - width + 1, last - width)
            yield Part(slice(rows.start, rows.stop - 1), columns, "upper")
    first = max(past, width)
    if first < keys:
        yield from causal_parts(first - past, queries, slice(0, keys - width), far=True)


def document_parts(lengths: list[int], queries: int, max_distance: int) -> list[Part]:
    """`clipped_parts` of documents of some lengths, which do not see each other."""
    parts, past, start = [], sum(lengths) - queries, 0
    for length in lengths:
        first, stop = max(start, past), start + length
        if first < stop:
            for part in clipped_parts(stop - first, length, max_distance):
                rows, columns = _shift(part.rows, first - past), _shift(part.columns, start)
                parts.append(part._replace(rows=rows, columns=columns))
        start = stop
    return parts


def _shift(span: slice, by: int) -> slice:
    return slice(span.start + by, span.stop + by)


def can_attend_parts(query: Tensor) -> bool:
    """Whether there is a kernel that returns logarithmic sums: on a CPU, outside of a graph."""
    return query.device.type == "cpu" and not torch.compiler.is_compiling()


def attend_parts(parts: list[Part], tensors: Sequence[Tensor], scale: float) -> Tensor:
    """softmax(scale * scores) V over disjoint parts, of which every query is in at least one.

    The tensors: query, key, far query, far key and value, see `attend_clipped`.
    """
    return _Parts.apply(parts, scale, *of_one_width(*tensors))[..., : tensors[-1].shape[-1]]


class _Parts(torch.autograd.Function):
    """`attend_parts` of tensors of one width."""

    @staticmethod
    def forward(ctx: Any, parts: list[Part], scale: float, *tensors: Tensor) -> Tensor:
        query = tensors[0]
        wide = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros_like(query, dtype=wide)
        total = torch.full(query.shape[:-1], float("-inf"), dtype=wide)
        for part in parts:
            found, own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *_inputs(part, tensors), 0.0, part.shape != "full", scale=scale
            )
            if part.shape == "upper":
                found, own = found.flip(-2), own.flip(-1)
            before = total[..., part.rows]
            after = torch.logaddexp(before, own)
            rows = output[..., part.rows, :]
            rows *= (before - after).exp().unsqueeze(-1)
            rows += found * (own - after).exp().unsqueeze(-1)
            before.copy_(after)
        output = output.to(query.dtype)
        ctx.parts, ctx.scale = parts, scale
        ctx.save_for_backward(*tensors, output, total)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, output, total = ctx.saved_tensors
        wide = total.dtype
        sums = [torch.zeros_like(x, dtype=wide) for x in tensors]
        for part in ctx.parts:
            rows: Any = [x[..., part.rows, :] for x in (gradients[0], output)]
            own = total[..., part.rows]
            if part.shape == "upper":
                rows, own = [x.flip(-2) for x in rows], own.flip(-1)
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                rows[0],
                *_inputs(part, tensors),
                rows[1],
                own,
                0.0,
                part.shape != "full",
                scale=ctx.scale,
            )
            for place, x in zip(_cut(part, sums), found, strict=True):
                place += x.flip(-2) if part.shape == "upper" else x
        return None, None, *(x.to(y.dtype) for x, y in zip(sums, tensors, strict=True))


def _cut(part: Part, tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the query, key and value of a part."""
    query, key = tensors[2:4] if part.far else tensors[:2]
    columns = (x[..., part.columns, :] for x in (key, tensors[4]))
    return query[..., part.rows, :], *columns


def _inputs(part: Part, tensors: Any) -> tuple[Tensor, ...]:
    """Those of a part, turned around where that makes it causal."""
    cut = _cut(part, tensors)
    return tuple(x.flip(-2) for x in cut) if part.shape == "upper" else cut
