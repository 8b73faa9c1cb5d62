"""Half caches: positions of the tokens whose coefficients are kept before rotation.

Legend: B batch, T tokens of a pass, S slots of a cache.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coca_attention.models.configuration import rope_parameters, rotation
from coca_attention.ops import KeyFrames, key_frames


@torch.library.custom_op("coca_attention::materialized", mutates_args=())
def materialized(x: Tensor) -> Tensor:
    """Write x to memory, where torch.compile would compute it again in every layer and head."""
    return x.clone()


@materialized.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def compiling() -> bool:
    """Whether torch.compile is at work; exported programs hold PyTorch's own operations alone."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting()


class KeyPositions:
    """Positions of every slot in one forward pass, and the tables made of them, for all layers.

    Tokens of the pass have the positions given; those before them are taken to be consecutive,
    counted back over the padding mask where there is one.

    Args:
        body: The decoder.
        cache: Its cache as before this pass.
        position_ids: Positions of this pass, (1 or B, T).
        mask: 1 for every real token of the text so far, (B, S), where one was given.
    """

    def __init__(self, body: Any, cache: Any, position_ids: Tensor, mask: Tensor | None) -> None:
        self.body, self.position_ids = body, position_ids
        device, length = position_ids.device, position_ids.shape[1]
        sizes = [cache.get_mask_sizes(length, index) for index in range(len(body.layers))]
        slots = max(keys + first for keys, first in sizes)
        start = cache.get_seq_length()  # a tensor for static caches
        slot = torch.arange(slots, device=device)
        # Before this pass below 0. Kept, for a static cache counts its own length on in place.
        self.place = slot - start
        if mask is None:
            self.earlier = position_ids[:, :1] + self.place
        else:
            # Count real tokens back from the last real one of this pass, so that padding anywhere
            # shifts nothing.
            mask = F.pad(mask, (0, slots - mask.shape[1]))
            real = mask[:, (start + torch.arange(length, device=device))]
            index = (real * torch.arange(length, device=device)).argmax(-1, keepdim=True)
            counted = mask.cumsum(-1)
            self.earlier = position_ids.expand(len(mask), -1).gather(1, index) - (
                counted.gather(1, index + start) - counted
            )
        self.first_position = None
        if length == 1 and not torch.compiler.is_compiling():
            # One new token: slots stand at consecutive positions, unless there are gaps.
            first = position_ids[:, 0] - start
            if mask is None or bool(((first[:, None] + slot == self.earlier) | (mask == 0)).all()):
                self.first_position = first
        self.made: dict[Any, Any] = {}

    def _positions(self) -> Tensor:
        """Of all slots, (1 or B, S)."""
        own = self.position_ids[:, self.place.clamp(0, self.position_ids.shape[1] - 1)]
        return torch.where(self.place < 0, self.earlier, own).clamp(min=0)

    def rotary(self, layer_type: str | None, first: int, keys: int) -> tuple[Tensor, Tensor]:
        """cos and sin of slots first … first + keys - 1, (1 or B, keys, R/2) each."""
        config, kind = self.body.config, ("rotary", layer_type)
        if kind not in self.made:
            like = torch.empty((), dtype=self.body.dtype, device=self.position_ids.device)
            named = layer_type if rotary_is_by_layer(config) else None
            made = self.body.rotary_emb(like, self._positions(), named)[:2]
            if compiling():
                made = tuple(materialized(x) for x in made)
            self.made[kind] = made
        cos, sin = self.made[kind]
        return cos[:, first : first + keys], sin[:, first : first + keys]

    def frames(
        self, layer_type: str | None, first: int, keys: int, pairs: int, tile: int
    ) -> KeyFrames | None:
        """Tables for `attend_half` over these slots; None where positions are not consecutive.

        Args:
            layer_type: Kind of the layer, where kinds differ in their rotation.
            first: First slot that the layer's cache returned.
            keys: How many it returned.
            pairs: Rotary pairs of a head.
            tile: Keys of a tile.
        """
        if self.first_position is None:
            return None
        kind = ("frames", layer_type, first, keys, pairs, tile)
        if kind not in self.made:
            config = self.body.config
            named = layer_type if rotary_is_by_layer(config) else None
            found = rotation(config, named)
            if found.rule.follows_length:
                return None  # its base follows the largest position
            self.made[kind] = key_frames(
                self.first_position + first,
                keys,
                found,
                tile=tile,
                pairs=pairs,
                free_pairs=config.coca_free_pairs,
                dtype=torch.promote_types(self.body.dtype, torch.float32),
            )
        return self.made[kind]


def rotary_is_by_layer(config: Any) -> bool:
    """Whether kinds of layers have rotary parameters of their own."""
    return rope_parameters(config) is not (config.rope_parameters or {})
