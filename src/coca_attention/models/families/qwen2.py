"""CoCA on Qwen2."""

from huggingface_hub.dataclasses import strict
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from coca_attention.models.attention import CollinearAttention
from coca_attention.models.configuration import CoCAConfig
from coca_attention.models.decoder import CollinearForCausalLM, CollinearModel
from coca_attention.models.families.family import Family


@strict
class CoCAQwen2Config(CoCAConfig, Qwen2Config):
    """Qwen2 with CoCA attention; see `CoCAConfig`."""

    model_type = "coca_qwen2"


class CoCAQwen2Attention(CollinearAttention, Qwen2Attention):
    """Qwen2's attention with a T projection instead of its key projection."""


class CoCAQwen2Model(CollinearModel, Qwen2Model):
    """Qwen2's decoder with CoCA attention."""

    config: CoCAQwen2Config
    attention_class = CoCAQwen2Attention


class CoCAQwen2ForCausalLM(CollinearForCausalLM, Qwen2ForCausalLM):
    """Qwen2 with CoCA attention and a language-model head."""

    config: CoCAQwen2Config
    body_class = CoCAQwen2Model


FAMILY = Family(Qwen2ForCausalLM, Qwen2Model, CoCAQwen2ForCausalLM)
