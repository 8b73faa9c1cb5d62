"""Positions of cached tokens, for half caches (coefficients before rotation), decays and limits.

Legend: B batch, T tokens of a pass, S slots of a cache, R rotary width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coca_attention.models.configuration import rotation
from coca_attention.models.fields import free_pairs, rope_parameters
from coca_attention.ops import KeyFrames, compiling, key_frames


@torch.library.custom_op("coca_attention::materialized", mutates_args=())
def materialized(x: Tensor) -> Tensor:
    """Write x to memory, because torch.compile would recompute it in every layer and head."""
    return x.clone()


@materialized.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class KeyPositions:
    """Positions of all cache slots in one forward pass, and their tables, shared by all layers.

    Tokens of this pass have the given positions. Earlier tokens are assumed to be consecutive and
    are counted back from them, skipping padding if there is a mask.

    Args:
        body: The decoder.
        cache: Its cache before this pass, or None.
        position_ids: Positions of the tokens of this pass, (1 or B, T).
        mask: 1 for every real token of the text so far, (B, S), or None.
    """

    def __init__(self, body: Any, cache: Any, position_ids: Tensor, mask: Tensor | None) -> None:
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
        # updates its length in place.
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

    def places(self, first: int, keys: int) -> tuple[Tensor, Tensor]:
        """Positions of the tokens of this pass, and of slots first … first + keys - 1."""
        return self.position_ids, self._slots()[:, first : first + keys]

    def _slots(self) -> Tensor:
        """Positions of all slots, (1 or B, S)."""
        given = self.position_ids[:, self.index_in_pass.clamp(0, self.position_ids.shape[1] - 1)]
        return torch.where(self.index_in_pass < 0, self.earlier, given).clamp(min=0)

    def tables(self, layer_type: str | None, first: int, keys: int) -> tuple[Tensor, Tensor]:
        """cos and sin of slots first … first + keys - 1, (1 or B, keys, R/2) each."""
        if layer_type not in self._tables:
            tables = rotation(self.config, layer_type).tables(self._slots(), self.dtype)
            if compiling():
                tables = materialized(tables[0]), materialized(tables[1])
            self._tables[layer_type] = tables
        cos, sin = self._tables[layer_type]
        return cos[:, first : first + keys], sin[:, first : first + keys]

    def frames(
        self, layer_type: str | None, first: int, keys: int, pairs: int, tile: int
    ) -> KeyFrames | None:
        """Tables of `attend_half` for these slots in tiles, of heads with so many rotary pairs.

        None if positions are not consecutive, or the base depends on the largest.
        """
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


def halve_static_keys(module: Any) -> Any:
    """Give a module prepared by Transformers for ExecuTorch the keys of a half cache, in place.

    Transformers makes all keys of its static cache as wide as the values before it exports.

    Args:
        module: A `TorchExportableModuleWithStaticCache` of a CoCA model with ``kv_cache="half"``.

    Returns:
        The same module.
    """
    body = module.model.base_model
    for index, attention in enumerate(body.attention_class.layout.modules(body)):
        layer = module.static_cache.layers[index]
        width = attention.head_dim // 2 + attention.free_pairs
        layer.keys = layer.keys[..., :width].clone()
        module.register_buffer(f"key_cache_{index}", layer.keys, persistent=False)
    return module
