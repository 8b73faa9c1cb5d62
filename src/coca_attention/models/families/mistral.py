"""CoCA on Mistral."""

from huggingface_hub.dataclasses import strict
from transformers import MistralConfig, MistralForCausalLM, MistralModel
from transformers.models.mistral.modeling_mistral import MistralAttention

from coca_attention.models.attention import CollinearAttention
from coca_attention.models.configuration import CoCAConfig
from coca_attention.models.decoder import CollinearForCausalLM, CollinearModel
from coca_attention.models.families.family import Family


@strict
class CoCAMistralConfig(CoCAConfig, MistralConfig):
    """Mistral with CoCA attention; see `CoCAConfig`."""

    model_type = "coca_mistral"


class CoCAMistralAttention(CollinearAttention, MistralAttention):
    """Mistral's attention with a T projection instead of its key projection."""


class CoCAMistralModel(CollinearModel, MistralModel):
    """Mistral's decoder with CoCA attention."""

    config: CoCAMistralConfig
    attention_class = CoCAMistralAttention


class CoCAMistralForCausalLM(CollinearForCausalLM, MistralForCausalLM):
    """Mistral with CoCA attention and a language-model head."""

    config: CoCAMistralConfig
    body_class = CoCAMistralModel


FAMILY = Family(MistralForCausalLM, MistralModel, CoCAMistralForCausalLM)
