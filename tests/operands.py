"""Random operands of attention, the same in every run."""

import torch

from coca_attention.ops import activate


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def operands(
    *, batch=2, heads=4, kv_heads=2, queries=13, keys=29, width=16, value_width=16, free=0, seed=0
) -> list[torch.Tensor]:
    """Queries, key coefficients of collinear and then of free pairs, and values, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [
        draw(batch, heads, queries, width),
        activate(draw(batch, kv_heads, keys, width // 2 + free), width // 2),
        draw(batch, kv_heads, keys, value_width),
    ]
