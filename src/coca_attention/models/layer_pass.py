"""Attention of one layer in one pass where Transformers' attention functions do not compute it.

A decay, a distance map, windows without a mask, and one token over a half cache. Every method is
exact.

Legend: B batch, T query length, S key length or slots of a cache, H query heads, G key/value heads,
D head width, P = D/2 rotary pairs, F free pairs, R rotary width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import Cache

from coca_attention.models.configuration import window_of
from coca_attention.models.key_positions import KeyPositions
from coca_attention.models.rotary import Angles
from coca_attention.ops import attend, attend_half, key_map, tile_length
from coca_attention.ops.decoding import KeyFrames, attend_half_at
from coca_attention.ops.distances import (
    attend_by_distance,
    attend_half_by_distance,
    far_query_map,
)
from coca_attention.ops.linear import Turns
from coca_attention.ops.opaque import compiling
from coca_attention.ops.positions import DistanceMap, KeyAngles
from coca_attention.ops.sight import with_bias


class Band(NamedTuple):
    """A mask that layers form in blocks: nothing later, out of a window or of another segment."""

    segments: Tensor | None = None
    """A number for every token so far, (B, S) int64: its document, or whether it is padding."""
    window: int | None = None
    """Tokens in sight in a model of Transformers; a CoCA model's layers know it."""


Mask = Band | Tensor | BlockMask | None
"""What hides keys from the queries of a layer.

- `Band`: the layer itself, in blocks of queries.
- Tensor: it says all, (B, 1 or H, T, S), boolean (True = may attend) or added to the scores; or it
  is what another attention function takes, such as (B, S) for FlashAttention.
- BlockMask: it says all, for FlexAttention.
- None: the attention function hides later tokens, and nothing else is hidden.
"""

Attended = tuple[Tensor, Tensor | None]
"""Outputs (B, T, H, D), as those of Transformers' attention functions, and the weights, if any."""


Stored = Literal["keys", "coefficients", "far keys"]
"""What a cache has.

- keys: rotated to their positions, (B, G, S, D).
- coefficients: before rotation, (B, G, S, P + F).
- far keys: rotated to where a distance map has them for distant queries, so that one token turns
  only the near ones, (B, G, S, D). Collinear keys, which are not as wide as the others, are kept as
  coefficients instead. So are those of a limit, which are far keys, at position 0.
"""


class Pass(NamedTuple):
    """What one forward pass of a decoder hands to all layers."""

    positions: KeyPositions | None = None  # with a half cache, a decay or a distance map
    band: Band | None = None  # in place of Transformers' masks
    # Mask and angles of each layer type, where all share one set of rotary parameters.
    roles: dict[str, tuple[Mask, Angles]] | None = None
    # With linear attention: its positions, and which of these tokens are real (B, T).
    linear: tuple[Turns, Tensor | None] | None = None

    @property
    def has_masks(self) -> bool:
        """Whether layers take their masks from here, so that the family's decoder makes none."""
        return any(x is not None for x in (self.band, self.roles, self.linear))

    def layer(
        self, module: Any, mask: Mask, angles: Any, cache: Cache | None, length: int
    ) -> "LayerPass":
        """What an attention module needs of it, given the mask and angles of the decoder."""
        if self.roles is not None:
            mask, angles = self.roles[module.layer_type]
        if self.band is not None:
            mask = self.band
        first = 0
        if self.positions is not None and cache is not None:
            _, first = cache.get_mask_sizes(length, module.layer_idx)
        stored: Stored = "keys"
        if module.config.kv_cache == "half":
            stored = "coefficients"
        elif angles.far is not None and not angles.far.distance_map.shares_keys:
            stored = "coefficients"
            all_free = module.free_pairs == module.head_dim // 2
            if all_free and not angles.far.distance_map.is_limit:
                stored = "far keys"
        return LayerPass(module, mask, angles, self.positions, first, stored)


class LayerPass(NamedTuple):
    """What a layer attends with in one pass, beside queries, keys and values."""

    module: Any
    mask: Mask
    angles: Angles
    positions: KeyPositions | None
    first: int  # slot that the layer's cache returns
    stored: Stored

    @property
    def layer_type(self) -> str | None:
        """Type of the layer, where families or roles have several."""
        return getattr(self.module, "layer_type", None)

    @property
    def window(self) -> int | None:
        """Tokens in sight, the query's own included; None for all."""
        return getattr(self.module, "sliding_window", window_of(self.module.config))

    @property
    def function(self) -> str:
        """Name of the attention function."""
        return self.module.config._attn_implementation

    @property
    def dropout(self) -> float:
        """Probability of dropping an attention weight."""
        return self.module.attention_dropout if self.module.training else 0.0

    @property
    def dense(self) -> Any:
        """The mask, unless the layer forms it itself."""
        return None if isinstance(self.mask, Band) else self.mask

    @property
    def _at(self) -> KeyPositions:
        assert self.positions is not None  # passed by the decoder wherever it is asked for
        return self.positions

    @property
    def _distance_map(self) -> DistanceMap:
        assert self.angles.far is not None
        return self.angles.far.distance_map

    def _options(self, keys: int) -> dict[str, Any]:
        """Those that `attend` and `attend_by_distance` share, for the last so many keys."""
        band = self.mask if isinstance(self.mask, Band) else None
        segments = None if band is None else band.segments
        return {
            "attention_mask": self.dense,
            "segments": None if segments is None else segments[:, segments.shape[-1] - keys :],
            "is_causal": self.dense is None,
            "window": None if band is None else self.window,
            "scale": self.module.kernel_scale,
            "dropout": self.dropout,
        }

    def within_near(self, keys: int) -> "LayerPass":
        """The same without a distance map if none of so many keys counts as far.

        ValueError if the attention function cannot attend with one.
        """
        if self.angles.far is None:
            return self
        found = self._distance_map
        longest = self._at.longest_distance(keys)
        last = self._at.last_position
        all_near = longest is not None and longest < found.near
        all_before = last is not None and last < found.after
        if all_near or all_before:
            return self._replace(angles=self.angles._replace(far=None))
        if self.function not in ("sdpa", "eager"):
            raise ValueError(
                "a model with a distance map has two scores for a query and a key in texts of more "
                f"than {found.unchanged:,} tokens, which needs the attention function sdpa "
                f'or eager; got {self.function}: load the model with attn_implementation="sdpa"'
            )
        return self

    def to_store(self, coefficients: Tensor) -> Tensor:
        """What the cache keeps of this pass's coefficients (B, G, T, P + F)."""
        if self.stored == "coefficients":
            return coefficients
        tables = self.angles.cos, self.angles.sin
        if self.stored == "far keys":
            assert self.angles.far is not None and self.angles.far.key_tables is not None
            tables = self.angles.far.key_tables
        cos, sin = tables
        return key_map(coefficients, cos, sin, free_pairs=self.module.free_pairs)

    def _key_tables(self, keys: int) -> tuple[Tensor, Tensor]:
        """cos and sin that make near keys of those in the cache, (1 or B, keys, R/2) each."""
        if self.stored == "far keys":
            return self._at.tables(self.layer_type, self.first, keys, "far to near")
        if keys == self.angles.cos.shape[-2]:  # those of this pass
            return self.angles.cos, self.angles.sin
        return self._at.tables(self.layer_type, self.first, keys)

    def own_attention(self, query: Tensor, stored: Tensor) -> Callable[..., Attended] | None:
        """What computes this layer; None for an attention function of Transformers.

        It takes the projected query (B, H, T, D), the query Q', and the stored keys or coefficients
        and values of all keys.
        """
        if self.angles.far is not None:
            # On a CPU one token is faster without forming keys.
            without_keys = (
                self.stored != "keys"
                and self._distance_map.has_equal_steps
                and self._first_near(query, stored.shape[-2]) > 0
                and query.device.type == "cpu"
                and not compiling()
                and self._decodes(query, stored)
            )
            return self.attend_far_half if without_keys else self.attend_far
        if self.stored != "keys" and self._decodes(query, stored):
            return self.attend_half
        if self.function != "sdpa":
            return None
        if self.angles.decay is not None or isinstance(self.mask, Band):
            return self.attend_in_blocks
        return None

    def _decodes(self, query: Tensor, coefficients: Tensor) -> bool:
        """Whether one token over coefficients is scored without forming keys."""
        mask = self.dense
        if (
            query.shape[-2] != 1
            or self.function != "sdpa"
            or (mask is not None and (mask.dtype != torch.bool or mask.shape[1] != 1))
            or self.module.training
            or torch.is_grad_enabled()
        ):
            return False
        return compiling() or self._frames(query, coefficients) is not None

    def _first_near(self, query: Tensor, keys: int) -> int:
        """The first key that is near to any query, where that is known without looking."""
        if not self._at.consecutive:
            return 0
        return max(0, keys - query.shape[-2] - self._distance_map.near + 1)

    def _frames(
        self, query: Tensor, coefficients: Tensor, start: int = 0, far: bool = False
    ) -> KeyFrames | None:
        """Tables of the keys from ``start`` on for `attend_half`, as near keys or as far ones.

        None where tokens are not consecutive.
        """
        of: KeyAngles = "near"
        if self.stored == "far keys":
            of = "far to near"
        elif far and not self._distance_map.shares_keys:
            of = "far"
        return self._at.frames(
            self.layer_type,
            self.first + start,
            coefficients.shape[-2],
            pairs=self.module.head_dim // 2,
            tile=tile_length(coefficients, query.shape[1]),
            of=of,
        )

    def attend_half(
        self, projected: Tensor, query: Tensor, stored: Tensor, value: Tensor
    ) -> Attended:
        """One token over a half cache."""
        keys = stored.shape[-2]
        mask = self.dense if self.angles.decay is None else self._with_decay(query, keys)
        scale = self.module.kernel_scale
        if compiling():
            cos, sin = self._key_tables(keys)
            output = attend_half_at(
                query, stored, value, cos, sin, attention_mask=mask, scale=scale
            )
        else:
            frames = self._frames(query, stored)
            assert frames is not None  # see `_decodes`
            output = attend_half(query, stored, value, frames, attention_mask=mask, scale=scale)
        return output.transpose(1, 2), None

    def _far_query(self, projected: Tensor) -> Tensor:
        """Queries for far keys: see `attend_by_distance`."""
        assert self.angles.far is not None
        cos, sin = self.angles.far.tables
        query = self.module.map_query(projected, self.angles, cos, sin)
        if self._distance_map.is_limit:
            return far_query_map(query, self.module.free_pairs)
        return query

    def attend_far(
        self, projected: Tensor, query: Tensor, stored: Tensor, value: Tensor
    ) -> Attended:
        """Attention with a distance map."""
        consecutive = self._at.consecutive
        if self.mask is None and query.shape[-2] > 1:
            # The first queries of an empty cache, which may have more slots.
            consecutive = self._at.grow_by_one
            stored = stored[..., : query.shape[-2], :]
            value = value[..., : query.shape[-2], :]
        keys = stored.shape[-2]
        key, far_key = self._near_and_far(query, stored)
        query_positions, key_positions = self._at.places(self.first, keys)
        attend_values = partial(
            attend_by_distance,
            query,
            key,
            self._far_query(projected),
            far_key,
            query_positions=query_positions,
            key_positions=key_positions,
            near=self._distance_map.near,
            consecutive=consecutive,
            **self._options(keys),
        )
        weights = None
        if self.function == "eager":
            each = torch.eye(keys, dtype=value.dtype, device=value.device)
            weights = attend_values(each.expand(*value.shape[:2], -1, -1), dropout=0.0)
        return attend_values(value).transpose(1, 2), weights

    def _near_and_far(self, query: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Near keys, from the first on that may be near, and far keys, of all that are stored."""
        if self.stored == "keys":
            return stored, stored
        keys = stored.shape[-2]
        free_pairs = self.module.free_pairs
        distance_map = self._distance_map
        cos, sin = self._key_tables(keys)
        if distance_map.shares_keys:
            key = key_map(stored, cos, sin, free_pairs=free_pairs)
            return key, key
        near = slice(self._first_near(query, keys), None)
        key = key_map(stored[..., near, :], cos[:, near], sin[:, near], free_pairs=free_pairs)
        if distance_map.is_limit or self.stored == "far keys":
            return key, stored
        cos, sin = self._at.tables(self.layer_type, self.first, keys, "far")
        return key, key_map(stored, cos, sin, free_pairs=free_pairs)

    def attend_far_half(
        self, projected: Tensor, query: Tensor, stored: Tensor, value: Tensor
    ) -> Attended:
        """One token with a distance map, as `attend_half`."""
        first_near = self._first_near(query, stored.shape[-2])
        far_frames = None
        if self.stored == "coefficients" and not self._distance_map.is_limit:
            far_frames = self._frames(query, stored[..., :first_near, :], far=True)
        near_frames = self._frames(query, stored[..., first_near:, :], first_near)
        assert near_frames is not None  # see `_decodes`
        output = attend_half_by_distance(
            query,
            self._far_query(projected),
            stored,
            value,
            near=near_frames,
            far=far_frames,
            attention_mask=self.dense,
            scale=self.module.kernel_scale,
        )
        return output.transpose(1, 2), None

    def attend_in_blocks(
        self, projected: Tensor, query: Tensor, stored: Tensor, value: Tensor
    ) -> Attended:
        """Attention with a mask formed in blocks, or with a decay."""
        key = self.keys(stored)
        decay = self.angles.decay
        places = None
        if decay is not None:
            if self.mask is None and query.shape[-2] > 1:  # of an empty cache, as in `attend_far`
                key = key[..., : query.shape[-2], :]
                value = value[..., : query.shape[-2], :]
            places = self._at.places(self.first, key.shape[-2])
        options = self._options(key.shape[-2])
        output = attend(query, key, value, bias=decay, positions=places, **options)
        return output.transpose(1, 2), None

    def keys(self, stored: Tensor) -> Tensor:
        """Keys (B, G, S, D) of what the cache has."""
        if self.stored == "keys":
            return stored
        cos, sin = self._key_tables(stored.shape[-2])
        return key_map(stored, cos, sin, free_pairs=self.module.free_pairs)

    def mask_with_decay(self, query: Tensor, keys: int) -> Mask:
        """The mask for an attention function; ValueError if it adds no decay to the scores."""
        if self.angles.decay is None:
            return self.dense
        if self.function != "eager":
            raise ValueError(
                "a decay is added to the scores, which needs the attention function sdpa or eager; "
                f'got {self.function}: load the model with attn_implementation="sdpa"'
            )
        return self._with_decay(query, keys).to(query.dtype)

    def _with_decay(self, query: Tensor, keys: int) -> Tensor:
        """The mask with the decay added, in float32 or wider."""
        assert self.angles.decay is not None
        wide = torch.promote_types(query.dtype, torch.float32)
        queries, slots = self._at.places(self.first, keys)
        return with_bias(self.dense, self.angles.decay(queries, slots, wide).unsqueeze(1))


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
