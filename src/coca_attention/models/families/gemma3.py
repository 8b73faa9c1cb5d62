"""CoCA on Gemma 3's text models, which have local and global layers with different rotary bases."""

from huggingface_hub.dataclasses import strict
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Gemma3TextModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention

from coca_attention.models.attention import CollinearAttention
from coca_attention.models.configuration import CoCAConfig
from coca_attention.models.decoder import CollinearForCausalLM, CollinearModel
from coca_attention.models.families.family import Family
from coca_attention.models.projections import AttentionLayout


@strict
class CoCAGemma3TextConfig(CoCAConfig, Gemma3TextConfig):
    """Gemma 3 (text) with CoCA attention; see `CoCAConfig`."""

    model_type = "coca_gemma3_text"


class CoCAGemma3Attention(CollinearAttention, Gemma3Attention):
    """Gemma 3's attention with a T projection instead of its key projection."""

    layout = AttentionLayout(norm_offset=1.0)


class CoCAGemma3TextModel(CollinearModel, Gemma3TextModel):
    """Gemma 3's text decoder with CoCA attention."""

    config: CoCAGemma3TextConfig
    attention_class = CoCAGemma3Attention


class CoCAGemma3ForCausalLM(CollinearForCausalLM, Gemma3ForCausalLM):
    """Gemma 3 (text) with CoCA attention and a language-model head."""

    config: CoCAGemma3TextConfig
    body_class = CoCAGemma3TextModel


FAMILY = Family(Gemma3ForCausalLM, Gemma3TextModel, CoCAGemma3ForCausalLM)
