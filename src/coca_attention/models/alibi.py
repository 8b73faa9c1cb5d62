"""GPT-NeoX with ALiBi (arXiv 2108.12409), the paper's baseline.

Legend: B batch, T query length, S key length, H heads, D head width.

ALiBi subtracts ``slope * (m - n)`` from the score of query m and key n. Softmax ignores a constant
of the row, so only ``slope * n`` matters, which is an inner product: two additional columns on the
queries (the slope) and on the keys (the position). ALiBi therefore needs no bias matrix and runs
through any attention kernel in linear memory; the paper's own runs went out of memory at 16k.
"""

from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import (
    GPTNeoXAttention,
    GPTNeoXLayer,
    GPTNeoXPreTrainedModel,
    eager_attention_forward,
)

# Positions are split into hi * SPLIT + lo; both parts are exact in bfloat16 up to 65,536 tokens.
SPLIT = 256
# Columns added to queries and keys: two are used, the others are zeros for the kernels' alignment.
EXTRA_COLUMNS = 8


def slopes(num_heads: int) -> Tensor:
    """The slope of every head, (H,), float64."""
    # A geometric series with first element and ratio 2 ** (-8 / H) if H is a power of two.
    # Otherwise, as in the ALiBi authors' code, the series of the next lower power of two, followed
    # by every other element of the series of twice that power.

    def series(length: int) -> Tensor:
        return 2.0 ** (-8.0 / length * torch.arange(1, length + 1, dtype=torch.float64))

    below = 2 ** (num_heads.bit_length() - 1)
    return torch.cat((series(below), series(2 * below)[0::2][: num_heads - below]))


def augment(query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Queries (B, H, T, D + 8) and keys (B, H, S, D + 8) with scale Q'·K' = scale q·k + slope n."""
    heads, queries = query.shape[-3:-1]
    keys = key.shape[-2]
    slope = (slopes(heads) / scale).to(query)[:, None].expand(heads, queries)
    # The slope is rounded once, so that both parts use the same value in every precision.
    query_columns = torch.stack((slope * SPLIT, slope), dim=-1)
    # Counted back from the last key, so that positions near the query, which matter, are small.
    back = torch.arange(1 - keys, 1, device=key.device)
    hi = torch.div(back, SPLIT, rounding_mode="trunc")
    key_columns = torch.stack((hi, back - hi * SPLIT), dim=-1).to(key.dtype)
    pad = EXTRA_COLUMNS - 2
    query_columns = F.pad(query_columns, (0, pad)).expand(*query.shape[:-1], EXTRA_COLUMNS)
    key_columns = F.pad(key_columns, (0, pad)).expand(*key.shape[:-1], EXTRA_COLUMNS)
    return torch.cat((query, query_columns), dim=-1), torch.cat((key, key_columns), dim=-1)


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
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        batch, length, _ = hidden_states.shape
        qkv = self.query_key_value(hidden_states).view(batch, length, -1, 3 * self.head_size)
        query, key, value = qkv.transpose(1, 2).chunk(3, dim=-1)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        query, key = augment(query, key, self.scaling)
        value = F.pad(value, (0, EXTRA_COLUMNS))
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        kwargs["dropout"] = self.attention_dropout if self.training else 0.0
        output, weights = attention(
            self, query, key, value, attention_mask, scaling=self.scaling, **kwargs
        )
        output = output.view(batch, length, -1, query.shape[-1])[..., : self.head_size]
        return self.dense(output.reshape(batch, length, -1)), weights


class NoRotary(nn.Module):
    """Replaces GPT-NeoX's rotary embedding."""

    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> None:
        return None


class AlibiGPTNeoXModel(GPTNeoXModel):
    config: AlibiGPTNeoXConfig
    _can_record_outputs = {"hidden_states": GPTNeoXLayer, "attentions": AlibiGPTNeoXAttention}

    def __init__(self, config: AlibiGPTNeoXConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.attention = AlibiGPTNeoXAttention(config, index)
        self.rotary_emb = NoRotary()
        self.post_init()


class AlibiGPTNeoXForCausalLM(GPTNeoXForCausalLM):
    """GPT-NeoX with ALiBi attention and a language-model head."""

    config: AlibiGPTNeoXConfig

    def __init__(self, config: AlibiGPTNeoXConfig) -> None:
        GPTNeoXPreTrainedModel.__init__(self, config)
        self.gpt_neox = AlibiGPTNeoXModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
