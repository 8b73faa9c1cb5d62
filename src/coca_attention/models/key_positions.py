"""Positions of the keys in one forward pass, and what all layers make of them, once.

Legend: B batch, T query length, S key length or slots of a cache, R rotary width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicLayer, PreTrainedConfig

from coca_attention.models.configuration import free_pairs, rotation
from coca_attention.ops import key_frames
from coca_attention.ops.decoding import KeyFrames
from coca_attention.ops.opaque import compiling
from coca_attention.ops.positions import KeyAngles


@torch.library.custom_op("coca_attention::materialized", mutates_args=())
def materialized(x: Tensor) -> Tensor:
    """Write x to memory, because torch.compile would recompute it in every layer and head."""
    return x.clone()


@materialized.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class PositionsLayer(DynamicLayer):
    """Positions of all slots, as one more layer of a cache: what moves its rows moves them, too.

    They are (B, 1, S, 1), or of one row if all have the same.
    """

    def __init__(self, cache: Cache) -> None:
        """Make the layer that a cache lacks, which has those of the model."""
        super().__init__()
        self.is_compileable = cache.is_compileable  # Transformers asks all layers
        if cache.offloading:
            stay = [cache.only_non_sliding and sliding for sliding in cache.is_sliding]
            self.after: Any = cache.layers[stay.index(False)]

    def prefetch(self) -> None:
        """Fetch the layer after this one, the first of the model: positions are not offloaded."""
        self.after.prefetch()

    @property
    def positions(self) -> Tensor:
        """The positions, (1 or B, S)."""
        assert self.keys is not None  # of a layer that is stored at once
        return self.keys[:, 0, :, 0]

    def store(self, positions: Tensor) -> None:
        """Replace them by others, (1 or B, S): in place where CUDA graphs need it."""
        stored = positions[:, None, :, None]
        kept = self.keys
        if self.is_compileable and kept is not None and kept.shape == stored.shape:
            kept.copy_(stored)
            return
        if self.is_compileable and not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(stored)
        self.keys = self.values = stored
        self.is_initialized = True

    def reset(self) -> None:
        """Nothing: those of an empty cache are not read."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if len(self.positions) > 1:
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if len(self.positions) > 1:
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if len(self.positions) > 1:
            super().batch_select_indices(indices)


class Reading:
    """What a decoder reads in one forward pass.

    Attributes:
        batch: B.
        length: T, the tokens of this pass.
        mask: As given: (B, tokens so far), (B, 1 or H, T, S), of an attention function, or a
            dictionary of such by layer type, which Transformers makes for static caches.
        padding: The mask as (B, tokens so far), int64, 1 for real tokens; None if it is another.
        cache: The cache; None for that of continuous batching, which places tokens by itself.
        past: Tokens in the cache; a tensor for static caches.
        slots: S, those that the layers of the cache return with these tokens, and out of a window.
        position_ids: (1 or B, T); by default tokens are consecutive, padding left out.
        is_placed: Whether they are given, or follow from padding.
    """

    def __init__(
        self, tokens: Tensor, mask: Any, position_ids: Tensor | None, cache: Any, num_layers: int
    ) -> None:
        self.batch, self.length = tokens.shape[:2]
        self.mask = mask
        self.padding = mask.long() if isinstance(mask, Tensor) and mask.dim() == 2 else None
        self.cache = cache if hasattr(cache, "get_seq_length") else None
        self.past: int | Tensor = 0
        self.slots = self.length
        if self.cache is not None:
            self.past = self.cache.get_seq_length()
            sizes = (self.cache.get_mask_sizes(self.length, index) for index in range(num_layers))
            self.slots = max(keys + first for keys, first in sizes)
        self.is_placed = position_ids is not None or self.padding is not None
        if position_ids is not None:
            self.position_ids = position_ids
        elif self.padding is not None:  # scores of slack depend on true positions
            self.position_ids = (self.padding.cumsum(-1) - 1).clamp(min=0)[:, -self.length :]
        else:
            self.position_ids = (torch.arange(self.length, device=tokens.device) + self.past)[None]

    @property
    def last_position(self) -> int:
        """The largest position of these tokens, read from the device only where it is given."""
        if self.is_placed or not isinstance(self.past, int):
            return int(self.position_ids.max())
        return self.past + self.length - 1

    @property
    def ends(self) -> bool:
        """Whether these tokens are the last keys: a static cache has more slots."""
        return isinstance(self.past, int) and self.slots == self.past + self.length


class KeyPositions:
    """Positions of all slots of a cache; without one, of the tokens of a pass.

    The cache keeps them. Of tokens of which it has none (in programs of torch.export, in a cache
    that was filled by something else) they are counted back from this pass, by the mask.
    """

    slots: Tensor
    """Positions of all slots, (1 or B, S)."""
    grow_by_one: bool | None = False
    """Whether positions grow by one wherever a query sees a key; None if that is not known. Read
    only with a distance map."""
    last_position: int | None = None
    """The largest position of this pass; None if that is not known. Read only with a distance map
    that leaves the first queries alone."""
    first_position: Tensor | None = None
    """Position of the first key, (1 or B,), if there is one new token and positions grow by one."""

    def __init__(
        self, config: PreTrainedConfig, dtype: torch.dtype, reading: Reading, in_order: bool
    ) -> None:
        """Place the tokens of a pass, before they are in the cache.

        Args:
            config: That of the model.
            dtype: dtype of the tables.
            reading: The tokens.
            in_order: Whether positions are known to grow by one wherever a query sees a key.
        """
        self.config = config
        self.dtype = dtype
        self.reading = reading
        self._made: dict[Any, Any] = {}
        self._longest: int | None = None
        position_ids = reading.position_ids
        slot = torch.arange(reading.slots, device=position_ids.device)
        mask = reading.padding
        if mask is not None:
            mask = F.pad(mask, (0, reading.slots - mask.shape[1]))
        self.slots = self._placed(slot, mask)
        distance_map = rotation(config).distance_map
        if distance_map is not None and distance_map.after and not torch.compiler.is_compiling():
            self.last_position = reading.last_position
        if in_order:
            self.grow_by_one = True
        elif torch.compiler.is_compiling():
            self.grow_by_one = None if mask is None else False
        elif distance_map is not None or reading.length == 1:
            # Then a position is its slot and a number that is the same for all tokens of a row.
            hidden = slot >= reading.past + reading.length  # where no token is yet
            if mask is not None:
                hidden = hidden | (mask == 0)
            beyond = self.slots - slot
            least = beyond.masked_fill(hidden, torch.iinfo(beyond.dtype).max).amin(-1)
            most = beyond.masked_fill(hidden, torch.iinfo(beyond.dtype).min).amax(-1)
            self.grow_by_one = bool((most <= least).all())
            if self.grow_by_one and reading.length == 1:
                self.first_position = most
            if distance_map is not None and not self.consecutive:
                self._longest = int(position_ids.max() - self.slots.min())

    @property
    def consecutive(self) -> bool | None:
        """`grow_by_one` if the tokens of this pass are the last keys; otherwise False."""
        return self.grow_by_one if self.reading.ends else False

    def _placed(self, slot: Tensor, mask: Tensor | None) -> Tensor:
        """Positions of all slots, (1 or B, S)."""
        reading = self.reading
        past = reading.past
        # Computed here, because a static cache updates its length in place.
        index = slot - past  # in this pass, negative for earlier tokens
        given = reading.position_ids[:, index.clamp(0, reading.length - 1)]
        if isinstance(past, int) and past == 0:
            return given
        layer = None if torch.compiler.is_exporting() else _layer_of(reading.cache, self.config)
        kept = None if layer is None else layer.positions
        if kept is not None and isinstance(past, int):
            kept = kept[:, :past] if kept.shape[1] >= past else None
        if kept is None:
            earlier = self._counted(index, mask)
        else:
            earlier = F.pad(kept, (0, reading.slots - kept.shape[1]))
        return torch.where(index < 0, earlier, given).clamp(min=0)

    def _counted(self, index: Tensor, mask: Tensor | None) -> Tensor:
        """Positions counted back from this pass, (1 or B, S), of slots at an index in it (S,)."""
        reading = self.reading
        position_ids = reading.position_ids
        if mask is None:
            return position_ids[:, :1] + index
        # Count real tokens back from the last one of this pass, so that padding anywhere does not
        # shift positions.
        tokens = torch.arange(reading.length, device=index.device)
        last = (mask[:, reading.past + tokens] * tokens).argmax(-1, keepdim=True)
        counted = mask.cumsum(-1)
        since = counted.gather(1, last + reading.past) - counted
        return position_ids.expand(len(mask), -1).gather(1, last) - since

    def keep_in(self, cache: Cache | None) -> None:
        """Keep the positions in the cache, once the layers have put these tokens into it."""
        if cache is None or torch.compiler.is_exporting():
            return
        if len(cache.layers) == self.config.num_hidden_layers:
            cache.layers.append(PositionsLayer(cache))
        layer = _layer_of(cache, self.config)
        if layer is not None:
            layer.store(self.slots)

    def longest_distance(self, keys: int) -> int | None:
        """No key of so many is farther from a query, in tokens; None if that is not known."""
        return keys - 1 if self.consecutive else self._longest

    def places(self, first: int, keys: int) -> tuple[Tensor, Tensor]:
        """Positions of the tokens of this pass, and of slots first … first + keys - 1."""
        return self.reading.position_ids, self.slots[:, first : first + keys]

    def tables(
        self, layer_type: str | None, first: int, keys: int, of: KeyAngles = "near"
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of slots first … first + keys - 1, (1 or B, keys, R/2) each."""
        kind = (layer_type, of)
        if kind not in self._made:
            turning = rotation(self.config, layer_type)
            cos, sin = turning.tables(self.slots, self.dtype, of)
            if compiling():
                cos = materialized(cos)
                sin = materialized(sin)
            self._made[kind] = cos, sin
        cos, sin = self._made[kind]
        return cos[:, first : first + keys], sin[:, first : first + keys]

    def frames(
        self,
        layer_type: str | None,
        first: int,
        keys: int,
        pairs: int,
        tile: int,
        of: KeyAngles = "near",
    ) -> KeyFrames | None:
        """`key_frames` of these slots in tiles; None if positions or a map do not allow them."""
        if self.first_position is None:
            return None
        kind = (layer_type, first, keys, pairs, tile, of)
        if kind not in self._made:
            turning = rotation(self.config, layer_type)
            if turning.follows_length:
                return None
            far = turning.distance_map
            if of != "near" and far is not None and not far.has_equal_steps:
                return None
            self._made[kind] = key_frames(
                self.first_position + first,
                keys,
                turning,
                tile=tile,
                pairs=pairs,
                free_pairs=free_pairs(self.config, layer_type),
                dtype=self.dtype,
                of=of,
            )
        return self._made[kind]


def _layer_of(cache: Any, config: PreTrainedConfig) -> PositionsLayer | None:
    """The positions that a cache keeps, after the layers of the model."""
    layers: list[Any] = getattr(cache, "layers", [])
    last = layers[-1] if len(layers) > config.num_hidden_layers else None
    return last if isinstance(last, PositionsLayer) else None
