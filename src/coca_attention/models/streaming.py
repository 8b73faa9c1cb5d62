"""A cache of constant size for endless text: the first tokens and the last ones (arXiv 2309.17453).

Legend: B batch, G key/value heads, C tokens of a pass, S sinks, W window, n tokens read before.

A token attends to the first S tokens of the text and to the last W, its own included, at the
positions that they have in the cache, 0 … S + W - 1. No position is ever larger, so whatever
depends on one (the slack form, a temperature) stays within what the model was trained on, provided
that S + W is at most the training length. The first S + W tokens are read as usual.

Keys are cached before rotation and rotated for every pass. A pass of C tokens gives the same as C
passes of one token: its tokens share the keys of the window, and every token has copies of the
sinks that lie as far before it as they would alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from coca_attention.errors import UserError
from coca_attention.models.configuration import rotation
from coca_attention.models.families import family_of, supported_families
from coca_attention.models.fields import GLOBAL, LOCAL, layer_types, rope_parameters
from coca_attention.models.key_positions import KeyPositions, rotary_is_by_layer
from coca_attention.ops import KeyFrames
from coca_attention.ops.positions import apply_rotary

FOLLOW_LENGTH = ("dynamic", "longrope")
"""Rope types whose frequencies change with the length of a pass in Transformers' own models."""


@dataclass
class _Pass:
    """What the layers of one type need in one pass.

    Attributes:
        copies: Copies of the sinks, C, or 1 where all tokens see them at the same position.
        positions: Positions of the keys that the layers return.
        mask: Which keys a token sees, (C, keys), or None for the usual mask.
        given: cos and sin with which the model has rotated the new keys, (1, C, R/2) each; None
            for coefficients, which are not rotated.
        slots: cos and sin for the keys that the layers return.
    """

    copies: int
    positions: Tensor
    mask: Tensor | None
    given: tuple[Tensor, Tensor] | None = None
    slots: tuple[Tensor, Tensor] | None = None


class StreamingLayer(DynamicLayer):
    """Keys before rotation, and values, of the first S and the last W - 1 tokens of one layer."""

    is_croppable = False

    def __init__(self, sinks: int, window: int, *, local: bool, interleaved: bool) -> None:
        super().__init__()
        self.sinks, self.window, self.interleaved = sinks, window, interleaved
        self.is_sliding = local
        self.cumulative_length = 0
        self.current: _Pass | None = None

    @property
    def kept(self) -> int:
        """Number of tokens cached."""
        return min(self.cumulative_length, self.sinks + self.window - 1)

    def get_seq_length(self) -> int:
        """Number of tokens read."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys in a pass and the index of the first, as if they were consecutive."""
        return self.kept + query_length, self.cumulative_length - self.kept

    def get_max_length(self) -> int:
        """Number of tokens that a token sees at most."""
        return self.sinks + self.window

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values, drop what has left the window, and return what the pass sees."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        now, self.current, length = self.current, None, key_states.shape[-2]
        if now is None:
            raise UserError(
                "a StreamingCache works only in the model that it was made for: make one with "
                "StreamingCache(model, window=…, sinks=…)"
            )
        assert self.keys is not None and self.values is not None  # initialized
        if now.given is not None:
            key_states = _unrotate(key_states, *now.given, self.interleaved)
        keys = torch.cat((self.keys, key_states), dim=-2)
        values = torch.cat((self.values, value_states), dim=-2)
        self.cumulative_length += length
        self.keys, self.values = (_kept(x, self.sinks, self.window - 1) for x in (keys, values))
        keys, values = (_copied(x, self.sinks, now.copies) for x in (keys, values))
        if now.slots is not None:
            keys = apply_rotary(keys, *now.slots, self.interleaved)
        return keys, values


def _kept(x: Tensor, first: int, last: int) -> Tensor:
    """The first and the last tokens of (B, G, tokens, D)."""
    tokens = x.shape[-2]
    if tokens <= first + last:
        return x
    return torch.cat((x[..., :first, :], x[..., tokens - last :, :]), dim=-2)


def _copied(x: Tensor, sinks: int, copies: int) -> Tensor:
    """(B, G, tokens, D) with copies of the sinks, one for each token of the pass."""
    if copies == 1 or not sinks:
        return x
    return torch.cat((x[..., :sinks, :].repeat(1, 1, copies, 1), x[..., sinks:, :]), dim=-2)


def _unrotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Inverse of `apply_rotary`, also of tables that are rounded or scaled."""
    size = cos * cos + sin * sin
    return apply_rotary(x, cos / size, -sin / size, interleaved)


class StreamPositions(KeyPositions):
    """Positions of a half `StreamingCache` in one pass.

    Args:
        body: The decoder.
        passes: By layer type.
        start: Position of the first token of the pass.
        excess: How far the tokens of the pass would lie beyond the last position, (C,).
    """

    def __init__(self, body: Any, passes: dict[str, _Pass], start: int, excess: Tensor) -> None:
        self.body, self.passes, self.excess, self.tables = body, passes, excess, {}
        alone = len(excess) == 1
        self.apart = not alone and bool(excess[-1] > 0)
        self.position_ids = excess.unsqueeze(0)  # of the shape and device of the positions
        self.start = start
        self.first_position = torch.tensor([start], device=excess.device) if alone else None

    def frames(
        self, layer_type: str | None, first: int, keys: int, pairs: int, tile: int
    ) -> KeyFrames | None:
        """Tables for `attend_half`: the last key is that of the token itself."""
        return super().frames(layer_type, 1 - keys, keys, pairs, tile)

    def places(self, layer_type: str | None, first: int, keys: int) -> tuple[Tensor, Tensor]:
        """Positions of the tokens and of their keys, whose differences are distances."""
        steps = torch.arange(len(self.excess), device=self.excess.device) + self.start
        return steps.unsqueeze(0), self.passes[layer_type or GLOBAL].positions.unsqueeze(0)

    def rotary(self, layer_type: str | None, first: int, keys: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the keys that layers of a type return, (1, keys, R/2) each."""
        kind = layer_type or GLOBAL
        if kind not in self.tables:
            self.tables[kind] = _tables(self.body, self.passes[kind].positions, kind)
        return self.tables[kind]

    def turned(self, query: Tensor, layer_type: str | None) -> Tensor:
        """Q' of tokens at the last position, turned to where their keys are.

        Rotating Q' by an angle does what rotating all keys back by it would do. So tokens at the
        same position, with keys that differ by a shift, can share these keys.
        """
        if not self.apart:
            return query
        kind = layer_type or GLOBAL
        if ("turn", kind) not in self.tables:
            config = self.body.config
            found = rotation(config, kind if rotary_is_by_layer(config) else None)
            angles = found.angles(self.excess)
            angles = F.pad(angles, (0, query.shape[-1] // 2 - angles.shape[-1]))
            wide = torch.promote_types(query.dtype, torch.float32)
            self.tables["turn", kind] = angles.cos().to(wide), angles.sin().to(wide)
        return apply_rotary(query, *self.tables["turn", kind])


class StreamingCache(Cache):
    """Keys and values of the first ``sinks`` and the last ``window`` tokens, for endless text.

    Pass it as ``past_key_values`` to a model or to ``generate``. Local layers keep their own window
    and need no sinks. Memory is constant; a prompt longer than window + sinks is read in pieces by
    ``generate(..., prefill_chunk_size=64)``, with the same result for every size. Rows of a batch
    must be equally long, as there is no padding.

    Args:
        model: A CoCA model with ``kv_cache="half"``, or the rotary model of a supported family.
        window: W, the last tokens that a token sees, its own included.
        sinks: S, the first tokens of the text, which every token sees.

    Raises:
        UserError: If a size is out of range or the model is not supported.

    Example:
        >>> cache = StreamingCache(model, window=252, sinks=4)
        >>> model.generate(ids, past_key_values=cache, prefill_chunk_size=64, max_new_tokens=10_000)
    """

    def __init__(self, model: PreTrainedModel, *, window: int, sinks: int = 4) -> None:
        if window < 1:
            raise UserError(f"the window must be at least 1 token, got {window}")
        if sinks < 0:
            raise UserError(f"the number of sinks must be 0 or more, got {sinks}")
        family, config = family_of(model), model.config.get_text_config()
        if family is None:
            raise UserError(
                f"{type(model).__name__} cannot read a stream; supported are the causal language "
                f"models, vanilla or CoCA, of {supported_families(model)}"
            )
        self.collinear = isinstance(model, family.causal_lm)
        if self.collinear and config.kv_cache != "half":
            raise UserError(
                "a stream assigns positions to cached keys anew, and a CoCA model's full cache "
                'holds keys after rotation: set model.config.kv_cache = "half"'
            )
        if config._attn_implementation not in ("sdpa", "eager"):
            raise UserError(
                f"streams need the attention implementation sdpa or eager; this model has "
                f"{config._attn_implementation!r}: call model.set_attn_implementation('sdpa')"
            )
        local = getattr(config, "sliding_window", None)
        kinds = layer_types(config)
        if GLOBAL not in kinds:
            raise UserError(
                "every layer of this model sees a window of its own, so its memory is constant "
                "without streaming"
            )
        for kind in set(kinds):
            rope_type = rope_parameters(config, kind).get("rope_type", "default")
            follows = rope_type in FOLLOW_LENGTH
            if self.collinear:
                follows = rotation(config, kind).follows_length
            if follows:
                raise UserError(
                    f"rope_type {rope_type!r} changes its frequencies with the length, which a "
                    'stream does not have: set_rotary_scaling(model, "ntk" or "none")'
                )
        if LOCAL in kinds and (local is None or local > window + sinks):
            raise UserError(
                f"local layers of this model see {local} tokens: window + sinks must be at least "
                f"that, got {window + sinks}"
            )
        self.sizes: dict[str, tuple[int, int]] = {GLOBAL: (sinks, window), LOCAL: (0, local or 0)}
        adjacent = family.layout.interleaved
        layers = [
            StreamingLayer(*self.sizes[kind], local=kind == LOCAL, interleaved=adjacent)
            for kind in kinds
        ]
        super().__init__(layers=layers)  # pyright: ignore[reportArgumentType]
        self.kinds, self.limit = kinds, window + sinks
        limit = rotation(config).max_distance if self.collinear else None
        if limit is not None and self.limit > limit:
            raise UserError(
                f"{self.limit} tokens in sight are more than a stream of this model can hold: its "
                f"max_distance is {limit}: choose a smaller window"
            )
        self._prepared: tuple[tuple[int, int], dict[str, _Pass], dict[str, Any]] | None = None
        body: Any = model.base_model
        if _place not in body._forward_pre_hooks.values():
            body.register_forward_pre_hook(_place, with_kwargs=True)

    @property
    def nbytes(self) -> int:
        """Bytes of the cached keys and values."""
        layers: Any = self.layers
        tensors = [x for layer in layers for x in (layer.keys, layer.values) if x is not None]
        return sum(x.numel() * x.element_size() for x in tensors)

    def place(self, body: Any, length: int, device: Any) -> dict[str, Any]:
        """Prepare the layers for a pass of ``length`` tokens.

        Returns:
            The arguments of the decoder that say where the tokens are and what they see.
        """
        start = min(self.get_seq_length(), self.limit - 1)
        # Once the window is full, a pass is like the one before.
        if self._prepared is None or self._prepared[0] != (start, length):
            self._prepared = (start, length), *self._prepare(body, start, length, device)
        _, passes, arguments = self._prepared
        layers: Any = self.layers
        for layer, kind in zip(layers, self.kinds, strict=True):
            layer.current = passes[kind]
        return arguments

    def _prepare(
        self, body: Any, start: int, length: int, device: Any
    ) -> tuple[dict[str, _Pass], dict[str, Any]]:
        """What the layers of each type need for a pass, and the decoder's arguments."""
        steps = torch.arange(start, start + length, device=device)
        excess = (steps - self.limit + 1).clamp(min=0)
        several = length > 1 and start + length > self.limit
        passes = {
            kind: _pass(*self.sizes[kind], start, steps, excess, several)
            for kind in dict.fromkeys(self.kinds)
        }
        arguments: dict[str, Any] = {"position_ids": steps.unsqueeze(0), "attention_mask": None}
        if several:
            masks = {k: _mask(body.config, p.mask, body.dtype) for k, p in passes.items()}
            arguments["attention_mask"] = masks if len(masks) > 1 else masks[GLOBAL]
        if self.collinear:
            arguments["position_ids"] = (steps - excess).unsqueeze(0)
            arguments["key_positions"] = StreamPositions(body, passes, start, excess)
        else:
            for kind, one in passes.items():
                one.given = _tables(body, steps, kind)
                one.slots = _tables(body, one.positions, kind)
        return passes, arguments


@contextmanager
def streaming(model: PreTrainedModel, *, window: int, sinks: int = 4) -> Iterator[StreamingCache]:
    """A `StreamingCache` for a model; a CoCA model keeps half caches inside the ``with`` block."""
    config: Any = model.config.get_text_config()
    kind = getattr(config, "kv_cache", None)
    try:
        if kind is not None:
            config.kv_cache = "half"
        yield StreamingCache(model, window=window, sinks=sinks)
    finally:
        if kind is not None:
            config.kv_cache = kind


def _place(body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a decoder: positions and masks for passes with a `StreamingCache`."""
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, StreamingCache):
        return None
    tokens = args[0] if args else kwargs.get("input_ids")
    tokens = kwargs["inputs_embeds"] if tokens is None else tokens
    mask, length = kwargs.get("attention_mask"), tokens.shape[1]
    if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask[:, -length:].all()):
        raise UserError("a stream has no padding: give rows of equal length, or one at a time")
    return args, {**kwargs, **cache.place(body, length, tokens.device)}


def _pass(
    sinks: int,
    window: int,
    start: int,
    steps: Tensor,
    excess: Tensor,
    several: bool,
) -> _Pass:
    """Positions and mask of the keys of one layer type."""
    kept, device = min(start, sinks + window - 1), steps.device
    index = torch.arange(kept + len(steps), device=device)
    positions = start - kept + index
    if not several:
        return _Pass(1, positions, None)
    own, index = index[kept:].unsqueeze(-1), index[sinks:]
    mask = (index <= own) & (index > own - window)
    if sinks:
        sink = torch.arange(sinks, device=device)
        positions = torch.cat(((excess.unsqueeze(-1) + sink).flatten(), positions[sinks:]))
        one = torch.eye(len(steps), dtype=torch.bool, device=device).unsqueeze(-1)
        copies = one & (sink <= own).unsqueeze(1)
        mask = torch.cat((copies.flatten(1), mask), dim=-1)
    return _Pass(len(steps), positions, mask)


def _mask(config: Any, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(1, 1, C, keys): boolean, or additive for eager attention."""
    assert mask is not None
    mask = mask[None, None]
    if config._attn_implementation == "eager":
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return mask


def _tables(body: Any, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The model's own cos and sin at positions, one column per pair, (1, positions, R/2) each."""
    like = torch.empty((), dtype=body.dtype, device=positions.device)
    where = (kind,) if rotary_is_by_layer(body.config) else ()
    cos, sin = body.rotary_emb(like, positions.unsqueeze(0), *where)[:2]
    if hasattr(body.config, "coca_form"):
        return cos, sin
    # Every pair has two equal columns, half the width apart or (Cohere) side by side.
    pairs = cos.shape[-1] // 2
    apart = torch.equal(cos[..., :pairs], cos[..., pairs:])
    wide = torch.promote_types(cos.dtype, torch.float32)
    cos, sin = (x[..., :pairs] if apart else x[..., ::2] for x in (cos, sin))
    return cos.to(wide), sin.to(wide)
