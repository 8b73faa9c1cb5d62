"""Softmax attention through `scaled_dot_product_attention` in memory linear in the key length.

Legend: B batch, T query length, S key length, H query heads, G key/value heads, D head width,
Dv value width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows of queries handled at once where a mask has to be written out: the mask of a block takes
# QUERY_BLOCK * S entries, so memory stays linear in S.
QUERY_BLOCK = 512


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention_mask: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(scale * Q K^T + mask) V.

    Args:
        query: (B, H, T, D). When T < S the queries are the last T positions.
        key: (B, G, S, D); G divides H.
        value: (B, G, S, Dv). Dv may differ from D.
        attention_mask: Boolean (True = may attend) or additive, broadcastable to (B, H, T, S).
            Applied on top of causality when ``is_causal``. A row that may attend to nothing
            gives zeros.
        is_causal: Whether query i sees only keys 0 … S - T + i.
        scale: Multiplies the scores; default 1/sqrt(D).
        dropout: Probability of dropping an attention weight.

    Returns:
        (B, H, T, Dv).

    Raises:
        ValueError: If G does not divide H or there are more queries than keys under causality.
    """
    heads, queries, width = query.shape[-3:]
    groups, keys, value_width = value.shape[-3:]
    if heads % groups:
        raise ValueError(
            f"the number of key/value heads must divide the number of query heads; got "
            f"{groups} and {heads}"
        )
    if is_causal and queries > keys:
        raise ValueError(
            f"causal attention takes the queries as the last positions of the keys, so it needs "
            f"at least as many keys as queries; got {queries} queries and {keys} keys"
        )
    scale = width**-0.5 if scale is None else scale
    # The fused kernels want equal widths: with unequal ones PyTorch falls back to a kernel that
    # holds the whole score matrix. Zero columns change neither the scores nor the kept output.
    if value_width < width:
        value = F.pad(value, (0, width - value_width))
    elif value_width > width:
        query = F.pad(query, (0, value_width - width))
        key = F.pad(key, (0, value_width - width))

    def call(rows: Tensor, last: int, mask: Tensor | None, causal: bool) -> Tensor:
        k, v = key[..., :last, :], value[..., :last, :]
        grouped = groups != heads
        if grouped and mask is not None and query.device.type != "cpu":
            # On accelerators a mask together with enable_gqa selects the S * S kernel.
            k = k.repeat_interleave(heads // groups, dim=-3)
            v = v.repeat_interleave(heads // groups, dim=-3)
            grouped = False
        return F.scaled_dot_product_attention(
            rows,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=causal,
            scale=scale,
            enable_gqa=grouped,
        )

    if not is_causal or (queries == 1 and attention_mask is None):
        output = call(query, keys, attention_mask, False)
    elif attention_mask is None and queries == keys:
        output = call(query, keys, None, True)
    else:
        # `is_causal` of the kernel aligns the first query with the first key and excludes a mask.
        blocks = []
        for start in range(0, queries, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, queries)
            last = keys - queries + stop
            mask = _causal_block_mask(attention_mask, start, stop, last, query.device)
            blocks.append(call(query[..., start:stop, :], last, mask, False))
        output = torch.cat(blocks, dim=-2)
    return output[..., :value_width]


def _causal_block_mask(
    mask: Tensor | None, start: int, stop: int, last: int, device: torch.device
) -> Tensor:
    """Mask of query rows start … stop - 1, the last of which sees keys 0 … last - 1."""
    row = torch.arange(last - (stop - start), last, device=device).unsqueeze(-1)
    causal = torch.arange(last, device=device) <= row
    if mask is None:
        return causal
    if mask.shape[-2] != 1:
        mask = mask[..., start:stop, :]
    if mask.shape[-1] != 1:
        mask = mask[..., :last]
    if mask.dtype == torch.bool:
        return mask & causal
    return torch.where(causal, mask, float("-inf"))
