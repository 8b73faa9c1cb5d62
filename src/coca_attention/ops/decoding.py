"""Attention of one new token over a half cache, which stores key coefficients instead of keys.

Legend: B batch, S keys, H query heads, G key/value heads, D head width, P = D/2 rotary pairs, F
free pairs, W = P + F coefficients per token and key head, N keys per tile.

K'_n is R_n applied to coefficients that do not depend on n, and rotations add up: for the keys
n = n_0 + r of a tile, Q' · K'_n = (R_{-n_0} Q') · K'_r. The query is therefore rotated once per
tile, and one table of N rows rotates the coefficients of every tile. A step reads only coefficients
and V, which for F = 0 is three quarters of the size of full keys and values.

Every coefficient is treated as the first member of a pair whose second member is 0. The second
member of a free pair acts like the first member of a pair rotated by a quarter turn
(`paired_query`).
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from coca_attention.ops import kernels
from coca_attention.ops.maps import over_all_pairs
from coca_attention.ops.positions import KeyAngles, Rotation

# Products per tile on a CPU, over all heads: small enough to stay in its caches.
CPU_TILE = 1 << 18
# Limits per tile in the CUDA kernel, in keys and in bytes of coefficients: larger tiles would
# exceed the shared memory of a GPU (these need at most 74 KiB). A single query is fastest with few.
CUDA_KEYS = 64
CUDA_TILE = 1 << 13
SINGLE_KEYS = 16


@dataclass(frozen=True)
class KeyFrames:
    """Rotations of the query for every tile, and of the coefficients within a tile."""

    cos: Tensor  # of n_0 θ_j for every tile's first position n_0, (1 or B, tiles, W)
    sin: Tensor
    first: Tensor  # cos(r θ_j) for every offset r in a tile, (N, W)
    second: Tensor  # sin(r θ_j)
    length: int  # number of keys S
    # Scratch memory. It is shared, so only one step may use the frames at a time.
    buffers: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def tile(self) -> int:
        """Keys per tile, N."""
        return self.first.shape[0]

    def buffer(self, name: str, *shape: int) -> Tensor:
        """Uninitialised scratch memory for one step, in the dtype of the tables.

        All layers of a model reuse the same memory one after the other, because newly allocated
        memory would cause page faults in each of them: without it a step over 2,048 keys took 1.4
        times as long.
        """
        buffer = self.buffers.get(name)
        if buffer is None or buffer.shape != shape:
            with torch.inference_mode(False):  # so that it can be written to outside that mode
                buffer = self.buffers[name] = self.first.new_empty(shape)
        return buffer


def key_frames(
    first_position: Tensor,
    length: int,
    rotation: Rotation,
    *,
    tile: int,
    pairs: int,
    free_pairs: int = 0,
    dtype: torch.dtype = torch.float32,
    of: KeyAngles = "near",
) -> KeyFrames:
    """Tables for keys at consecutive positions, shared by all layers of a model.

    Args:
        first_position: Position of key 0 in every row of the batch, (1,) or (B,).
        length: Number of keys S.
        rotation: Rotation of the pairs.
        tile: Keys per tile, see `tile_length`.
        pairs: Pairs per head, P; those beyond the rotary width have angle 0.
        free_pairs: F.
        dtype: dtype of the tables, float32 or wider.
        of: Which of the rotation's angles make the keys.

    Raises:
        ValueError: If these do not grow by the same with every position.
    """
    found = rotation.distance_map
    if of != "near" and (found is None or not found.has_equal_steps):
        raise ValueError(f"frames need far keys that are equally far apart, got the map {found!r}")
    device = first_position.device
    magnitude = rotation.magnitude(of)
    starts = torch.arange(0, length, tile, device=device)
    outside = rotation.angles(first_position.unsqueeze(-1) + starts, of)
    inside = rotation.angles(torch.arange(tile, device=device), of)
    missing = (0, pairs - outside.shape[-1])
    outside = F.pad(outside, missing)
    first = F.pad(inside.cos() * magnitude, missing, value=1.0)
    second = F.pad(inside.sin() * magnitude, missing)
    cos, sin, first, second = (
        _paired(x, free_pairs).to(dtype).contiguous()
        for x in (outside.cos(), outside.sin(), first, second)
    )
    return KeyFrames(cos, sin, first, second, length)


def _paired(x: Tensor, free_pairs: int) -> Tensor:
    """Repeat the columns of the free pairs: (..., P) to (..., W)."""
    return torch.cat((x, x[..., -free_pairs:]), dim=-1) if free_pairs else x


def paired_query(query: Tensor, coefficients: int) -> Tensor:
    """Q' (..., D) with one pair for every coefficient, (..., 2W)."""
    # The score of a free pair is k_0 (q_0 cos + q_1 sin) + k_1 (q_1 cos - q_0 sin), so k_1 is
    # scored like a coefficient with the query pair (q_1, -q_0).
    free = coefficients - query.shape[-1] // 2
    if not free:
        return query
    first, second = query.chunk(2, dim=-1)
    return torch.cat((first, second[..., -free:], second, -first[..., -free:]), dim=-1)


def tile_length(coefficients: Tensor, heads: int) -> int:
    """Keys per tile that suit the device of the coefficients: a power of two.

    Args:
        coefficients: (B, G, S, W).
        heads: Query heads H.
    """
    batch, kv_heads, keys, pairs = coefficients.shape
    if coefficients.is_cuda:
        most = SINGLE_KEYS if heads == kv_heads else CUDA_KEYS
        fit = min(most, CUDA_TILE // (pairs * coefficients.element_size()))
    else:
        queries = heads // max(1, kv_heads)
        fit = CPU_TILE // max(1, batch * kv_heads * pairs * min(queries, 2))
        fit = min(fit, keys)  # the tables of a tile are computed for every token
    return 1 << (max(16, fit).bit_length() - 1)


def attend_half(
    query: Tensor,
    coefficients: Tensor,
    value: Tensor,
    frames: KeyFrames,
    *,
    attention_mask: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """softmax(scale * Q' · K' + mask) V of one query token, without materializing K'.

    Args:
        query: Q' (`maps.query_map`), (B, H, 1, D).
        coefficients: (B, G, S, W); G divides H.
        value: (B, G, S, Dv).
        frames: From `key_frames`, for these S keys.
        attention_mask: Boolean (True = may attend) or additive, (1 or B, 1, 1, S). A fully masked
            row gives zeros.
        scale: Multiplies the scores.

    Returns:
        (B, H, 1, Dv) in the dtype of the query.

    Raises:
        ValueError: If there is more than one query, the frames are for another length, or an input
            requires a gradient, which is not implemented.
    """
    if query.shape[-2] != 1 or frames.length != coefficients.shape[-2]:
        raise ValueError(
            f"expected one query token and frames for {coefficients.shape[-2]} keys, got "
            f"{query.shape[-2]} and frames for {frames.length}"
        )
    _check_no_gradient(query, coefficients, value)
    if kernels.supports(query):
        query = paired_query(query, coefficients.shape[-1])
        return kernels.decode.attend_half(query, coefficients, value, frames, attention_mask, scale)
    scores = half_scores(query, coefficients, frames, scale)
    output = weighted_values(scores, value, attention_mask)
    return output.flatten(1, 2).unsqueeze(-2).to(query.dtype)


def half_scores(query: Tensor, coefficients: Tensor, frames: KeyFrames, scale: float) -> Tensor:
    """scale * Q' · K' of `attend_half`, (B, G, H/G, S), in the memory of the frames."""
    query = paired_query(query, coefficients.shape[-1])
    batch, heads, _, width = query.shape
    kv_heads = coefficients.shape[1]
    queries = heads // kv_heads
    rows = (query.to(frames.cos.dtype) * scale).view(batch, kv_heads, queries, width)
    q0, q1 = rows.unsqueeze(1).chunk(2, dim=-1)
    cos = frames.cos[:, :, None, None]
    sin = frames.sin[:, :, None, None]
    rotated0 = torch.addcmul(q0 * cos, q1, sin)  # (B, tiles, G, H/G, W)
    rotated1 = torch.addcmul(q1 * cos, q0, sin, value=-1)
    keys, pairs = coefficients.shape[-2:]
    longest = min(frames.tile, keys)
    scores = frames.buffer("scores", batch, kv_heads, queries, keys)
    # One product for every coefficient of a tile, or both members of its pair.
    products = frames.buffer("products", batch, kv_heads, min(queries, 2), longest, pairs)
    for index, start in enumerate(range(0, keys, frames.tile)):
        t = coefficients[:, :, start : start + frames.tile]
        size = t.shape[-2]
        if t.dtype != scores.dtype:
            t = frames.buffer("wide", batch, kv_heads, longest, pairs)[:, :, :size].copy_(t)
        first = frames.first[:size]
        second = frames.second[:size]
        product = products[..., :size, :]
        part = scores[..., start : start + size]
        if queries == 1:
            # Rotate the query for every key, then multiply by t.
            torch.mul(first, rotated0[:, index], out=product[:, :, 0])
            product = product[:, :, 0].addcmul_(second, rotated1[:, index]).mul_(t)
            torch.sum(product, -1, out=part[:, :, 0])
        else:
            # Several queries share the keys: form both members once, then use a matrix product.
            torch.mul(t, first, out=product[:, :, 0])
            torch.mul(t, second, out=product[:, :, 1])
            rotated = torch.stack((rotated0[:, index], rotated1[:, index]), dim=2)
            torch.sum(rotated @ product.transpose(-2, -1), 2, out=part)
    return scores


def attend_half_at(
    query: Tensor,
    coefficients: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    attention_mask: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """`attend_half` for keys with these cos and sin, (S, R/2) or (B, S, R/2), for torch.compile.

    Compiled, the scores are one loop that reads the coefficients once. Without compilation, an
    intermediate result has one element per query head, key and coefficient.
    """
    _check_no_gradient(query, coefficients, value)
    kv_heads, _, coefficients_width = coefficients.shape[1:]
    wide = torch.promote_types(query.dtype, torch.float32)
    pairs = query.shape[-1] // 2
    cos, sin = over_all_pairs(cos, sin, pairs, wide)
    cos, sin = (_paired(x, coefficients_width - pairs).unsqueeze(-3) for x in (cos, sin))
    batch, heads = query.shape[:2]
    rows = paired_query(query, coefficients_width).to(wide) * scale
    q0, q1 = rows.view(batch, kv_heads, heads // kv_heads, 1, -1).chunk(2, dim=-1)
    scores = ((q0 * cos + q1 * sin) * coefficients.unsqueeze(2)).sum(-1)
    output = weighted_values(scores, value, attention_mask)
    return output.view(batch, heads, 1, -1).to(query.dtype)


def _check_no_gradient(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError(
            "half-cache decoding has no gradient: call it under torch.no_grad(), or compute the "
            "keys with key_map and use attend"
        )


def weighted_values(scores: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(scores + mask) V, (B, G, H/G, Dv); overwrites the scores."""
    if mask is not None:
        if mask.dtype == torch.bool:
            scores.masked_fill_(~mask, float("-inf"))
        else:
            scores.add_(mask)
    # The largest score becomes exp(0) = 1, so the sum is at least 1 unless no key is visible.
    highest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    weights = scores.sub_(highest).exp_()
    weights = weights.div_(weights.sum(-1, keepdim=True).clamp_(min=1.0)).to(value.dtype)
    if torch.compiler.is_compiling() and not value.is_cuda and weights.shape[-2] == 1:
        # For one row the compiler generates a slow loop; for two it calls the matmul library.
        return (torch.cat((weights, weights), dim=-2) @ value)[..., :1, :]
    return weights @ value
