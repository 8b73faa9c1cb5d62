"""CoCA on Transformers' own model classes, registered with the Auto classes on import.

The rope type ``ntk`` is added to Transformers' table of rope types at the same time.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from coca_attention.models.configuration import ntk_frequencies, training_length
from coca_attention.models.gpt_neox import (
    AlibiGPTNeoXConfig,
    AlibiGPTNeoXForCausalLM,
    AlibiGPTNeoXModel,
    CoCAGPTNeoXConfig,
    CoCAGPTNeoXForCausalLM,
    CoCAGPTNeoXModel,
)
from coca_attention.models.llama import CoCALlamaConfig, CoCALlamaForCausalLM, CoCALlamaModel
from coca_attention.models.loading import load_model
from coca_attention.models.scaling import set_rotary_scaling

ROPE_INIT_FUNCTIONS.setdefault("ntk", ntk_frequencies)

for _config, _model, _causal_lm in (
    (CoCAGPTNeoXConfig, CoCAGPTNeoXModel, CoCAGPTNeoXForCausalLM),
    (CoCALlamaConfig, CoCALlamaModel, CoCALlamaForCausalLM),
    (AlibiGPTNeoXConfig, AlibiGPTNeoXModel, AlibiGPTNeoXForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal_lm, exist_ok=True)

__all__ = [
    "AlibiGPTNeoXConfig",
    "AlibiGPTNeoXForCausalLM",
    "AlibiGPTNeoXModel",
    "CoCAGPTNeoXConfig",
    "CoCAGPTNeoXForCausalLM",
    "CoCAGPTNeoXModel",
    "CoCALlamaConfig",
    "CoCALlamaForCausalLM",
    "CoCALlamaModel",
    "load_model",
    "set_rotary_scaling",
    "training_length",
]
