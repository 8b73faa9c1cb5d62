"""CoCA on OLMo 2."""

from huggingface_hub.dataclasses import strict
from transformers import Olmo2Config, Olmo2ForCausalLM, Olmo2Model
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention

from coca_attention.models.attention import CollinearAttention
from coca_attention.models.configuration import CoCAConfig
from coca_attention.models.decoder import CollinearForCausalLM, CollinearModel
from coca_attention.models.families.family import Family
from coca_attention.models.projections import AttentionLayout


@strict
class CoCAOlmo2Config(CoCAConfig, Olmo2Config):
    """OLMo 2 with CoCA attention; see `CoCAConfig`."""

    model_type = "coca_olmo2"


class CoCAOlmo2Attention(CollinearAttention, Olmo2Attention):
    """OLMo 2's attention with a T projection instead of its key projection."""

    layout = AttentionLayout(norm_spans_heads=True)


class CoCAOlmo2Model(CollinearModel, Olmo2Model):
    """OLMo 2's decoder with CoCA attention."""

    config: CoCAOlmo2Config
    attention_class = CoCAOlmo2Attention


class CoCAOlmo2ForCausalLM(CollinearForCausalLM, Olmo2ForCausalLM):
    """OLMo 2 with CoCA attention and a language-model head."""

    config: CoCAOlmo2Config
    body_class = CoCAOlmo2Model


FAMILY = Family(Olmo2ForCausalLM, Olmo2Model, CoCAOlmo2ForCausalLM)
