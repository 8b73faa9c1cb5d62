"""Changing the rotary scaling of a loaded model, CoCA or vanilla."""

import copy
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from coca_attention.errors import UserError, check_is_loaded, check_whole
from coca_attention.models.configuration import (
    GLOBAL,
    LOCAL_RULE,
    ROTATION_FIELDS,
    add_rope_types,
    original_length,
    rope_parameters,
    rope_type_of,
    rotation,
    with_global,
)
from coca_attention.models.families import FAMILIES, supported_families
from coca_attention.models.frequencies import PARAMETERS, RULE_DEFAULTS
from coca_attention.models.rotary import CoCARotary, StatelessRotary
from coca_attention.ops import NTK, RULES

KEPT = (
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    LOCAL_RULE,
    *ROTATION_FIELDS,
)


def set_rotary_scaling(
    model: PreTrainedModel,
    kind: str,
    *,
    factor: float | None = None,
    length: int | None = None,
    **parameters: object,
) -> None:
    """Set the rotary scaling of a model, in place.

    Works on CoCA models and on Transformers' models of the same families. The rule replaces the
    current one and is stored in the configuration. In families with several layer types (Gemma 3)
    it applies to the layers with full attention, because a sliding window never reaches far.
    Loading a vanilla model that was saved with ``ntk`` requires importing this package, which
    registers the rule; Transformers logs that it has no validation function for it, which changes
    nothing. Transformers' own Phi-3 can only be saved with ``longrope``.

    Args:
        model: A loaded model, in the dtype that it is to have: casting it afterwards casts the
            frequencies of Transformers' own rotary modules, too.
        kind: ``none``, ``linear`` (position interpolation), ``ntk`` (base fixed by the target
            length), ``dynamic`` (base derived from the length of each forward pass; exact for a
            full pass, inexact when decoding with a cache), ``yarn``, ``llama3``, ``longrope``, or a
            registered rule. One that follows the length of each text is for CoCA models only.
        factor: Scaling factor, at least 1. Default: that of the current rule if it is of the same
            kind; for ``longrope``, derived from the configuration; otherwise 1.
        length: Target length in tokens, for ``ntk`` (without it the base is multiplied by
            ``factor ** (D / (D - 2))``) and, in CoCA models, ``longrope`` (without it the long
            factors apply; Transformers' own models choose by each text).
        **parameters: Other parameters of the rule (what Transformers reads, or the fields of a
            registered class), for example ``low_freq_factor`` for ``llama3``. Default: those of the
            current rule if it is of the same kind.

    Raises:
        UserError: If the model has no rotary embedding or that of another family, or a value is out
            of range. The model is then unchanged.
    """
    check_is_loaded(model)
    check_rotary_modules(model)
    given = {"factor": factor, "length": length, **parameters}
    try:
        rope = _changed_parameters(model.config.get_text_config(), kind, given)
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error
    set_rope_parameters(model, rope)


def check_rotary_modules(model: PreTrainedModel) -> None:
    """Raise UserError unless a model has rotary modules, and they are of a supported family."""
    modules = rotary_modules(model).values()
    if not modules:
        raise UserError(
            f"a model of type {model.config.get_text_config().model_type!r} has no rotary "
            "embedding to scale; use scaling none"
        )
    for made in (_class_of(each) for each in modules if not isinstance(each, CoCARotary)):
        # A subclass of a family's may compute something else.
        if all(made is not family.rotary for family in FAMILIES):
            raise UserError(
                f"scaling of the rotary embedding {made.__name__} is not supported; supported are "
                f"those of {supported_families(model)}"
            )


def _changed_parameters(
    config: PreTrainedConfig, kind: str, given: dict[str, object]
) -> dict[str, Any]:
    """The rotary parameters of a configuration with another rule; None counts as not given."""
    if not isinstance(kind, str) or kind not in {*RULES, *PARAMETERS}:
        known = ", ".join((*RULES, *PARAMETERS))
        raise UserError(f"unknown rotary scaling {kind!r}; choose one of {known}")
    rope = rope_parameters(config)
    trained = original_length(config)
    if rope is not config.rope_parameters and GLOBAL not in config.layer_types:
        raise UserError(
            "this model has no layer with full attention, and sliding windows are not scaled"
        )
    known = {*KEPT, "rope_type", "type"}
    known |= {name for other in RULES.values() for name in other.field_names()}
    known |= {name for names in PARAMETERS.values() for name in names}
    unsupported = sorted(name for name in rope if name not in known and rope[name] is not None)
    if unsupported:
        raise UserError(
            f"scaling of this model's rotary embedding is not supported, because its parameters "
            f"include {', '.join(unsupported)}"
        )
    if kind in PARAMETERS:
        taken = set(PARAMETERS[kind])
        defaults = RULE_DEFAULTS[kind]
    else:
        taken = set(RULES[kind].field_names()) - {"training_length"}
        defaults = {name: getattr(RULES[kind], name, None) for name in taken}
    given = {name: value for name, value in given.items() if value is not None}
    unknown = sorted(set(given) - taken - {"factor"})  # which every rule may be called with
    if unknown:
        takes = f"; it takes {', '.join(sorted(taken))}" if taken else ""
        raise UserError(f"rotary scaling {kind!r} does not take {', '.join(unknown)}{takes}")
    length = given.get("length")
    if length is not None:
        lowest = trained if kind == NTK.kind and trained else 1
        check_whole(
            "the target length, in tokens and no less than L,", length, lowest, error=UserError
        )
    rope_type = rope_type_of(kind)
    changed = {name: rope[name] for name in KEPT if name in rope} | {"rope_type": rope_type}
    if kind in PARAMETERS and kind != "dynamic" and trained:
        # Transformers requires it to save the configuration.
        changed.setdefault("original_max_position_embeddings", trained)
    current = rope if rope.get("rope_type", "default") == rope_type else {}
    for name in sorted(taken):
        value = given.get(name)
        if value is None and name != "length":  # a target is for one call
            value = current.get(name)
        if value is None:
            # Transformers requires some parameters to save a configuration.
            value = defaults.get(name)
        if value is not None:
            changed[name] = list(value) if isinstance(value, tuple) else value
    if "factor" in changed:
        changed["factor"] = float(changed["factor"])
    return changed


def set_rope_parameters(model: PreTrainedModel, rope: dict[str, Any]) -> None:
    """Set the rotary parameters of layers that see the whole text, and make its rotary modules.

    They are Transformers' own, so a model computes what its files would be loaded as. UserError if
    a value is out of range; the model is then unchanged.
    """
    add_rope_types()  # a rule may have been registered after the import
    config: PreTrainedConfig = model.config.get_text_config()
    kind = rope["rope_type"]
    changed = copy.copy(config)
    changed.rope_parameters = with_global(config, rope)
    try:
        # Compute the tables once, which checks the parameters.
        CoCARotary(changed)(torch.zeros(1), torch.zeros(1, 1, dtype=torch.long))
        follows = rotation(changed).follows_length
    except (ValueError, TypeError, ArithmeticError) as error:
        raise UserError(str(error)) from error
    replacements: dict[str, nn.Module] = {}
    for name, module in rotary_modules(model).items():
        if isinstance(module, CoCARotary):  # it reads the configuration in every pass
            continue
        if follows and kind != "dynamic":
            raise UserError(
                f"rotary scaling {kind!r} follows the length of each text, which Transformers' own "
                "models do with dynamic and longrope alone: convert the model first"
            )
        if kind == "dynamic":
            replacements[name] = StatelessRotary(_class_of(module), config)
            continue
        # Its own device, because the parameters of an offloaded model are on none.
        device = next(chain(module.buffers(), model.parameters())).device
        with torch.inference_mode(False):  # longrope writes into its frequencies in later passes
            made: Any = _class_of(module)(changed).to(device)
        made.config = config
        replacements[name] = made
    config.rope_parameters = changed.rope_parameters
    for name, replacement in replacements.items():
        model.set_submodule(name, replacement)


def rotary_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The rotary modules of a model by name, ours and Transformers'."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, CoCARotary | StatelessRotary)
        or hasattr(module, "compute_default_rope_parameters")
    }


def _class_of(module: nn.Module) -> type[nn.Module]:
    """Transformers' class of a rotary module that is not of a CoCA model."""
    return module.made if isinstance(module, StatelessRotary) else type(module)
