"""CoCA on GLM-4."""

from huggingface_hub.dataclasses import strict
from transformers import Glm4Config, Glm4ForCausalLM, Glm4Model
from transformers.models.glm4.modeling_glm4 import Glm4Attention

from coca_attention.models.attention import CollinearAttention
from coca_attention.models.configuration import CoCAConfig
from coca_attention.models.decoder import CollinearForCausalLM, CollinearModel
from coca_attention.models.families.family import Family
from coca_attention.models.projections import AttentionLayout


@strict
class CoCAGlm4Config(CoCAConfig, Glm4Config):
    """GLM-4 with CoCA attention; see `CoCAConfig`."""

    model_type = "coca_glm4"


class CoCAGlm4Attention(CollinearAttention, Glm4Attention):
    """GLM-4's attention with a T projection instead of its key projection."""

    layout = AttentionLayout(interleaved=True)


class CoCAGlm4Model(CollinearModel, Glm4Model):
    """GLM-4's decoder with CoCA attention."""

    config: CoCAGlm4Config
    attention_class = CoCAGlm4Attention


class CoCAGlm4ForCausalLM(CollinearForCausalLM, Glm4ForCausalLM):
    """GLM-4 with CoCA attention and a language-model head."""

    config: CoCAGlm4Config
    body_class = CoCAGlm4Model


FAMILY = Family(Glm4ForCausalLM, Glm4Model, CoCAGlm4ForCausalLM)
