"""Self-Extend (Jin et al. 2024, arXiv 2401.01325) and dropped positions (DroPE) in rotary models.

B batch, T query length.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from coca_attention.ops.distances import attend_by_distance


class Unrotated(nn.Module):
    """Cosines of 1 and sines of 0: attention gets queries and keys as they are projected."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Position embeddings (B, T, 1) that rotate nothing."""
        ones = torch.ones(*position_ids.shape, 1, dtype=x.dtype, device=x.device)
        return ones, torch.zeros_like(ones)


def drop_positions(model: Any, length: int) -> None:
    """DroPE's dropping (Gelberg et al., ICLR 2026) without the recalibration that it recommends."""
    model.base_model.rotary_emb = Unrotated()


def self_extend(model: Any, length: int, *, window: int) -> None:
    """Score keys from ``window`` tokens back on at positions divided by the smallest group size.

    The size is the smallest with which the largest distance of a text is within the training
    length: (L - window) * size + window >= length.
    """
    trained = model.config.max_position_embeddings
    size = max(1, -(-(length - window) // (trained - window)))
    rotary, model.base_model.rotary_emb = model.base_model.rotary_emb, Unrotated()

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        return apply_rotary_pos_emb(x, x, *rotary(x, positions[None]))[0]

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        positions = torch.arange(key.shape[2], device=key.device)
        rows = positions[-query.shape[2] :]
        output = attend_by_distance(
            rotate(query, rows),
            rotate(key, positions),
            rotate(query, rows // size + window - window // size),
            rotate(key, positions // size),
            value,
            rows,
            positions,
            window,
            scale=scaling,
        )
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register("self_extend", attention)
    model.config._attn_implementation = "self_extend"
