"""Supported families, one file each, with the Transformers classes that they build on.

To add a family, add a file like these and a line in `FAMILIES`: see docs/extending.md.
"""

from collections.abc import Iterable
from typing import Any

from transformers import AutoConfig

from coca_attention.models.families import (
    cohere,
    gemma3,
    glm4,
    gpt_neox,
    llama,
    mistral,
    modernbert,
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
    modernbert.FAMILY,
)

CLASSES: dict[str, type] = {}
"""Registered classes by name, which are found as attributes of `transformers` too."""


def family_of(model: Any) -> Family | None:
    """The family of a causal language model, vanilla or CoCA, or None."""
    for family in FAMILIES:
        # Only the exact vanilla class: a subclass may have a different attention.
        same = isinstance(model, family.causal_lm) or type(model) is family.vanilla
        if same and family.is_causal:
            return family
    return None


def supported_families(model: Any) -> str:
    """Names of the families, for error messages about an unsupported model."""
    names = ", ".join(family.vanilla_type for family in FAMILIES)
    adapted = hasattr(model, "merge_and_unload")
    hint = "; merge the adapters first (merge_and_unload)" if adapted else ""
    return f"the families {names}{hint}"


def register(config: Any, classes: Iterable[tuple[Any, type]]) -> None:
    """Register classes with Transformers' Auto classes, and in `CLASSES`.

    Args:
        config: The configuration.
        classes: Pairs of an Auto class and a model class.
    """
    AutoConfig.register(config.model_type, config, exist_ok=True)
    CLASSES[config.__name__] = config
    for auto, made in classes:
        auto.register(config, made, exist_ok=True)
        CLASSES[made.__name__] = made


def register_family(family: Family) -> None:
    """Register the CoCA classes of a family."""
    register(family.config, [(auto, made) for auto, _, made in family.classes])
