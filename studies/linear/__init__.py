"""Rotary linear attention (RoFormer, arXiv 2104.09864, Eq. 19) with features elu(x) + 1 in a Llama.

The features, Katharopoulos et al.'s (arXiv 2006.16236), are rotated in the numerator and not in the
normaliser. Importing this package registers ``linear_llama`` with Transformers' Auto classes. It is
for training and for scoring texts of equal length: it keeps no state.
"""

from typing import Any

import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from coca_attention.ops.linear import LinearState, attend_linear


@strict
class LinearLlamaConfig(LlamaConfig):
    """`LlamaConfig` of a model with linear attention."""

    model_type = "linear_llama"

    use_cache: bool = False


class LinearLlamaAttention(LlamaAttention):
    """`LlamaAttention` without softmax."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        """(B, T, hidden), causal, whatever the mask."""
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = F.elu(query) + 1
        key = F.elu(key) + 1
        shape = *value.shape[:2], self.head_dim
        empty = LinearState(value.new_zeros(*shape, self.head_dim), value.new_zeros(shape))
        rotated = apply_rotary_pos_emb(query, key, *position_embeddings)
        output, _ = attend_linear(*rotated, value, query, key, empty)
        return self.o_proj(output.transpose(1, 2).flatten(-2)), None


class LinearLlamaForCausalLM(LlamaForCausalLM):
    """`LlamaForCausalLM` with linear attention."""

    config_class = LinearLlamaConfig

    def __init__(self, config: LinearLlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.__class__ = LinearLlamaAttention


AutoConfig.register(LinearLlamaConfig.model_type, LinearLlamaConfig)
AutoModelForCausalLM.register(LinearLlamaConfig, LinearLlamaForCausalLM)
