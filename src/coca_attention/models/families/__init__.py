"""One file a family; each names the classes of Transformers that it builds on.

A new family is a file like the others here and a line in `FAMILIES`: see docs/families.md.
"""

from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from coca_attention.models.decoder import CollinearForCausalLM
from coca_attention.models.families.cohere import CoCACohereForCausalLM
from coca_attention.models.families.gemma3 import CoCAGemma3ForCausalLM
from coca_attention.models.families.glm4 import CoCAGlm4ForCausalLM
from coca_attention.models.families.gpt_neox import CoCAGPTNeoXForCausalLM
from coca_attention.models.families.llama import CoCALlamaForCausalLM
from coca_attention.models.families.mistral import CoCAMistralForCausalLM
from coca_attention.models.families.olmo2 import CoCAOlmo2ForCausalLM
from coca_attention.models.families.phi3 import CoCAPhi3ForCausalLM
from coca_attention.models.families.qwen2 import CoCAQwen2ForCausalLM
from coca_attention.models.families.qwen3 import CoCAQwen3ForCausalLM

FAMILIES: tuple[type[CollinearForCausalLM], ...] = (
    CoCALlamaForCausalLM,
    CoCAMistralForCausalLM,
    CoCAQwen2ForCausalLM,
    CoCAQwen3ForCausalLM,
    CoCAGemma3ForCausalLM,
    CoCAPhi3ForCausalLM,
    CoCAOlmo2ForCausalLM,
    CoCAGPTNeoXForCausalLM,
    CoCACohereForCausalLM,
    CoCAGlm4ForCausalLM,
)


def family_of(model: Any) -> type[CollinearForCausalLM] | None:
    """The family of a causal language model, vanilla or CoCA; None where it is of none."""
    for family in FAMILIES:
        # Exactly the family's own class: a class made from it may have another attention.
        if isinstance(model, family) or type(model) is family.__bases__[-1]:
            return family
    return None


def register() -> None:
    """Make the families known to Transformers' Auto classes."""
    for family in FAMILIES:
        config = family.body_class.config_class
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModel.register(config, family.body_class, exist_ok=True)
        AutoModelForCausalLM.register(config, family, exist_ok=True)
