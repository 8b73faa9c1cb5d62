"""Supported families, one file each, with the Transformers classes that they build on.

To add a family, add a file like these and a line in `FAMILIES`: see docs/extending.md.
"""

from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from coca_attention.models.families import (
    cohere,
    gemma3,
    glm4,
    gpt_neox,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
)
from coca_attention.models.families.family import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma3.FAMILY,
    phi3.FAMILY,
    olmo2.FAMILY,
    gpt_neox.FAMILY,
    cohere.FAMILY,
    glm4.FAMILY,
)

CLASSES: dict[str, type] = {}
"""Registered classes by name, which are found as attributes of `transformers` too."""


def family_of(model: Any) -> Family | None:
    """The family of a causal language model, vanilla or CoCA, or None."""
    for family in FAMILIES:
        # Only the exact vanilla class: a subclass may have a different attention.
        if isinstance(model, family.causal_lm) or type(model) is family.vanilla:
            return family
    return None


def supported_families(model: Any) -> str:
    """Names of the families, for error messages about an unsupported model."""
    names = ", ".join(family.vanilla_type for family in FAMILIES)
    adapted = hasattr(model, "merge_and_unload")
    hint = "; merge the adapters first (merge_and_unload)" if adapted else ""
    return f"the families {names}{hint}"


def register(config: type, body: type, causal_lm: type) -> None:
    """Register classes with Transformers' Auto classes, and in `CLASSES`."""
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, body, exist_ok=True)
    AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)
    CLASSES.update({cls.__name__: cls for cls in (config, body, causal_lm)})


def register_family(family: Family) -> None:
    """Register the CoCA classes of a family."""
    register(family.config, family.body, family.causal_lm)
