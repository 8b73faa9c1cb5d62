"""CoCA on Llama."""

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaAttention

from coca_attention.models.attention import CollinearAttention
from coca_attention.models.configuration import CoCAConfig
from coca_attention.models.decoder import CollinearForCausalLM, CollinearModel
from coca_attention.models.families.family import Family


@strict
class CoCALlamaConfig(CoCAConfig, LlamaConfig):
    """Llama with CoCA attention; see `CoCAConfig`."""

    model_type = "coca_llama"


class CoCALlamaAttention(CollinearAttention, LlamaAttention):
    """Llama's attention with a T projection instead of its key projection."""


class CoCALlamaModel(CollinearModel, LlamaModel):
    """Llama's decoder with CoCA attention."""

    config: CoCALlamaConfig
    attention_class = CoCALlamaAttention


class CoCALlamaForCausalLM(CollinearForCausalLM, LlamaForCausalLM):
    """Llama with CoCA attention and a language-model head."""

    config: CoCALlamaConfig
    body_class = CoCALlamaModel


FAMILY = Family(LlamaForCausalLM, LlamaModel, CoCALlamaForCausalLM)
