"""Attention under a block mask, through PyTorch's FlexAttention."""

from typing import Any

import torch
from torch import Tensor


def attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, block_mask: Any, *, scale: float
) -> Tensor:
    """softmax(scale * Q K^T) V over the pairs of queries and keys that a block mask lets through.

    Under torch.compile (without fullgraph), blocks that are masked as a whole cost nothing.
    Otherwise PyTorch computes all scores at once, in memory quadratic in the length, and warns. On
    a CPU, PyTorch 2.13 has no gradients for it, and compiles it for float32, float16 and bfloat16
    only.

    Args:
        query: (B, H, T, D).
        key: (B, G, S, D); G divides H.
        value: (B, G, S, Dv).
        block_mask: From `torch.nn.attention.flex_attention.create_block_mask` for T queries and S
            keys. A fully masked row gives zeros.
        scale: Multiplies the scores.

    Returns:
        (B, H, T, Dv).

    Raises:
        NotImplementedError: From PyTorch, if a gradient is required on a CPU.
    """
    # Few use it, and importing it loads a part of torch.compile.
    from torch.nn.attention.flex_attention import flex_attention

    # PyTorch 2.13 cannot compile it for a CPU in one graph with what computes its query and key.
    torch._dynamo.graph_break()
    grouped = query.shape[1] != key.shape[1]
    output: Any = flex_attention(
        query, key, value, block_mask=block_mask, scale=scale, enable_gqa=grouped
    )
    return output
