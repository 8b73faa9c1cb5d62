"""CoCA on ModernBERT, an encoder: every token sees both directions, in local layers a window."""

from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import (
    AutoModelForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertModel,
)
from transformers.models.modernbert.modeling_modernbert import ModernBertAttention

from coca_attention.models.attention import CollinearAttention
from coca_attention.models.configuration import CoCAConfig, rotation
from coca_attention.models.decoder import CollinearHead, CollinearModel
from coca_attention.models.families.family import Family
from coca_attention.models.projections import AttentionLayout


@strict
class CoCAModernBertConfig(CoCAConfig, ModernBertConfig):
    """ModernBERT with CoCA attention; see `CoCAConfig`. It has no cache, temperature or decay."""

    model_type = "coca_modernbert"

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for kind in set(self.layer_types or ()):
            found = rotation(self, kind)
            if any(x is not None for x in (found.temperature, found.decay, found.max_distance)):
                raise ValueError(
                    "temperature, decay and max_distance count the tokens before a query, but in "
                    "an encoder a query sees those after it, too: leave them out"
                )


class CoCAModernBertAttention(CollinearAttention, ModernBertAttention):
    """ModernBERT's attention with a T projection instead of its key projection."""

    layout = AttentionLayout(
        module_name="attn",
        output_name="Wo",
        fused_name="Wqkv",
        split_fused=lambda attention, fused: fused.chunk(3, dim=-1),
    )
    num_key_value_groups = 1

    @property
    def layer_type(self: Any) -> str:
        return self.config.layer_types[self.layer_idx]

    @property
    def scaling(self: Any) -> float:
        return self.head_dim**-0.5

    def _projected(self: Any, output: Tensor, hidden_states: Tensor) -> Tensor:
        return self.out_drop(super()._projected(output, hidden_states))


class CoCAModernBertModel(CollinearModel, ModernBertModel):
    """ModernBERT's encoder with CoCA attention."""

    config: CoCAModernBertConfig
    attention_class = CoCAModernBertAttention


class CoCAModernBertForMaskedLM(CollinearHead, ModernBertForMaskedLM):
    """ModernBERT with CoCA attention and a head for masked tokens."""

    config: CoCAModernBertConfig
    body_class = CoCAModernBertModel


FAMILY = Family(
    ModernBertForMaskedLM,
    ModernBertModel,
    CoCAModernBertForMaskedLM,
    auto=AutoModelForMaskedLM,
    down_name="mlp.Wo",
)
