"""Positions of the keys in one forward pass, and what all layers make of them, once.

Legend: B batch, T query length, S key length or slots of a cache, R rotary width.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import Cache, PreTrainedConfig

from coca_attention.models.configuration import free_pairs, rotation
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

    consecutive: bool | None = False
    """Whether the tokens of this pass are the last keys, and positions grow by one wherever a query
    sees a key; None if that is not known. Read only with a distance map."""
    windowed = True
    """Whether layers with a window hide what is out of it: not if a caller's mask is 4-D."""
    begins_consecutive = False
    """The same of the keys of this pass alone, which are the first of a static cache."""
    first_position: Tensor | None = None
    """Position of the first key, (1 or B,), if there is one new token and positions grow by one."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, position_ids: Tensor) -> None:
        """dtype: that of the tables. position_ids: those of the tokens, (1 or B, T)."""
        self.config, self.dtype, self.position_ids = config, dtype, position_ids
        self._made: dict[Any, Any] = {}

    def _slots(self, layer_type: str | None) -> Tensor:
        """Positions of all keys, (1 or B, S)."""
        raise NotImplementedError

    def longest_distance(self, keys: int) -> int | None:
        """No key of so many is farther from a query, in tokens; None if that is not known."""
        return keys - 1

    def places(self, layer_type: str | None, first: int, keys: int) -> tuple[Tensor, Tensor]:
        """Positions of the tokens of this pass, and of slots first … first + keys - 1."""
        return self.position_ids, self._slots(layer_type)[:, first : first + keys]

    def tables(
        self, layer_type: str | None, first: int, keys: int, far: bool = False
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of slots first … first + keys - 1, (1 or B, keys, R/2) each.

        With ``far`` those of far keys, see `Rotation.far_key_tables`.
        """
        kind = (layer_type, far)
        if kind not in self._made:
            turning = rotation(self.config, layer_type)
            make = turning.far_key_tables if far else turning.tables
            tables = make(self._slots(layer_type), self.dtype)
            if compiling():
                tables = materialized(tables[0]), materialized(tables[1])
            self._made[kind] = tables
        cos, sin = self._made[kind]
        return cos[:, first : first + keys], sin[:, first : first + keys]

    def near_and_far(
        self, layer_type: str | None, first: int, keys: int, mask: BlockMask, near: int
    ) -> BlockMask:
        """A mask over all keys twice: of the first half a query sees near ones, then far ones."""
        kind = (layer_type, first, keys, near)
        if kind not in self._made:
            batch, _, length, _ = mask.shape
            places = self.places(layer_type, first, keys)
            queries, slots = (x.expand(batch, -1) for x in places)
            # So named because PyTorch 2.13 takes captured variables in the order of their names,
            # and generates C++ that does not compile if a number comes after the mask.
            least = near

            def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
                slot = key % keys
                is_near = queries[b, query] - slots[b, slot] < least
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
        far: bool = False,
    ) -> KeyFrames | None:
        """Tables of `attend_half` for these slots in tiles; None if positions do not allow them.

        ``far`` as for `tables`.
        """
        if self.first_position is None:
            return None
        kind = (layer_type, first, keys, pairs, tile, far)
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
                far=far,
            )
        return self._made[kind]


@dataclass
class KeptPositions:
    """What `CachedPositions` keeps in a cache of Transformers, as an attribute of it."""

    positions: Tensor
    """Of all tokens, (1 or B, tokens), or of all slots of a static cache."""
    keys: Any
    """The keys of the first layer: in another storage, once the rows of the cache were moved."""

    NAME = "coca_positions"


class CachedPositions(KeyPositions):
    """Positions of all slots of a cache; without one, of the tokens.

    They are kept in the cache. Of tokens of which they are not (in programs of torch.export, in a
    cache that was filled by something else) they are counted back from this pass, by the mask.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        position_ids: Tensor,
        cache: Cache | None,
        mask: Tensor | None,
        in_order: bool = False,
    ) -> None:
        """Take the tokens of this pass.

        Args:
            config: That of the model.
            dtype: dtype of the tables.
            position_ids: Those of the tokens, (1 or B, T).
            cache: The cache, before these tokens are in it.
            mask: (B, S), 1 for every real token so far, or None.
            in_order: Whether positions are known to grow by one wherever a query sees a key.
        """
        super().__init__(config, dtype, position_ids)
        self.cache, self._longest = cache, None
        device, length = position_ids.device, position_ids.shape[1]
        slots, start = length, 0
        if cache is not None:
            sizes = [
                cache.get_mask_sizes(length, index) for index in range(config.num_hidden_layers)
            ]
            slots = max(keys + first for keys, first in sizes)
            start = cache.get_seq_length()  # a tensor for static caches
        slot = torch.arange(slots, device=device)
        self.is_static = not isinstance(start, int)
        # Index in this pass, negative for earlier tokens. Computed here, because a static cache
        # updates its length in place.
        self.index_in_pass = slot - start
        self.slots = self._placed(slot, start, mask)
        # A static cache has more slots.
        last = isinstance(start, int) and slots == start + length
        if in_order:
            self.consecutive = self.begins_consecutive = last
        elif torch.compiler.is_compiling():
            self.consecutive = None if last and mask is None else False
        elif rotation(config).distance_map is not None:
            self.begins_consecutive = bool((position_ids.diff(dim=-1) == 1).all())
            self.consecutive = last and _grow_by_one(self.slots, mask)
            if not self.consecutive:
                self._longest = int(position_ids.max() - self.slots.min())
        if torch.compiler.is_compiling():
            return
        if length == 1:
            first = position_ids[:, 0] - start
            places = (first[:, None] + slot).clamp(min=0) == self.slots
            places |= slot > start
            if mask is not None:
                places = places | (F.pad(mask, (0, slots - mask.shape[1])) == 0)
            if bool(places.all()):
                self.first_position = first

    def _placed(self, slot: Tensor, start: int | Tensor, mask: Tensor | None) -> Tensor:
        """Positions of all slots, (1 or B, S)."""
        length = self.position_ids.shape[1]
        given = self.position_ids[:, self.index_in_pass.clamp(0, length - 1)]
        if isinstance(start, int) and start == 0:
            return given
        earlier = self._earlier(slot, start, mask)
        return torch.where(self.index_in_pass < 0, earlier, given).clamp(min=0)

    def _earlier(self, slot: Tensor, start: int | Tensor, mask: Tensor | None) -> Tensor:
        """Positions of earlier tokens, (1 or B, S); those of others do not matter."""
        counted, kept = self._counted(slot, start, mask), self._kept(slot, start)
        if kept is None:
            return counted
        if torch.compiler.is_compiling():
            return kept
        real = self.index_in_pass < 0
        if mask is not None:
            real = real & (F.pad(mask, (0, len(slot) - mask.shape[1])) != 0)
        rows = max(len(counted), len(kept), len(real) if real.dim() > 1 else 1)
        if len(kept) in (1, rows) and bool(((counted == kept) | ~real).all()):
            return counted
        found = getattr(self.cache, KeptPositions.NAME)
        if _have_same_rows(found.keys, _keys(self.cache)) and len(kept) in (1, rows):
            return kept
        if bool((kept == kept[:1]).all()):
            return kept[:1]
        # The rows of the cache were moved, as by beam search: counted positions are those of a row.
        same = (counted.unsqueeze(1) == kept) | ~real.expand(rows, -1).unsqueeze(1)
        if bool(same.all(-1).any(-1).all()):
            return counted
        raise ValueError(
            "the rows of this cache were moved (reordered, repeated or selected), and their "
            "positions skip or repeat some, so that those of earlier tokens are not known: read "
            "these tokens again, or give them consecutive positions"
        )

    def _counted(self, slot: Tensor, start: int | Tensor, mask: Tensor | None) -> Tensor:
        """Positions counted back from this pass, (1 or B, S)."""
        position_ids, length = self.position_ids, self.position_ids.shape[1]
        if mask is None:
            return position_ids[:, :1] + self.index_in_pass
        # Count real tokens back from the last one of this pass, so that padding anywhere does not
        # shift positions.
        mask = F.pad(mask, (0, len(slot) - mask.shape[1]))
        index = torch.arange(length, device=slot.device)
        last = (mask[:, start + index] * index).argmax(-1, keepdim=True)
        counted = mask.cumsum(-1)
        return position_ids.expand(len(mask), -1).gather(1, last) - (
            counted.gather(1, last + start) - counted
        )

    def _kept(self, slot: Tensor, start: int | Tensor) -> Tensor | None:
        """Positions that the cache has of all slots before this pass, (1 or B, S)."""
        found = getattr(self.cache, KeptPositions.NAME, None)
        if found is None or torch.compiler.is_exporting():
            return None
        kept = found.positions
        if isinstance(start, int):
            if kept.shape[1] < start:
                return None
            kept = kept[:, :start]
        return F.pad(kept, (0, len(slot) - kept.shape[1]))

    def keep_in(self, cache: Cache | None) -> None:
        """Keep the positions in the cache, once the layers have put these tokens into it."""
        if cache is None or torch.compiler.is_exporting():
            return
        found = getattr(cache, KeptPositions.NAME, None)
        if self.is_static and found is not None and found.positions.shape == self.slots.shape:
            found.positions.copy_(self.slots)  # in place, as CUDA graphs need it
            found.keys = _keys(cache)
            return
        if self.is_static and not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(self.slots)
        setattr(cache, KeptPositions.NAME, KeptPositions(self.slots, _keys(cache)))

    def longest_distance(self, keys: int) -> int | None:
        return super().longest_distance(keys) if self.consecutive else self._longest

    def _slots(self, layer_type: str | None) -> Tensor:
        return self.slots


def _keys(cache: Any) -> Any:
    """The keys of the first layer of a cache."""
    layers = getattr(cache, "layers", None)
    return getattr(layers[0], "keys", None) if layers else None


def _have_same_rows(keys: Any, later: Any) -> bool:
    """Whether later keys are the same or a view of them, as after cropping."""
    if not isinstance(keys, Tensor) or not isinstance(later, Tensor):
        return keys is later
    return len(keys) == len(later) and keys.data_ptr() == later.data_ptr()


def _grow_by_one(positions: Tensor, mask: Tensor | None) -> bool:
    """Whether positions (1 or B, S) grow by one between real tokens, which are in one piece."""
    grow = positions.diff(dim=-1) == 1
    if mask is None:
        return bool(grow.all())
    begins = F.pad(mask, (1, 0)).diff(dim=-1) > 0
    real = mask[:, 1:] * mask[:, :-1] != 0
    return bool((begins.sum(-1) <= 1).all() & (grow | ~real).all())


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
