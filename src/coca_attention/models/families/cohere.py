"""CoCA on Cohere."""

from huggingface_hub.dataclasses import strict
from transformers import CohereConfig, CohereForCausalLM, CohereModel
from transformers.models.cohere.modeling_cohere import CohereAttention

from coca_attention.models.attention import CollinearAttention
from coca_attention.models.configuration import CoCAConfig
from coca_attention.models.decoder import CollinearForCausalLM, CollinearModel
from coca_attention.models.families.family import Family
from coca_attention.models.projections import AttentionLayout


@strict
class CoCACohereConfig(CoCAConfig, CohereConfig):
    """Cohere with CoCA attention; see `CoCAConfig`."""

    model_type = "coca_cohere"


class CoCACohereAttention(CollinearAttention, CohereAttention):
    """Cohere's attention with a T projection instead of its key projection."""

    layout = AttentionLayout(interleaved=True)


class CoCACohereModel(CollinearModel, CohereModel):
    """Cohere's decoder with CoCA attention."""

    config: CoCACohereConfig
    attention_class = CoCACohereAttention


class CoCACohereForCausalLM(CollinearForCausalLM, CohereForCausalLM):
    """Cohere with CoCA attention and a language-model head."""

    config: CoCACohereConfig
    body_class = CoCACohereModel


FAMILY = Family(CohereForCausalLM, CohereModel, CoCACohereForCausalLM)
