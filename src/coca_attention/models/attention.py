"""The attention core that every CoCA model of the Transformers kind shares.

Legend: B batch, T query length, S key length, H query heads, G key/value heads, D head width,
P = D/2 rotary pairs.

The core hands (Q', K', V) to Transformers' own attention interface, so that SDPA, FlashAttention,
FlexAttention and eager attention all compute CoCA. The cache holds K' after rotation at the usual
width D: it works with every cache class that Transformers has.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from coca_attention.layers.coca import project_collinear
from coca_attention.models.configuration import rotary_scaling, rotary_width
from coca_attention.ops import rotary_cos_sin


class CoCARotary(nn.Module):
    """cos and sin at width P in float32 or wider, computed from the configuration at every call.

    It has no buffers: a long input never changes a later short one, and there is nothing to go
    stale when a model is loaded or its ``rope_parameters`` are changed.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    @torch.no_grad()
    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each (B, T, P), float32 or wider, for position_ids (B, T)."""
        base, scaling = rotary_scaling(self.config)
        return rotary_cos_sin(
            position_ids,
            rotary_width(self.config),
            base=base,
            scaling=scaling,
            dtype=torch.promote_types(hidden_states.dtype, torch.float32),
        )


class FoldedLinear(nn.Linear):
    """The T projection, stored folded: one output per rotary pair in place of two.

    A class of its own so that it is initialised as the mean of two rows of an unfolded projection.
    """

    def init_folded(self, std: float) -> None:
        """Draw the weights with std/√2, the bias zero."""
        init.normal_(self.weight, mean=0.0, std=std / 2**0.5)
        if self.bias is not None:
            init.zeros_(self.bias)


class CollinearAttention(nn.Module):
    """Projections and scores of CoCA for a Transformers decoder layer.

    Subclasses name the output projection after their family's (`output_name`), so that a vanilla
    model's other weights fit as they are.
    """

    output_name = "o_proj"

    def __init__(
        self,
        config: Any,
        layer_idx: int,
        *,
        num_key_value_heads: int,
        head_dim: int,
        bias: bool,
    ) -> None:
        super().__init__()
        heads = config.num_attention_heads
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = head_dim
        self.num_key_value_groups = heads // num_key_value_heads
        self.is_causal = True
        hidden = config.hidden_size
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=bias)
        self.t_proj = FoldedLinear(hidden, num_key_value_heads * head_dim // 2, bias=bias)
        self.v_proj = nn.Linear(hidden, num_key_value_heads * head_dim, bias=bias)
        self.add_module(self.output_name, nn.Linear(heads * head_dim, hidden, bias=bias))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """One attention layer.

        Args:
            hidden_states: (B, T, hidden).
            attention_mask: What the attention implementation takes.
            position_embeddings: cos and sin from `CoCARotary`.
            past_key_values: Cache, by the name most families use.
            layer_past: Cache, by GPT-NeoX's name.
            **kwargs: Passed on to the attention implementation.

        Returns:
            (B, T, hidden) and the attention weights where the implementation gives them.
        """
        assert position_embeddings is not None  # always passed by the decoder
        batch, length, _ = hidden_states.shape
        cos, sin = position_embeddings
        query, key, value = project_collinear(
            hidden_states,
            self.q_proj,
            self.t_proj,
            self.v_proj,
            cos,
            sin,
            form=self.config.coca_form,
            head_dim=self.head_dim,
        )
        cache = past_key_values if past_key_values is not None else layer_past
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.config.attention_dropout if self.training else 0.0
        output, weights = attention(
            self, query, key, value, attention_mask, scaling=1.0, dropout=dropout, **kwargs
        )
        output = output.reshape(batch, length, -1).contiguous()
        return self.get_submodule(self.output_name)(output), weights


class TruePositions:
    """Takes positions from the padding mask where a caller gives a mask but no positions.

    The slack form answers to true positions, so left padding must not shift them. Mixed in before
    a family's decoder.
    """

    def forward(
        self: Any,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The decoder's forward pass; arguments as there."""
        tokens = input_ids if input_ids is not None else kwargs.get("inputs_embeds")
        if (
            position_ids is None
            and tokens is not None
            and attention_mask is not None
            and attention_mask.dim() == 2
        ):
            counted = attention_mask.long().cumsum(-1) - 1
            position_ids = counted.clamp(min=0)[:, -tokens.shape[1] :]
        forward = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        return forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **kwargs,
        )
