"""Softmax attention through `scaled_dot_product_attention` in memory linear in the key length.

Legend: B batch, T query length, S key length, H query heads, G key/value heads, D head width,
Dv value width.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from coca_attention.ops.checks import check_heads
from coca_attention.ops.opaque import compiling, opaque
from coca_attention.ops.parts import Part, attend_parts, has_windows, in_autocast, of_one_width
from coca_attention.ops.positions import Decay, are_consecutive
from coca_attention.ops.sight import Sight, causal_mask, same_segment, with_bias

# Queries processed at once if a mask must be materialized: the mask of one block has
# QUERY_BLOCK * S entries, so memory stays linear in S.
QUERY_BLOCK = 512
# Smallest number of queries that share the keys of a window. A block is at least a quarter of the
# window, which bounds the copies of a key at five. Both measured on a CPU, windows of 32 to 1,024.
WINDOW_BLOCK = 64
# Queries processed at once under a bias of consecutive positions, whose mask is a view. Smaller
# blocks skip more of the keys that none of them sees: measured on a CPU, 256 to 4,096 tokens.
DISTANCE_BLOCK = 128


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention_mask: Tensor | None = None,
    is_causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    bias: Decay | None = None,
    positions: tuple[Tensor, Tensor] | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """softmax(scale * Q K^T + mask + bias) V.

    Args:
        query: (B, H, T, D). When T < S the queries are the last T positions.
        key: (B, G, S, D); G divides H.
        value: (B, G, S, Dv). Dv may differ from D.
        attention_mask: Boolean (True = may attend) or additive, broadcastable to (B, H, T, S).
            Applied in addition to causality if ``is_causal``. A fully masked row gives zeros.
        is_causal: Whether query i sees only keys 0 … S - T + i.
        window: W, the number of keys that a query sees in causal attention, its own included: the
            last W of those above. Time and memory are then O(T * W), masks included.
        scale: Multiplies the scores; default 1/sqrt(D).
        dropout: Probability of dropping an attention weight.
        bias: `Rotation.bias`, an addend of the scores. It is formed for one block of queries at a
            time; on a CPU, where positions are consecutive and there is no mask, once for every
            distance.
        positions: Positions of queries, (T,) or (B, T), and of keys, (S,) or (B, S), for the bias.
            Default: 0 … S - 1, and the last T of them.
        segments: A number for every key, (B, S), such as that of its document in packed batches; a
            query has that of its own key and sees only keys with the same. Masks are formed for one
            block of queries at a time.

    Returns:
        (B, H, T, Dv).

    Raises:
        ValueError: If G does not divide H, there are more queries than keys in causal attention,
            the mask has another shape, or the window is not positive or not causal.
        TypeError: If the mask is neither boolean nor floating.
    """
    queries = query.shape[-2]
    keys = key.shape[-2]
    check_heads(query.shape[-3], key.shape[-3])
    if is_causal and queries > keys:
        raise ValueError(
            f"in causal attention the queries are the last positions of the keys, so there must be "
            f"at least as many keys as queries; got {queries} queries and {keys} keys"
        )
    if window is not None and (window < 1 or not is_causal):
        raise ValueError(
            f"window must be at least 1 and requires causal attention; got window={window} with "
            f"is_causal={is_causal}"
        )
    if attention_mask is not None:
        if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
            raise TypeError(
                f"attention_mask must be boolean (True = may attend) or floating (added to the "
                f"scores), got {attention_mask.dtype}; convert a mask of 0 and 1 with .bool()"
            )
        shape = (*query.shape[:-1], keys)
        sizes = zip(attention_mask.shape[::-1], shape[::-1], strict=False)
        fits = all(size in (1, full) for size, full in sizes)
        if not 2 <= attention_mask.dim() <= len(shape) or not fits:
            raise ValueError(
                f"attention_mask must be broadcastable to (batch, heads, queries, keys), here "
                f"{tuple(shape)}, got shape {tuple(attention_mask.shape)}"
            )
    if queries == 0:
        return query.new_zeros(*query.shape[:-1], value.shape[-1])
    if scale is None:
        scale = math.pow(query.shape[-1], -0.5)
    if window is not None and window >= keys:
        window = None

    # One call of PyTorch's function, if it needs no mask or gets all of it. Under dynamic shapes
    # comparisons of sizes are no bools: they are asked for, never kept.
    at_once = partial(_attend_at_once, scale=scale, dropout=dropout)
    only_masked = segments is None and bias is None
    unmasked = only_masked and attention_mask is None
    if only_masked and not is_causal:
        return at_once(query, key, value, mask=attention_mask)
    if unmasked and queries == 1:
        if window is not None:
            key, value = key[..., -window:, :], value[..., -window:, :]
        if query.device.type != "cpu":
            return at_once(query, key, value)
        # Heads that share keys are the rows of one product. Measured on a CPU alone.
        rows = query.reshape(*query.shape[:-3], key.shape[-3], -1, query.shape[-1])
        return at_once(rows, key, value).reshape(*query.shape[:-1], -1)
    if unmasked and queries == keys and window is None:
        return at_once(query, key, value, is_causal=True)

    # In blocks of queries, or by a kernel with windows; torch.compile sees one operator.
    query_positions, key_positions = (None, None) if positions is None else positions
    decay = None if bias is None else [*bias]
    attend_otherwise = _attend_otherwise
    if is_causal and can_be_opaque(queries, attention_mask, dropout):
        query, key, value = in_autocast(query, key, value)
        attend_otherwise = _attend_opaque
    return attend_otherwise(
        query,
        key,
        value,
        attention_mask,
        segments,
        query_positions,
        key_positions,
        is_causal,
        window,
        scale,
        dropout,
        decay,
    )


def _attend_otherwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    segments: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    is_causal: bool,
    window: int | None,
    scale: float,
    dropout: float,
    decay: list[float] | None,
) -> Tensor:
    """`attend` where it is not one call of PyTorch's function, in types that `opaque` takes."""
    queries = query.shape[-2]
    keys = key.shape[-2]
    sight = Sight(queries, keys, attention_mask, segments, is_causal, window, query.device)
    if window is not None and decay is None:
        seen, sight = sight.among_seen()
        key = key[..., seen, :]
        value = value[..., seen, :]
    unmasked = attention_mask is None and segments is None and decay is None
    if unmasked and not dropout and has_windows(query, value):
        query, key, value = in_autocast(query, key, value)
        part = Part(slice(0, queries), slice(0, sight.keys), "lower", window=sight.window)
        return attend_parts([part], (query, key, query, key, value), scale)

    value_width = value.shape[-1]
    kernel, query, key, value = _kernel_of(query, key, value, True, scale, dropout)
    if decay is not None:
        if query_positions is None or key_positions is None:
            key_positions = torch.arange(keys, device=query.device)
            query_positions = key_positions[keys - queries :]
        output = _attend_decay(
            kernel, query, key, value, sight, Decay(*decay), query_positions, key_positions, dropout
        )
    elif sight.window is not None and attention_mask is None:
        output = _attend_window(kernel, query, key, value, sight)
    else:
        output = _attend_in_blocks(kernel, query, key, value, sight)
    return output if output.shape[-1] == value_width else output[..., :value_width]


_attend_opaque = opaque(_attend_otherwise, differentiable=3)


Kernel = Callable[..., Tensor]
"""``scaled_dot_product_attention`` with a scale and a dropout."""


def _attend_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    dropout: float,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """One call of the kernel for all queries."""
    value_width = value.shape[-1]
    kernel, query, key, value = _kernel_of(query, key, value, mask is not None, scale, dropout)
    output = kernel(query, key, value, attn_mask=mask, is_causal=is_causal)
    return output if output.shape[-1] == value_width else output[..., :value_width]


def _kernel_of(
    query: Tensor, key: Tensor, value: Tensor, masked: bool, scale: float, dropout: float
) -> tuple[Kernel, Tensor, Tensor, Tensor]:
    """The kernel, and query, key and value in the shapes that it takes in linear memory."""
    query, key, value = of_one_width(query, key, value)
    grouped = False
    if key.shape[-3] != query.shape[-3]:
        # Of the linear-memory kernels on accelerators only FlashAttention shares heads, in half
        # precision and without a mask. Otherwise, grouped heads select the kernel that
        # materializes the S * S score matrix.
        half = query.dtype in (torch.float16, torch.bfloat16)
        grouped = query.device.type == "cpu" or (half and not masked)
        if not grouped:
            repeats = query.shape[-3] // key.shape[-3]
            key = key.repeat_interleave(repeats, dim=-3)
            value = value.repeat_interleave(repeats, dim=-3)
    kernel = partial(
        F.scaled_dot_product_attention, dropout_p=dropout, scale=scale, enable_gqa=grouped
    )
    return kernel, query, key, value


def can_be_opaque(queries: int, mask: Tensor | None, dropout: float) -> bool:
    """Whether an `opaque` operator takes the place of attention in blocks of queries."""
    # It has no gradient for a mask, and would drop other weights in the backward pass. A single
    # query has no blocks, and is faster in the graph.
    learned = mask is not None and mask.requires_grad
    return queries > 1 and compiling() and not dropout and not learned


def in_blocks(
    block: Callable[[int, Tensor], Tensor], query: Tensor, window: int | None = None
) -> Tensor:
    """The outputs of ``block(start, rows)`` for some rows of a query (B, H, T, D) at a time."""
    size = QUERY_BLOCK if window is None else min(QUERY_BLOCK, max(WINDOW_BLOCK, window))
    pieces = [(size * index, rows) for index, rows in enumerate(query.split(size, dim=-2))]
    if torch.is_grad_enabled() and len(pieces) > 1:
        # Otherwise the backward pass would keep the masks of all blocks, S * S in total.
        outputs = [checkpoint(block, *piece, use_reentrant=False) for piece in pieces]
    else:
        outputs = [block(*piece) for piece in pieces]
    return torch.cat(outputs, dim=-2)


def _attend_in_blocks(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Sight,
    bias: Callable[[int, int, slice], Tensor] | None = None,
) -> Tensor:
    """Attention with a mask, and a bias of queries start … stop - 1 and some keys, in blocks."""

    def block(start: int, rows: Tensor) -> Tensor:
        stop = start + rows.shape[-2]
        seen, mask = sight.of(start, stop)
        if bias is not None:
            mask = with_bias(mask, bias(start, stop, seen))
        return kernel(rows, key[..., seen, :], value[..., seen, :], attn_mask=mask)

    return in_blocks(block, query, sight.window)


def _attend_decay(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Sight,
    decay: Decay,
    query_positions: Tensor,
    key_positions: Tensor,
    dropout: float,
) -> Tensor:
    """Attention with a decay: one addend per distance where possible, otherwise in blocks."""
    wide = torch.promote_types(query.dtype, torch.float32)

    def bias(start: int, stop: int, seen: slice) -> Tensor:
        added = decay(query_positions[..., start:stop], key_positions[..., seen], wide)
        return added.unsqueeze(-3).to(query.dtype)

    one_per_distance = (
        sight.is_causal
        and sight.queries > 1
        and sight.mask is None
        and sight.segments is None
        and not dropout  # with which the kernel forms all scores: one block at a time, then
        and query.device.type == "cpu"  # others would have to wait for the positions
        and not torch.compiler.is_compiling()
        and are_consecutive(query_positions, key_positions)
    )
    if not one_per_distance:
        return _attend_in_blocks(kernel, query, key, value, sight, bias)
    keys = sight.keys
    window = sight.window or keys
    # Of the distances S - 1 … 0.
    addends = bias(sight.queries - 1, sight.queries, slice(0, keys)).reshape(-1, keys)[0]
    addends[: keys - window] = float("-inf")
    # With the queries in reverse order, the one r places before the last key has the addends of
    # key 0, 1, … from place r on, and -inf for the keys after it: a view of one vector is the mask.
    line = F.pad(addends, (0, sight.queries - 1), value=float("-inf"))
    outputs = []
    for start, rows in zip(
        range(0, sight.queries, DISTANCE_BLOCK),
        query.flip(-2).split(DISTANCE_BLOCK, -2),
        strict=True,
    ):
        last = keys - start
        first = max(0, last - rows.shape[-2] - window + 1)
        mask = line[start + first :].unfold(0, last - first, 1)[: rows.shape[-2]]
        seen = slice(first, last)
        outputs.append(kernel(rows, key[..., seen, :], value[..., seen, :], attn_mask=mask))
    return torch.cat(outputs, dim=-2).flip(-2)


def _attend_window(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, sight: Sight
) -> Tensor:
    """Causal attention over W < S < T + W keys, with blocks in the batch dimension."""
    # Every block sees its own keys and the keys of a window before it, so all blocks have one mask.
    # The first queries, before which there are fewer keys, are attended separately, together with
    # those that do not fill a block.
    queries = sight.queries
    window = sight.window
    assert window is not None
    past = sight.keys - queries
    size = max(WINDOW_BLOCK, window // 4)
    first = min(window - past + (queries - window + past) % size, queries)
    seen, mask = sight.of(0, first)
    output = kernel(query[..., :first, :], key[..., seen, :], value[..., seen, :], attn_mask=mask)
    if first == queries:
        return output
    blocks = (queries - first) // size
    width = window + size
    start = past + first - window

    def in_batch(x: Tensor) -> Tensor:
        """(B, H, blocks, ...) to (B * blocks, H, ...)."""
        return x.transpose(1, 2).flatten(0, 1)

    mask = None
    if sight.segments is not None:
        segments = sight.segments[:, start:].unfold(-1, width, size).flatten(0, 1)
        mask = same_segment(mask, segments[:, window:], segments)
    others = kernel(
        in_batch(query[..., first:, :].unflatten(-2, (blocks, size))),
        in_batch(key[..., start:, :].unfold(-2, width, size).mT),
        in_batch(value[..., start:, :].unfold(-2, width, size).mT),
        attn_mask=causal_mask(mask, size, width, sight.device, window),
    )
    others = others.unflatten(0, (len(query), blocks)).transpose(1, 2).flatten(2, 3)
    return torch.cat((output, others), dim=-2)
