"""Positions of the keys in one forward pass, and what all layers make of them, once.

Legend: B batch, T query length, S key length or slots of a cache, R rotary width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import Cache, PreTrainedConfig

from coca_attention.models.configuration import free_pairs, rope_parameters, rotation
from coca_attention.ops import key_frames
from coca_attention.ops.decoding import KeyFrames
from coca_attention.ops.opaque import compiling


@torch.library.custom_op("coca_attention::materialized", mutates_args=())
def materialized(x: Tensor) -> Tensor:
    """Write x to memory, because torch.compile would recompute it in every layer and head."""
    return x.clone()


@materialized.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class KeyPositions:
    """Positions of the tokens of a pass, and of the keys that they see."""

    consecutive = False
    """Whether the tokens of this pass are the last keys, and positions grow by one wherever a query
    sees a key; read only where distances are limited."""
    first_position: Tensor | None = None
    """Position of the first key, (1 or B,), if there is one new token and positions grow by one."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, position_ids: Tensor) -> None:
        """dtype: that of the tables. position_ids: those of the tokens, (1 or B, T)."""
        self.config, self.dtype, self.position_ids = config, dtype, position_ids
        self._made: dict[Any, Any] = {}

    def _slots(self, layer_type: str | None) -> Tensor:
        """Positions of all keys, (1 or B, S)."""
        raise NotImplementedError

    def places(self, layer_type: str | None, first: int, keys: int) -> tuple[Tensor, Tensor]:
        """Positions of the tokens of this pass, and of slots first … first + keys - 1."""
        return self.position_ids, self._slots(layer_type)[:, first : first + keys]

    def tables(
        self, layer_type: str | None, first: int, keys: int, leaking: bool = False
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of slots first … first + keys - 1, (1 or B, keys, R/2) each.

        With ``leaking`` those of keys beyond limited distances, see `Rotation.leaking_tables`.
        """
        kind = (layer_type, leaking)
        if kind not in self._made:
            turning = rotation(self.config, layer_type)
            make = turning.leaking_tables if leaking else turning.tables
            tables = make(self._slots(layer_type), self.dtype)
            if compiling():
                tables = materialized(tables[0]), materialized(tables[1])
            self._made[kind] = tables
        cos, sin = self._made[kind]
        return cos[:, first : first + keys], sin[:, first : first + keys]

    def near_and_far(
        self, layer_type: str | None, first: int, keys: int, mask: BlockMask, limit: int
    ) -> BlockMask:
        """A mask over all keys twice: of the first half a query sees near ones, then far ones."""
        kind = (layer_type, first, keys, limit)
        if kind not in self._made:
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
            self._made[kind] = make(visible, *sizes, device=slots.device)
        return self._made[kind]

    def frames(
        self,
        layer_type: str | None,
        first: int,
        keys: int,
        pairs: int,
        tile: int,
        leaking: bool = False,
    ) -> KeyFrames | None:
        """Tables of `attend_half` for these slots in tiles; None if positions do not allow them.

        ``leaking`` as for `tables`.
        """
        if self.first_position is None:
            return None
        kind = (layer_type, first, keys, pairs, tile, leaking)
        if kind not in self._made:
            turning = rotation(self.config, layer_type)
            if turning.follows_length:
                return None
            self._made[kind] = key_frames(
                self.first_position + first,
                keys,
                turning,
                tile=tile,
                pairs=pairs,
                free_pairs=free_pairs(self.config, layer_type),
                dtype=self.dtype,
                step=(leaking and turning.leak) or 1.0,
            )
        return self._made[kind]


class CachedPositions(KeyPositions):
    """Positions of all slots of a cache; without one, of the tokens."""

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        position_ids: Tensor,
        cache: Cache | None,
        mask: Tensor | None,
    ) -> None:
        """mask: (B, S), 1 for every real token so far, or None."""
        super().__init__(config, dtype, position_ids)
        device, length = position_ids.device, position_ids.shape[1]
        slots, start = length, 0
        if cache is not None:
            sizes = [
                cache.get_mask_sizes(length, index) for index in range(config.num_hidden_layers)
            ]
            slots = max(keys + first for keys, first in sizes)
            start = cache.get_seq_length()  # a tensor for static caches
        # A static cache has more slots, and padding may stand between real tokens.
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
        if length == 1 and not torch.compiler.is_compiling():
            # One new token: use consecutive positions if the mask has no gaps.
            first = position_ids[:, 0] - start
            if mask is None or bool(((first[:, None] + slot == self.earlier) | (mask == 0)).all()):
                self.first_position = first

    def _slots(self, layer_type: str | None) -> Tensor:
        given = self.position_ids[:, self.index_in_pass.clamp(0, self.position_ids.shape[1] - 1)]
        return torch.where(self.index_in_pass < 0, self.earlier, given).clamp(min=0)


class PagedPositions(KeyPositions):
    """Positions in Transformers' continuous batching: several texts behind each other in a row."""

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        position_ids: Tensor,
        ends: Tensor,
        key_ends: dict[str, Tensor],
    ) -> None:
        """ends: of N texts among the tokens, from 0 on, (N + 1,); key_ends: by layer type."""
        super().__init__(config, dtype, position_ids)
        self.last, self.key_ends = position_ids[0, ends[1:].long() - 1], key_ends

    def _slots(self, layer_type: str | None) -> Tensor:
        """Positions (1, S) of all keys, counted back from the last token of their text."""
        kind = layer_type if layer_type in self.key_ends else next(iter(self.key_ends))
        ends = self.key_ends[kind].long()
        lengths = ends.diff()
        slots = torch.arange(int(ends[-1]), device=ends.device)
        shifts = self.last - (ends[1:] - 1)
        return (slots + shifts.repeat_interleave(lengths))[None]
