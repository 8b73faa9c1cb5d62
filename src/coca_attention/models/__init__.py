"""CoCA on Transformers' model classes, registered with the Auto classes on import.

Importing this package also adds our own rope types, such as ``ntk``, and an attention function of
our own, ``fused``, to Transformers' tables.
"""

import sys

import transformers
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoModelForCausalLM

from coca_attention.models.alibi import (
    AlibiGPTNeoXConfig,
    AlibiGPTNeoXForCausalLM,
    AlibiGPTNeoXModel,
)
from coca_attention.models.configuration import add_rope_types, made_for
from coca_attention.models.conversion import Conversion, convert, load_original
from coca_attention.models.families import FAMILIES, GPT_NEOX, LLAMA, register, register_family
from coca_attention.models.fused import FUSED, fused_attention, fused_mask, use_fused_attention
from coca_attention.models.methods import METHODS, Method, applied, extend_context
from coca_attention.models.scaling import set_rotary_scaling
from coca_attention.roles import Roles


def register_models() -> None:
    """Register all classes with Transformers: done on import, and what engines call as a plugin."""
    add_rope_types()
    AttentionInterface.register(FUSED, fused_attention)
    AttentionMaskInterface.register(FUSED, fused_mask)
    classes = [made for family in FAMILIES for made in register_family(family)]
    alibi = [(AutoModel, AlibiGPTNeoXModel), (AutoModelForCausalLM, AlibiGPTNeoXForCausalLM)]
    classes += register(AlibiGPTNeoXConfig, alibi)
    # Engines look classes up by name in Transformers, which replaces its own module while it
    # loads: programs hold either object.
    for module in (transformers, sys.modules["transformers"]):
        for made in classes:
            setattr(module, made.__name__, made)


register_models()

CoCALlamaConfig = LLAMA.config
"""Llama's configuration with the fields of `CoCAConfig`."""
CoCALlamaForCausalLM = LLAMA.causal_lm
"""Llama with CoCA attention."""
CoCAGPTNeoXConfig = GPT_NEOX.config
"""GPT-NeoX's configuration with the fields of `CoCAConfig`."""
CoCAGPTNeoXForCausalLM = GPT_NEOX.causal_lm
"""GPT-NeoX, the body of the paper's models, with CoCA attention."""

__all__ = [
    "METHODS",
    "AlibiGPTNeoXConfig",
    "AlibiGPTNeoXForCausalLM",
    "CoCAGPTNeoXConfig",
    "CoCAGPTNeoXForCausalLM",
    "CoCALlamaConfig",
    "CoCALlamaForCausalLM",
    "Conversion",
    "Method",
    "Roles",
    "applied",
    "convert",
    "extend_context",
    "load_original",
    "made_for",
    "register_models",
    "set_rotary_scaling",
    "use_fused_attention",
]
