"""Attention of one layer in one pass where Transformers' attention functions do not compute it.

A decay, limited distances, windows without a mask, and one token over a half cache. Every method is
exact.

Legend: B batch, T query length, S key length or slots of a cache, H query heads, G key/value heads,
D head width, P = D/2 rotary pairs, F free pairs, R rotary width.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coca_attention.models.configuration import free_pairs, rope_parameters, rotation, window_of
from coca_attention.models.rotary import Angles
from coca_attention.ops import attend, attend_half, key_frames, key_map, tile_length
from coca_attention.ops.clipped import Clipping, attend_clipped, far_query_map, side_by_side
from coca_attention.ops.decoding import KeyFrames, attend_half_at
from coca_attention.ops.linear import Turns
from coca_attention.ops.opaque import compiling
from coca_attention.ops.positions import Decay
from coca_attention.ops.sight import with_bias


@torch.library.custom_op("coca_attention::materialized", mutates_args=())
def materialized(x: Tensor) -> Tensor:
    """Write x to memory, because torch.compile would recompute it in every layer and head."""
    return x.clone()


@materialized.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class KeyPositions:
    """Positions of all cache slots in one forward pass, and their tables, shared by all layers."""

    def __init__(self, body: Any, cache: Any, position_ids: Tensor, mask: Tensor | None) -> None:
        """position_ids: (1 or B, T). mask: (B, S), 1 for every real token so far, or None."""
        self.config, self.position_ids = body.config, position_ids
        self.dtype = torch.promote_types(body.dtype, torch.float32)
        device, length = position_ids.device, position_ids.shape[1]
        slots, start = length, 0
        if cache is not None:
            sizes = [cache.get_mask_sizes(length, index) for index in range(len(body.layers))]
            slots = max(keys + first for keys, first in sizes)
            start = cache.get_seq_length()  # a tensor for static caches
        # Whether this pass has the last slots, not so in static caches, and there is no padding
        # between real tokens. Only limits of distances ask.
        self.consecutive = isinstance(start, int) and slots == start + length
        if mask is not None and rope_parameters(self.config).get("max_distance") is not None:
            begins = F.pad(mask, (1, 0)).diff(dim=-1) > 0
            whole = not compiling() and bool((begins.sum(-1) <= 1).all())
            self.consecutive = self.consecutive and whole
        slot = torch.arange(slots, device=device)
        # Index in this pass, negative for earlier tokens. Computed here, because a static cache
        # updates its length in place. Earlier tokens are assumed to be consecutive.
        self.index_in_pass = slot - start
        if mask is None:
            self.earlier = position_ids[:, :1] + self.index_in_pass
        else:
            # Count real tokens back from the last one of this pass, so that padding anywhere does
            # not shift positions.
            mask = F.pad(mask, (0, slots - mask.shape[1]))
            real = mask[:, (start + torch.arange(length, device=device))]
            index = (real * torch.arange(length, device=device)).argmax(-1, keepdim=True)
            counted = mask.cumsum(-1)
            self.earlier = position_ids.expand(len(mask), -1).gather(1, index) - (
                counted.gather(1, index + start) - counted
            )
        self.first_position = None
        if length == 1 and not torch.compiler.is_compiling():
            # One new token: use consecutive positions if the mask has no gaps.
            first = position_ids[:, 0] - start
            if mask is None or bool(((first[:, None] + slot == self.earlier) | (mask == 0)).all()):
                self.first_position = first
        self._tables: dict[Any, Any] = {}

    def places(self, layer_type: str | None, first: int, keys: int) -> tuple[Tensor, Tensor]:
        """Positions of the tokens of this pass, and of slots first … first + keys - 1."""
        return self.position_ids, self._slots(layer_type)[:, first : first + keys]

    def _slots(self, layer_type: str | None) -> Tensor:
        """Positions of all slots, (1 or B, S)."""
        given = self.position_ids[:, self.index_in_pass.clamp(0, self.position_ids.shape[1] - 1)]
        return torch.where(self.index_in_pass < 0, self.earlier, given).clamp(min=0)

    def tables(self, layer_type: str | None, first: int, keys: int) -> tuple[Tensor, Tensor]:
        """cos and sin of slots first … first + keys - 1, (1 or B, keys, R/2) each."""
        if layer_type not in self._tables:
            tables = rotation(self.config, layer_type).tables(self._slots(layer_type), self.dtype)
            if compiling():
                tables = materialized(tables[0]), materialized(tables[1])
            self._tables[layer_type] = tables
        cos, sin = self._tables[layer_type]
        return cos[:, first : first + keys], sin[:, first : first + keys]

    def near_and_far(
        self, layer_type: str | None, first: int, keys: int, mask: BlockMask, limit: int
    ) -> BlockMask:
        """A mask that shows the near ones among the keys, and the far ones among as many more."""
        kind = (layer_type, first, keys, limit)
        if kind not in self._tables:
            batch, _, length, _ = mask.shape
            places = self.places(layer_type, first, keys)
            queries, slots = (x.expand(batch, -1) for x in places)

            def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
                slot = key % keys
                is_near = queries[b, query] - slots[b, slot] < limit
                return mask.mask_mod(b, h, query, slot) & (is_near == (key < keys))

            # Compiled it forms no mask of all queries and keys.
            on_cpu = slots.device.type == "cpu"
            make = create_block_mask if on_cpu else torch.compile(create_block_mask)
            sizes = batch, None, length, 2 * keys
            self._tables[kind] = make(visible, *sizes, device=slots.device)
        return self._tables[kind]

    def frames(
        self, layer_type: str | None, first: int, keys: int, pairs: int, tile: int
    ) -> KeyFrames | None:
        """Tables of `attend_half` for these slots in tiles; None if positions do not allow them."""
        if self.first_position is None:
            return None
        kind = (layer_type, first, keys, pairs, tile)
        if kind not in self._tables:
            turning = rotation(self.config, layer_type)
            if turning.follows_length:
                return None
            self._tables[kind] = key_frames(
                self.first_position + first,
                keys,
                turning,
                tile=tile,
                pairs=pairs,
                free_pairs=free_pairs(self.config, layer_type),
                dtype=self.dtype,
            )
        return self._tables[kind]


class PagedPositions(KeyPositions):
    """Positions in Transformers' continuous batching: several texts behind each other in a row."""

    def __init__(
        self, body: Any, position_ids: Tensor, ends: Tensor, key_ends: dict[str, Tensor]
    ) -> None:
        """position_ids: (1, T). ends: of N texts among the tokens, from 0 on, (N + 1,).

        key_ends: those among the keys, by layer type.
        """
        self.config, self.position_ids = body.config, position_ids
        self.dtype = torch.promote_types(body.dtype, torch.float32)
        self.consecutive, self.first_position = False, None
        self.last, self.key_ends = position_ids[0, ends[1:].long() - 1], key_ends
        self._tables = {}

    def _slots(self, layer_type: str | None) -> Tensor:
        """Positions (1, S) of all keys, counted back from the last token of their text."""
        kind = layer_type if layer_type in self.key_ends else next(iter(self.key_ends))
        ends = self.key_ends[kind].long()
        lengths = ends.diff()
        slots = torch.arange(int(ends[-1]), device=ends.device)
        shifts = self.last - (ends[1:] - 1)
        return (slots + shifts.repeat_interleave(lengths))[None]


@dataclass(frozen=True)
class DecayBetween:
    """A decay in the place of Transformers' ``position_bias``, which FlexAttention indexes."""

    decay: Decay
    queries: Tensor  # positions (B, T)
    keys: Tensor  # positions (B, S)
    dtype: torch.dtype  # of the addends

    def __getitem__(self, at: Any) -> Any:
        """The addend of one score, by batch, head, query and key."""
        batch, _, query, key = at
        return self.decay.of(self.queries[batch, query] - self.keys[batch, key], self.dtype)


class Band(NamedTuple):
    """A mask that layers form in blocks: nothing later, out of a window or of another segment."""

    segments: Tensor | None = None
    """A number for every token so far, (B, S) int64: its document, or whether it is padding."""


class Pass(NamedTuple):
    """What one forward pass of a decoder hands to all layers."""

    positions: KeyPositions | None = None  # with a half cache, a decay or limited distances
    band: Band | None = None  # in place of Transformers' masks
    # Mask and angles of each layer type, where all share one set of rotary parameters.
    roles: dict[str, tuple[Any, Angles]] | None = None
    # With linear attention: its positions, and which of these tokens are real (B, T).
    linear: tuple[Turns, Tensor | None] | None = None

    def layer(self, module: Any, mask: Any, angles: Any, cache: Any, length: int) -> "LayerPass":
        """What an attention module needs of it, given Transformers' mask and angles."""
        if self.roles is not None:
            mask, angles = self.roles[module.layer_type]
        first = 0
        if self.positions is not None and hasattr(cache, "get_mask_sizes"):
            _, first = cache.get_mask_sizes(length, module.layer_idx)
        mask = mask if self.band is None else None
        return LayerPass(module, mask, self.band, angles, self.positions, first)


class LayerPass(NamedTuple):
    """What a layer attends with in one pass, beside queries, keys and values.

    Outputs are (B, T, H, D), as those of Transformers' attention functions.
    """

    module: Any
    mask: Any  # in the format of the attention implementation
    band: Band | None
    angles: Angles
    positions: KeyPositions | None
    first: int  # slot that the layer's cache returns

    @property
    def kind(self) -> str | None:
        """Type of the layer, where families or roles have several."""
        return getattr(self.module, "layer_type", None)

    @property
    def window(self) -> int | None:
        """Tokens in sight, the query's own included; None for all."""
        return getattr(self.module, "sliding_window", window_of(self.module.config))

    @property
    def implementation(self) -> str:
        """Name of the attention function."""
        return self.module.config._attn_implementation

    @property
    def dropout(self) -> float:
        """Probability of dropping an attention weight."""
        return self.module.attention_dropout if self.module.training else 0.0

    @property
    def _at(self) -> KeyPositions:
        assert self.positions is not None  # passed by the decoder wherever it is asked for
        return self.positions

    def _options(self, keys: int) -> dict[str, Any]:
        """Those that `attend` and `attend_clipped` share, for the last so many keys."""
        segments = None if self.band is None else self.band.segments
        return {
            "attention_mask": self.mask,
            "segments": None if segments is None else segments[:, segments.shape[-1] - keys :],
            "dropout": self.dropout,
        }

    def _begins(self, query: Tensor) -> bool:
        """Whether these are the first queries of an empty cache, which may have more slots."""
        return self.mask is None and self.band is None and query.shape[-2] > 1

    def within_limits(self, keys: int) -> "LayerPass":
        """The same without a largest distance if no key is beyond it; see `_check_limits`."""
        if self.angles.far is None:
            return self
        beyond = min(keys, self.window or keys) > self.angles.far.max_distance
        self._check_limits(beyond)
        return self if beyond else self._replace(angles=self.angles._replace(far=None))

    def key_tables(self, keys: int) -> tuple[Tensor, Tensor]:
        """cos and sin of all keys, (1 or B, keys, R/2) each, where the cache has none of them."""
        if self.positions is None or keys == self.angles.cos.shape[-2]:
            # Without positions Transformers has created the cache, which was empty before.
            return self.angles.cos, self.angles.sin
        return self.positions.tables(self.kind, self.first, keys)

    def attend_coefficients(
        self, projected: Tensor, query: Tensor, coefficients: Tensor, value: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Output and weights over coefficients (B, G, S, P + F); None for both where keys do."""
        if self.angles.far is not None:
            return self._attend_far(projected, query, coefficients, value)
        if self.positions is None or not self._decodes(query):
            return None, None
        return self._attend_half(query, coefficients, value), None

    def _decodes(self, query: Tensor) -> bool:
        """Whether `attend_half` takes the place of ``scaled_dot_product_attention``."""
        mask = self.mask
        return (
            query.shape[-2] == 1
            and self.implementation == "sdpa"
            and (mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1))
            and not (self.module.training or torch.is_grad_enabled())
        )

    def _attend_half(self, query: Tensor, coefficients: Tensor, value: Tensor) -> Tensor | None:
        """One token over a half cache; None if tokens are not consecutive, unless compiled."""
        keys = coefficients.shape[-2]
        mask = self.mask if self.angles.decay is None else self._with_decay(query, keys)
        options: dict[str, Any] = {"attention_mask": mask, "scale": self.module.kernel_scale}
        if compiling():
            tables = self._at.tables(self.kind, self.first, keys)
            return attend_half_at(query, coefficients, value, *tables, **options).transpose(1, 2)
        tile, pairs = tile_length(coefficients, query.shape[1]), self.module.head_dim // 2
        frames = self._at.frames(self.kind, self.first, keys, pairs, tile)
        if frames is None:
            return None
        return attend_half(query, coefficients, value, frames, **options).transpose(1, 2)

    def _attend_far(
        self, projected: Tensor, query: Tensor, coefficients: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Limited distances, see `attend_clipped`."""
        far, length = self.angles.far, query.shape[2]
        assert far is not None
        free_pairs, keys = self.module.free_pairs, coefficients.shape[-2]
        consecutive, (cos, sin) = self._at.consecutive, self.key_tables(keys)
        if self._begins(query) and not consecutive:
            coefficients, value, keys = (
                coefficients[..., :length, :],
                value[..., :length, :],
                length,
            )
            consecutive = True
        flexible = self.implementation == "flex_attention"
        near = 0
        if consecutive and not flexible:
            near = max(0, keys - length - far.max_distance + 1)
        cos, sin = cos[:, near:keys], sin[:, near:keys]
        far_query = self.module.map_query(projected, self.angles, *far.tables)
        tensors = (
            query,
            key_map(coefficients[..., near:, :], cos, sin, free_pairs=free_pairs),
            far_query_map(far_query, free_pairs),
            coefficients,
        )
        if flexible:
            query, *parts = side_by_side(*tensors)
            places = self.kind, self.first, keys, self.mask, far.max_distance
            return ALL_ATTENTION_FUNCTIONS["flex_attention"](
                self.module,
                query,
                torch.cat(parts, dim=-2),
                torch.cat((value, value), dim=-2),
                self._at.near_and_far(*places),
                scaling=self.module.kernel_scale,
                dropout=self.dropout,
            )
        clipping = Clipping(
            far.max_distance,
            consecutive,
            is_causal=self.mask is None,
            window=None if self.band is None else self.window,
            scale=self.module.kernel_scale,
        )
        options: dict[str, Any] = {"positions": self._at.places(self.kind, self.first, keys)}
        options |= self._options(keys)
        weights = None
        if self.implementation == "eager":
            each = torch.eye(keys, dtype=value.dtype, device=value.device)
            each = each.expand(*value.shape[:2], -1, -1)
            undropped: dict[str, Any] = {**options, "dropout": 0.0}
            weights = attend_clipped(*tensors, each, clipping, **undropped)
        output = attend_clipped(*tensors, value, clipping, **options)
        return output.transpose(1, 2), weights

    def attend_keys(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """Attention without a mask, or with a decay; None if Transformers' function computes it."""
        decay = self.angles.decay
        if self.implementation != "sdpa" or (decay is None and self.band is None):
            return None
        length, places = query.shape[-2], None
        if decay is not None:
            if self._begins(query):
                key, value = key[..., :length, :], value[..., :length, :]
            places = self._at.places(self.kind, self.first, key.shape[-2])
        output = attend(
            query,
            key,
            value,
            is_causal=self.mask is None,
            window=None if self.band is None else self.window,
            scale=self.module.kernel_scale,
            bias=decay,
            positions=places,
            **self._options(key.shape[-2]),
        )
        return output.transpose(1, 2)

    def mask_and_bias(self, query: Tensor, keys: int) -> tuple[Any, dict[str, Any]]:
        """The mask, and what FlexAttention adds to scores; the decay is in one of them.

        ValueError if the attention function adds nothing to scores.
        """
        if self.angles.decay is None:
            return self.mask, {}
        if self.implementation == "flex_attention":
            places = self._at.places(self.kind, self.first, keys)
            queries, slots = (x.expand(len(query), -1) for x in places)
            wide = torch.promote_types(query.dtype, torch.float32)
            bias = DecayBetween(self.angles.decay, queries, slots, wide)
            return self.mask, {"position_bias": bias}
        shape = self.mask.shape if isinstance(self.mask, Tensor) else ()
        dense = len(shape) == 4 and shape[-1] == keys
        if not dense and not self.implementation.endswith("eager"):
            raise ValueError(
                "a model with a decay needs an attention function that adds a bias to the "
                f"scores, sdpa, eager or flex_attention; got {self.implementation}"
            )
        return self._with_decay(query, keys).to(query.dtype), {}

    def _with_decay(self, query: Tensor, keys: int) -> Tensor:
        """The mask with the decay added, in float32 or wider."""
        assert self.angles.decay is not None
        wide = torch.promote_types(query.dtype, torch.float32)
        places = self._at.places(self.kind, self.first, keys)
        return with_bias(self.mask, self.angles.decay(*places, wide).unsqueeze(1))

    def _check_limits(self, beyond: bool) -> None:
        """Raise ValueError if the attention function cannot attend with a largest distance."""
        name = self.implementation
        able = name in ("sdpa", "eager", "paged|eager", "flex_attention")
        if not beyond:
            # Any function can that gets all keys. Serving engines keep keys themselves.
            known = ("flash_attention_2", "flash_attention_3")
            able = able or name in known or ("/" in name and not name.startswith("paged|"))
        if not able:
            raise ValueError(
                "a model with max_distance has two scores for a query and a key, which needs the "
                f"attention function sdpa, eager or flex_attention; got {name}"
            )


def halve_static_keys(module: Any) -> Any:
    """Give a `TorchExportableModuleWithStaticCache` the keys of a half cache, in place."""
    # Transformers has made all keys of its static cache as wide as the values.
    body = module.model.base_model
    for index, attention in enumerate(body.attention_class.layout.modules(body)):
        layer = module.static_cache.layers[index]
        width = attention.head_dim // 2 + attention.free_pairs
        layer.keys = layer.keys[..., :width].clone()
        module.register_buffer(f"key_cache_{index}", layer.keys, persistent=False)
    return module
