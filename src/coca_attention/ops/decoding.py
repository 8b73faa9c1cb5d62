"""Attention of one new token over a half cache: coefficients t in place of whole keys.

Legend: B batch, S keys, H query heads, G key/value heads, D head width, P = D/2 rotary pairs, N
keys of a tile.

A key is R_n times something that holds t alone (`maps.key_turn`), and rotations add up: for the
keys n = n_0 + r of a tile, Q' · K'_n = (R_{-n_0} Q') · K'_r. So the query is turned once a tile,
and one table of N rows turns the coefficients of every tile: a step reads t and V and nothing else
of the cache's length, three quarters of what whole keys and values would be.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from coca_attention.ops import kernels
from coca_attention.ops.maps import Form, key_turn, over_all_pairs

# Numbers formed of a tile's coefficients on a CPU, over all heads: they stay in its caches.
CPU_TILE = 1 << 18
# Keys of a tile in the CUDA kernel at most, and bytes of their coefficients: with wider tiles it
# asks for more shared memory than there is (with these for 74 KiB at most).
CUDA_KEYS, CUDA_TILE = 64, 1 << 13


@dataclass(frozen=True)
class KeyFrames:
    """How the query and the coefficients of every tile are turned.

    Attributes:
        cos: cos(n_0 θ_j) of every tile's first position n_0, (1 or B, tiles, P), float32 or wider.
        sin: Like cos.
        first: What t is multiplied by for the first members of K's pairs at r, (N, P).
        second: Like first, for the second members.
        length: Keys S.
        held: What `room` gave out, so that one step at a time may use the frames.
    """

    cos: Tensor
    sin: Tensor
    first: Tensor
    second: Tensor
    length: int
    held: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def tile(self) -> int:
        """Keys of a tile, N."""
        return self.first.shape[0]

    def room(self, name: str, *shape: int) -> Tensor:
        """Uninitialised room for what a step computes on its way, in the dtype of the tables.

        Every layer of a model gets the same, one after the other: fresh memory would cost its page
        faults anew in each.
        """
        held = self.held.get(name)
        if held is None or held.shape != shape:
            with torch.inference_mode(False):  # or it could not be written to outside that mode
                held = self.held[name] = self.first.new_empty(shape)
        return held


def key_frames(
    first_position: Tensor,
    length: int,
    theta: Tensor,
    *,
    form: Form,
    tile: int,
    pairs: int,
    magnitude: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> KeyFrames:
    """Tables for keys at consecutive positions; they serve every layer of a model.

    Args:
        first_position: Position of key 0 of every row of the batch, (1,) or (B,).
        length: Keys S.
        theta: Angle per token of the rotated pairs, (R/2,), float64 (`inverse_frequencies`).
        form: ``slack``, ``strict`` or ``linear``.
        tile: Keys of a tile, see `tile_length`.
        pairs: All pairs of a head, P; those behind the rotated ones have angle 0.
        magnitude: What cos and sin are multiplied by (`RotaryScaling.magnitude`).
        dtype: dtype of the tables, float32 or wider.
    """
    device = first_position.device
    theta = theta.to(device)
    starts = torch.arange(0, length, tile, device=device)
    angles = (first_position.unsqueeze(-1) + starts).to(theta.dtype).unsqueeze(-1) * theta
    inside = torch.arange(tile, device=device).to(theta.dtype).unsqueeze(-1) * theta
    missing = (0, pairs - theta.shape[0])
    angles = F.pad(angles, missing)
    cos = F.pad(inside.cos() * magnitude, missing, value=1.0)
    sin = F.pad(inside.sin() * magnitude, missing)
    first, second = (turn.to(dtype).contiguous() for turn in key_turn(cos, sin, form))
    return KeyFrames(angles.cos().to(dtype), angles.sin().to(dtype), first, second, length)


def tile_length(coefficients: Tensor, heads: int) -> int:
    """Keys of a tile that suit where the coefficients (B, G, S, P) lie: a power of two.

    Args:
        coefficients: t.
        heads: Query heads H.
    """
    batch, groups, _, pairs = coefficients.shape
    if coefficients.is_cuda:
        fit = min(CUDA_KEYS, CUDA_TILE // (pairs * coefficients.element_size()))
    else:
        fit = CPU_TILE // max(1, batch * groups * pairs * _members(heads // max(1, groups)))
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
    """softmax(scale * Q' · K' + mask) V of one query token, K' never written out.

    Args:
        query: Q' (`maps.query_map`), (B, H, 1, D).
        coefficients: t, (B, G, S, P); G divides H.
        value: (B, G, S, Dv).
        frames: From `key_frames`, for these S keys.
        attention_mask: Boolean (True = may attend), (1 or B, 1, 1, S). A row that may attend to
            nothing gives zeros.
        scale: Multiplies the scores.

    Returns:
        (B, H, 1, Dv) in the dtype of the query.

    Raises:
        ValueError: If there is more than one query, or the frames are for another length, or a
            gradient is asked for: there is none.
    """
    if query.shape[-2] != 1 or frames.length != coefficients.shape[-2]:
        raise ValueError(
            f"expected one query token and frames for {coefficients.shape[-2]} keys, got "
            f"{query.shape[-2]} and frames for {frames.length}"
        )
    _check_no_gradient(query, coefficients, value)
    if kernels.serve(query):
        return kernels.decode.attend_half(query, coefficients, value, frames, attention_mask, scale)
    batch, heads, _, width = query.shape
    groups = coefficients.shape[1]
    rows = query.to(frames.cos.dtype).view(batch, groups, heads // groups, width)
    q0, q1 = rows.unsqueeze(1).chunk(2, dim=-1)
    cos, sin = frames.cos[:, :, None, None], frames.sin[:, :, None, None]
    turned0 = torch.addcmul(q0 * cos, q1, sin)  # (B, tiles, G, H/G, P)
    turned1 = torch.addcmul(q1 * cos, q0, sin, value=-1)
    scores = _scores(turned0, turned1, coefficients, frames)
    return _read(scores, value, attention_mask, scale).view(batch, heads, 1, -1).to(query.dtype)


def attend_half_at(
    query: Tensor,
    coefficients: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    form: Form,
    attention_mask: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """`attend_half` for keys at any positions, in one expression: meant for torch.compile.

    Compiled, scores are one loop over t, which is read once. As it stands it writes a number for
    every query head, key and pair.

    Args:
        query: Q' (`maps.query_map`), (B, H, 1, D).
        coefficients: t, (B, G, S, P); G divides H.
        value: (B, G, S, Dv).
        cos: cos of the angles at the keys' positions, (S, R/2) or (B, S, R/2), see `query_map`.
        sin: Like cos.
        form: ``slack``, ``strict`` or ``linear``.
        attention_mask: As for `attend_half`.
        scale: Multiplies the scores.

    Returns:
        (B, H, 1, Dv) in the dtype of the query.

    Raises:
        ValueError: If a gradient is asked for: there is none.
    """
    _check_no_gradient(query, coefficients, value)
    batch, heads, _, width = query.shape
    groups = coefficients.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    cos, sin = over_all_pairs(cos, sin, coefficients.shape[-1], wide)
    q0, q1 = query.to(wide).view(batch, groups, heads // groups, 1, width).chunk(2, dim=-1)
    if form == "slack":  # q0 (cos - sin) + q1 (sin + cos), so that the loop multiplies by less
        q0, q1 = q0 + q1, q1 - q0
    scores = ((q0 * cos.unsqueeze(-3) + q1 * sin.unsqueeze(-3)) * coefficients.unsqueeze(2)).sum(-1)
    return _read(scores, value, attention_mask, scale).view(batch, heads, 1, -1).to(query.dtype)


def _check_no_gradient(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError(
            "half-cache decoding has no gradient: call it under torch.no_grad(), or form the keys "
            "(key_map) and use attend"
        )


def _read(scores: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale * scores + mask) V in the room of the scores, (B, G, H/G, Dv)."""
    if scale != 1.0:
        scores.mul_(scale)
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    # The largest score gives 1, so the sum is at least that, or nothing is seen.
    highest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    weights = scores.sub_(highest).exp_()
    weights = weights.div_(weights.sum(-1, keepdim=True).clamp_(min=1.0)).to(value.dtype)
    if torch.compiler.is_compiling() and not value.is_cuda and weights.shape[-2] == 1:
        # For one row the compiler writes a slow loop of its own, for two it calls the library.
        return (torch.cat((weights, weights), dim=-2) @ value)[..., :1, :]
    return weights @ value


def _scores(turned0: Tensor, turned1: Tensor, coefficients: Tensor, frames: KeyFrames) -> Tensor:
    """Q' · K', (B, G, H/G, S), tile by tile in room that stays in a CPU's caches.

    Args:
        turned0: First members of the pairs of Q' turned for every tile, (B, tiles, G, H/G, P).
        turned1: Like turned0, second members.
        coefficients: t, (B, G, S, P).
        frames: The tables of these keys.
    """
    batch, _, groups, queries, pairs = turned0.shape
    keys = coefficients.shape[-2]
    members = _members(queries)
    longest = min(frames.tile, keys)
    scores = frames.room("scores", batch, groups, queries, keys)
    room = frames.room("products", batch, groups, members, longest, pairs)
    for index, start in enumerate(range(0, keys, frames.tile)):
        t = coefficients[:, :, start : start + frames.tile]
        size = t.shape[-2]
        if t.dtype != scores.dtype:
            t = frames.room("wide", batch, groups, longest, pairs)[:, :, :size].copy_(t)
        first, second, made = frames.first[:size], frames.second[:size], room[..., :size, :]
        part = scores[..., start : start + size]
        if queries == 1:
            # The query of the head takes the turns of all keys, and t is a factor like others.
            torch.mul(first, turned0[:, index], out=made[:, :, 0])
            made = made[:, :, 0].addcmul_(second, turned1[:, index]).mul_(t)
            torch.sum(made, -1, out=part[:, :, 0])
        else:
            # Several queries share keys, which are formed once: both members, one product.
            torch.mul(t, first, out=made[:, :, 0])
            torch.mul(t, second, out=made[:, :, 1])
            turned = torch.stack((turned0[:, index], turned1[:, index]), dim=2)
            torch.sum(turned @ made.transpose(-2, -1), 2, out=part)
    return scores


def _members(queries: int) -> int:
    """How many products of a tile's coefficients are held for so many queries of a key."""
    return 1 if queries == 1 else 2
