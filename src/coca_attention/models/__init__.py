"""CoCA on Transformers' own model classes, registered with the Auto classes on import.

The rope type ``ntk`` is added to Transformers' table of rope types at the same time.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from coca_attention.models.alibi import (
    AlibiGPTNeoXConfig,
    AlibiGPTNeoXForCausalLM,
    AlibiGPTNeoXModel,
)
from coca_attention.models.configuration import ntk_frequencies, training_length
from coca_attention.models.conversion import convert
from coca_attention.models.families import register
from coca_attention.models.families.gpt_neox import CoCAGPTNeoXConfig, CoCAGPTNeoXForCausalLM
from coca_attention.models.families.llama import CoCALlamaConfig, CoCALlamaForCausalLM
from coca_attention.models.loading import load_model
from coca_attention.models.original import load_original
from coca_attention.models.scaling import set_rotary_scaling

ROPE_INIT_FUNCTIONS.setdefault("ntk", ntk_frequencies)
register()
AutoConfig.register(AlibiGPTNeoXConfig.model_type, AlibiGPTNeoXConfig, exist_ok=True)
AutoModel.register(AlibiGPTNeoXConfig, AlibiGPTNeoXModel, exist_ok=True)
AutoModelForCausalLM.register(AlibiGPTNeoXConfig, AlibiGPTNeoXForCausalLM, exist_ok=True)

__all__ = [
    "AlibiGPTNeoXConfig",
    "AlibiGPTNeoXForCausalLM",
    "CoCAGPTNeoXConfig",
    "CoCAGPTNeoXForCausalLM",
    "CoCALlamaConfig",
    "CoCALlamaForCausalLM",
    "convert",
    "load_model",
    "load_original",
    "set_rotary_scaling",
    "training_length",
]
