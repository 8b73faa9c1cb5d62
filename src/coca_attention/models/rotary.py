"""Rotary modules without state for Transformers models.

Legend: B batch, T tokens of a pass, R rotary width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from coca_attention.models.configuration import rotation, window_of
from coca_attention.ops.positions import Decay, DistanceMap


class Far(NamedTuple):
    """What a layer with a distance map needs for far keys."""

    distance_map: DistanceMap
    tables: tuple[Tensor, Tensor]  # of the queries, see `Rotation.far_tables`
    # Of the keys of this pass, as by `Rotation.tables`; None if near ones or coefficients serve.
    key_tables: tuple[Tensor, Tensor] | None


class Angles(NamedTuple):
    """How the positions of a pass act on the scores of layers of one type."""

    cos: Tensor  # (B, T, R/2)
    sin: Tensor
    factor: Tensor | None  # on the queries, (B, T)
    decay: Decay | None  # addend of the scores
    far: Far | None  # with a distance map


class CoCARotary(nn.Module):
    """cos and sin with half the rotary width, from the configuration at every call."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config  # and no buffers, which another length or rule would leave stale

    @torch.no_grad()
    def forward(
        self, hidden_states: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> Angles:
        """`Angles` of position_ids (B, T), for the layers of a type."""
        turning = rotation(self.config, layer_type)
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        factor = turning.query_factor(position_ids, dtype, window_of(self.config, layer_type))
        far = None
        if turning.distance_map is not None:
            tables = turning.far_tables(position_ids, dtype)
            key_tables = None
            if not (turning.distance_map.shares_keys or turning.distance_map.is_limit):
                key_tables = turning.tables(position_ids, dtype, of="far")
            far = Far(turning.distance_map, tables, key_tables)
        cos, sin = turning.tables(position_ids, dtype)
        return Angles(cos, sin, factor, turning.bias, far)


class StatelessRotary(nn.Module):
    """A rotary module of Transformers that is made in every pass.

    With dynamic scaling it keeps the base of the longest text so far, also for one of L tokens.
    """

    def __init__(self, made: type[nn.Module], config: PreTrainedConfig) -> None:
        super().__init__()
        self.made = made
        self.config = config

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """cos and sin of the module that is made."""
        made = self.made(self.config).to(hidden_states.device)
        return made(hidden_states, *args, **kwargs)
