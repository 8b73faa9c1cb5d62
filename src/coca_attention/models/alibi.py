"""GPT-NeoX with ALiBi, the paper's baseline."""

from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import (
    GPTNeoXAttention,
    GPTNeoXLayer,
    GPTNeoXPreTrainedModel,
    eager_attention_forward,
)

from coca_attention.ops import alibi


@strict
class AlibiGPTNeoXConfig(GPTNeoXConfig):
    """GPT-NeoX with linear biases instead of rotary embedding.

    ``max_position_embeddings`` is the training length in tokens; ``rope_parameters`` are unused.
    """

    model_type = "alibi_gpt_neox"


class AlibiGPTNeoXAttention(GPTNeoXAttention):
    """GPT-NeoX attention whose only position information is ALiBi's bias, in columns of heads."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        layer_past: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        batch, length, _ = hidden_states.shape
        qkv = self.query_key_value(hidden_states).view(batch, length, -1, 3 * self.head_size)
        query, key, value = qkv.transpose(1, 2).chunk(3, dim=-1)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        query, key = alibi.augment(query, key, self.scaling)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attention(
            self,
            query,
            key,
            pad(value, (0, alibi.EXTRA_COLUMNS)),
            attention_mask,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            **kwargs,
        )
        output = output.view(batch, length, -1, query.shape[-1])[..., : self.head_size]
        return self.dense(output.reshape(batch, length, -1)), weights


class NoRotary(nn.Module):
    """Replaces GPT-NeoX's rotary embedding."""

    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> None:
        return None


class AlibiGPTNeoXPreTrainedModel(GPTNeoXPreTrainedModel):
    config: AlibiGPTNeoXConfig
    _can_record_outputs = {"hidden_states": GPTNeoXLayer, "attentions": AlibiGPTNeoXAttention}


class AlibiGPTNeoXModel(AlibiGPTNeoXPreTrainedModel, GPTNeoXModel):
    def __init__(self, config: AlibiGPTNeoXConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.attention = AlibiGPTNeoXAttention(config, index)
        self.rotary_emb = NoRotary()
        self.post_init()


class AlibiGPTNeoXForCausalLM(AlibiGPTNeoXPreTrainedModel, GPTNeoXForCausalLM):
    """GPT-NeoX with ALiBi attention and a language-model head."""

    def __init__(self, config: AlibiGPTNeoXConfig) -> None:
        GPTNeoXPreTrainedModel.__init__(self, config)
        self.gpt_neox = AlibiGPTNeoXModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
