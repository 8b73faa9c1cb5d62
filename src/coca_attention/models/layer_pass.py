"""Attention of one layer in one pass where Transformers' attention functions do not compute it.

A decay, a distance map, windows without a mask, and one token over a half cache. Every method is
exact.

Legend: B batch, T query length, S key length or slots of a cache, H query heads, G key/value heads,
D head width, P = D/2 rotary pairs, F free pairs, R rotary width.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coca_attention.models.configuration import window_of
from coca_attention.models.key_positions import KeyPositions
from coca_attention.models.rotary import Angles
from coca_attention.ops import attend, attend_half, key_map, tile_length
from coca_attention.ops.decoding import KeyFrames, attend_half_at
from coca_attention.ops.distances import (
    attend_by_distance,
    attend_half_by_distance,
    far_query_map,
    side_by_side,
)
from coca_attention.ops.linear import Turns
from coca_attention.ops.opaque import compiling
from coca_attention.ops.positions import Decay, DistanceMap
from coca_attention.ops.sight import with_bias


@dataclass(frozen=True)
class DecayBetween:
    """A decay in the place of Transformers' ``position_bias``, which FlexAttention indexes."""

    decay: Decay
    queries: Tensor  # positions (B, T)
    keys: Tensor  # positions (B, S)
    dtype: torch.dtype  # of the addends

    def __getitem__(self, at: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        """The addend of one score, by batch, head, query and key."""
        batch, _, query, key = at
        return self.decay.of(self.queries[batch, query] - self.keys[batch, key], self.dtype)


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

LayerPath = Literal["half", "far half", "far", "blocks", "function"]
"""What computes a layer: `LayerPass.attend_half`, `attend_far_half`, `attend_far`, `attend_keys`,
or an attention function of Transformers."""


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
        if self.positions is not None and cache is not None and hasattr(cache, "get_mask_sizes"):
            _, first = cache.get_mask_sizes(length, module.layer_idx)
        return LayerPass(module, mask, angles, self.positions, first)


class LayerPass(NamedTuple):
    """What a layer attends with in one pass, beside queries, keys and values.

    Outputs are (B, T, H, D), as those of Transformers' attention functions.
    """

    module: Any
    mask: Mask
    angles: Angles
    positions: KeyPositions | None
    first: int  # slot that the layer's cache returns

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

    def _places(self, keys: int) -> tuple[Tensor, Tensor]:
        """Positions of the queries, and of so many keys."""
        return self._at.places(self.layer_type, self.first, keys)

    def _options(self, keys: int) -> dict[str, Any]:
        """Those that `attend` and `attend_by_distance` share, for the last so many keys."""
        segments = self.mask.segments if isinstance(self.mask, Band) else None
        return {
            "attention_mask": self.dense,
            "segments": None if segments is None else segments[:, segments.shape[-1] - keys :],
            "dropout": self.dropout,
        }

    def _begins(self, query: Tensor) -> bool:
        """Whether these are the first queries of an empty cache, which may have more slots."""
        return self.mask is None and query.shape[-2] > 1

    def within_near(self, keys: int) -> "LayerPass":
        """The same without a distance map if none of so many keys is far.

        ValueError if the attention function cannot attend with one.
        """
        if self.angles.far is None:
            return self
        near, name = self._distance_map.near, self.function
        longest = self._at.longest_distance(keys)
        if self._at.consecutive and self._at.windowed and longest is not None:
            longest = min(longest, (self.window or keys) - 1)
        is_far = longest is None or longest >= near
        able = name in ("sdpa", "eager", "paged|eager", "flex_attention")
        if not is_far:
            # Every function can that gets all keys. Serving engines keep keys themselves.
            known = ("flash_attention_2", "flash_attention_3")
            able = able or name in known or ("/" in name and not name.startswith("paged|"))
        if not able:
            raise ValueError(
                "a model with a distance map has two scores for a query and a key, which needs the "
                f"attention function sdpa, eager or flex_attention; got {name}"
            )
        return self if is_far else self._replace(angles=self.angles._replace(far=None))

    def key_tables(self, keys: int) -> tuple[Tensor, Tensor]:
        """cos and sin of all keys, (1 or B, keys, R/2) each, where the cache has none of them."""
        if self.positions is None or keys == self.angles.cos.shape[-2]:
            # Without positions Transformers has created the cache, which was empty before.
            return self.angles.cos, self.angles.sin
        return self.positions.tables(self.layer_type, self.first, keys)

    def path(self, query: Tensor, coefficients: Tensor | None) -> LayerPath:
        """What computes this layer, given coefficients (B, G, S, P + F) if they are cached."""
        if self.angles.far is not None:
            return "far half" if self._decodes_far(query, coefficients) else "far"
        if coefficients is not None and self._decodes(query, coefficients):
            return "half"
        own = self.angles.decay is not None or isinstance(self.mask, Band)
        return "blocks" if own and self.function == "sdpa" else "function"

    def _decodes(self, query: Tensor, coefficients: Tensor) -> bool:
        """Whether `attend_half` takes the place of ``scaled_dot_product_attention``."""
        mask = self.dense
        if (
            self.positions is None
            or query.shape[-2] != 1
            or self.function != "sdpa"
            or (mask is not None and (mask.dtype != torch.bool or mask.shape[1] != 1))
            or self.module.training
            or torch.is_grad_enabled()
        ):
            return False
        return compiling() or self._frames(query, coefficients) is not None

    def _decodes_far(self, query: Tensor, coefficients: Tensor | None) -> bool:
        """Whether `attend_half_by_distance` takes the place of keys: on a CPU it is faster."""
        far = self.angles.far
        return (
            far is not None
            and far.distance_map.has_equal_steps
            and coefficients is not None
            and self._first_near(query, coefficients.shape[-2]) > 0
            and query.device.type == "cpu"
            and not compiling()
            and self._decodes(query, coefficients)
        )

    def _first_near(self, query: Tensor, keys: int) -> int:
        """The first key that is near to any query, where that is known without looking."""
        if not self._at.consecutive or self.function == "flex_attention":
            return 0
        return max(0, keys - query.shape[-2] - self._distance_map.near + 1)

    def _frames(
        self, query: Tensor, coefficients: Tensor, start: int = 0, far: bool = False
    ) -> KeyFrames | None:
        """Tables of the keys from ``start`` on for `attend_half`.

        None where tokens are not consecutive.
        """
        tile, pairs = tile_length(coefficients, query.shape[1]), self.module.head_dim // 2
        slots = self.layer_type, self.first + start, coefficients.shape[-2]
        return self._at.frames(*slots, pairs, tile, far)

    def attend_half(self, query: Tensor, coefficients: Tensor, value: Tensor) -> Tensor:
        """One token over a half cache."""
        keys = coefficients.shape[-2]
        mask = self.dense if self.angles.decay is None else self._with_decay(query, keys)
        tensors, scale = (query, coefficients, value), self.module.kernel_scale
        if compiling():
            tables = self._at.tables(self.layer_type, self.first, keys)
            output = attend_half_at(*tensors, *tables, attention_mask=mask, scale=scale)
        else:
            frames = self._frames(query, coefficients)
            assert frames is not None  # see `_decodes`
            output = attend_half(*tensors, frames, attention_mask=mask, scale=scale)
        return output.transpose(1, 2)

    def far_query(self, projected: Tensor) -> Tensor:
        """Queries for far keys, of q before rotation: see `attend_by_distance`."""
        assert self.angles.far is not None
        query = self.module.map_query(projected, self.angles, *self.angles.far.tables)
        if self._distance_map.is_limit:
            return far_query_map(query, self.module.free_pairs)
        return query

    def attend_far(
        self, query: Tensor, far_query: Tensor, stored: Tensor, value: Tensor, half: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attention with a distance map, and the weights if the attention function returns them.

        What is stored are coefficients (B, G, S, P + F) if ``half``, else keys (B, G, S, D).
        """
        length, consecutive = query.shape[-2], self._at.consecutive
        if self._begins(query) and not consecutive:
            consecutive = self._at.begins_consecutive
            stored, value = stored[..., :length, :], value[..., :length, :]
        keys = stored.shape[-2]
        first_near = self._first_near(query, keys) if half else 0
        key, far_key = self._near_and_far(stored, first_near) if half else (stored, stored)
        if self.function == "flex_attention":
            return self._attend_flex(query, key, far_query, far_key, value)
        query_positions, key_positions = self._places(keys)
        attend_values = partial(
            attend_by_distance,
            query,
            key,
            far_query,
            far_key,
            query_positions=query_positions,
            key_positions=key_positions,
            near=self._distance_map.near,
            consecutive=consecutive,
            is_causal=self.dense is None,
            window=self.window if isinstance(self.mask, Band) else None,
            scale=self.module.kernel_scale,
            **self._options(keys),
        )
        weights = None
        if self.function == "eager":
            each = torch.eye(keys, dtype=value.dtype, device=value.device)
            weights = attend_values(each.expand(*value.shape[:2], -1, -1), dropout=0.0)
        return attend_values(value).transpose(1, 2), weights

    def _near_and_far(self, coefficients: Tensor, first_near: int) -> tuple[Tensor, Tensor]:
        """Near keys, of the coefficients from ``first_near`` on, and far keys, of all."""
        keys, free_pairs = coefficients.shape[-2], self.module.free_pairs
        distance_map = self._distance_map
        if distance_map.shares_keys:
            first_near = 0
        cos, sin = (x[:, first_near:] for x in self.key_tables(keys))
        key = key_map(coefficients[..., first_near:, :], cos, sin, free_pairs=free_pairs)
        if distance_map.shares_keys:
            return key, key
        if distance_map.is_limit:
            return key, coefficients
        tables = self._at.tables(self.layer_type, self.first, keys, far=True)
        return key, key_map(coefficients, *tables, free_pairs=free_pairs)

    def _attend_flex(
        self, query: Tensor, key: Tensor, far_query: Tensor, far_key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """`attend_far` by FlexAttention, which gets all keys twice, near and far ones."""
        query, *parts = side_by_side(query, key, far_query, far_key)
        near = self._distance_map.near
        mask = self._at.near_and_far(
            self.layer_type, self.first, far_key.shape[-2], self.dense, near
        )
        return ALL_ATTENTION_FUNCTIONS["flex_attention"](
            self.module,
            query,
            torch.cat(parts, dim=-2),
            torch.cat((value, value), dim=-2),
            mask,
            scaling=self.module.kernel_scale,
            dropout=self.dropout,
        )

    def attend_far_half(
        self, query: Tensor, far_query: Tensor, coefficients: Tensor, value: Tensor
    ) -> Tensor:
        """One token over coefficients, as `attend_half`."""
        distance_map = self._distance_map
        first_near = self._first_near(query, coefficients.shape[-2])
        far, near = coefficients[..., :first_near, :], coefficients[..., first_near:, :]
        far_frames = None
        if not distance_map.is_limit:
            far_frames = self._frames(query, far, far=not distance_map.shares_keys)
        near_frames = self._frames(query, near, first_near)
        assert near_frames is not None  # see `_decodes`
        output = attend_half_by_distance(
            query,
            far_query,
            coefficients,
            value,
            near=near_frames,
            far=far_frames,
            attention_mask=self.dense,
            scale=self.module.kernel_scale,
        )
        return output.transpose(1, 2)

    def attend_keys(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention with a mask formed in blocks, or with a decay."""
        decay = self.angles.decay
        length, places = query.shape[-2], None
        if decay is not None:
            if self._begins(query):
                key, value = key[..., :length, :], value[..., :length, :]
            places = self._places(key.shape[-2])
        output = attend(
            query,
            key,
            value,
            is_causal=self.dense is None,
            window=self.window if isinstance(self.mask, Band) else None,
            scale=self.module.kernel_scale,
            bias=decay,
            positions=places,
            **self._options(key.shape[-2]),
        )
        return output.transpose(1, 2)

    def mask_and_bias(self, query: Tensor, keys: int) -> tuple[Mask, dict[str, DecayBetween]]:
        """The mask, and what FlexAttention adds to scores; the decay is in one of them.

        ValueError if the attention function adds nothing to scores.
        """
        if self.angles.decay is None:
            return self.dense, {}
        if self.function == "flex_attention":
            places = self._places(keys)
            queries, slots = (x.expand(len(query), -1) for x in places)
            wide = torch.promote_types(query.dtype, torch.float32)
            bias = DecayBetween(self.angles.decay, queries, slots, wide)
            return self.dense, {"position_bias": bias}
        shape = self.mask.shape if isinstance(self.mask, Tensor) else ()
        dense = len(shape) == 4 and shape[-1] == keys
        if not dense and not self.function.endswith("eager"):
            raise ValueError(
                "a model with a decay needs an attention function that adds a bias to the "
                f"scores, sdpa, eager or flex_attention; got {self.function}"
            )
        return self._with_decay(query, keys).to(query.dtype), {}

    def _with_decay(self, query: Tensor, keys: int) -> Tensor:
        """The mask with the decay added, in float32 or wider."""
        assert self.angles.decay is not None
        wide = torch.promote_types(query.dtype, torch.float32)
        places = self._places(keys)
        return with_bias(self.dense, self.angles.decay(*places, wide).unsqueeze(1))


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
