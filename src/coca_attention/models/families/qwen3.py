"""CoCA on Qwen3."""

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from coca_attention.models.attention import CollinearAttention
from coca_attention.models.configuration import CoCAConfig
from coca_attention.models.decoder import CollinearForCausalLM, CollinearModel
from coca_attention.models.families.family import Family


@strict
class CoCAQwen3Config(CoCAConfig, Qwen3Config):
    """Qwen3 with CoCA attention; see `CoCAConfig`."""

    model_type = "coca_qwen3"


class CoCAQwen3Attention(CollinearAttention, Qwen3Attention):
    """Qwen3's attention with a T projection instead of its key projection."""


class CoCAQwen3Model(CollinearModel, Qwen3Model):
    """Qwen3's decoder with CoCA attention."""

    config: CoCAQwen3Config
    attention_class = CoCAQwen3Attention


class CoCAQwen3ForCausalLM(CollinearForCausalLM, Qwen3ForCausalLM):
    """Qwen3 with CoCA attention and a language-model head."""

    config: CoCAQwen3Config
    body_class = CoCAQwen3Model


FAMILY = Family(Qwen3ForCausalLM, Qwen3Model, CoCAQwen3ForCausalLM)
