"""Turning a vanilla decoder into the CoCA model of its family, in place."""

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization

from coca_attention.errors import UserError
from coca_attention.models.attention import Initialisation
from coca_attention.models.calibration import attention_inputs, check_calibration
from coca_attention.models.decoder import (
    CollinearForCausalLM,
    CollinearModel,
    become,
    exchange_attention,
)
from coca_attention.models.families import FAMILIES
from coca_attention.ops.maps import Form

INITIALISATIONS: tuple[str, ...] = get_args(Initialisation)


def vanilla_type(family: type[CollinearForCausalLM]) -> str:
    """The ``model_type`` that a family's vanilla models have."""
    return family.body_class.config_class.model_type.removeprefix("coca_")


def convert(
    model: PreTrainedModel,
    form: Form = "slack",
    *,
    init: Initialisation = "fold",
    calibration: Tensor | None = None,
    kv_cache: str = "full",
    progress: Callable[[str, int, int], Any] | None = None,
) -> PreTrainedModel:
    """Turn a vanilla decoder into the CoCA model of its family, in place.

    Its key projections (and key norms) are exchanged for T projections, its class and
    configuration for the registered ``coca_*`` ones. Every other weight stays the same tensor.
    The result is another function than before: it has to be trained on.

    Args:
        model: A loaded causal language model (or its decoder) of a supported family.
        form: ``slack`` (the paper's Eq. 10), ``strict`` (Eq. 9) or ``linear``.
        init: How T projections begin. ``fold``: as the pair means of the key projections' rows,
            so that t_j = relu of the mean of key pair j. ``calibrated``: fitted to the model's own
            scores on the calibration texts (`calibration.py`), for models without a norm on keys.
            ``random``: drawn.
        calibration: Token ids (texts, tokens) for ``calibrated``, some thousands of the kind that
            the model is to read; a text holds T² attention weights a head.
        kv_cache: ``full`` or ``half``, see `CoCAConfig`.
        progress: Called with a label, the calibration texts read and layers exchanged so far, and
            how many there are.

    Returns:
        The model given.

    Raises:
        UserError: If the model is of no supported family, already converted, or its projections
            are not plain and in memory. It is then as it was.
    """
    if init not in INITIALISATIONS:
        raise UserError(f"init must be one of {', '.join(INITIALISATIONS)}; got {init!r}")
    if calibration is not None and init != "calibrated":
        raise UserError(f"calibration is of init calibrated; got it with init {init}")
    if isinstance(model, CollinearForCausalLM | CollinearModel):
        raise UserError(f"{type(model).__name__} is a CoCA model already")
    if torch.is_inference_mode_enabled():
        raise UserError(
            "weights made under torch.inference_mode() can never be trained: convert outside of it"
        )
    family, new_class = _classes_for(model)
    body: Any = model.base_model
    if isinstance(body, CollinearModel):
        raise UserError(
            f"the decoder inside this {type(model).__name__} was converted by itself: convert the "
            "language model as a whole"
        )
    _check_projections(body, family.body_class)
    old: Any = model.config
    values = {k: v for k, v in old.to_dict().items() if k not in ("model_type", "architectures")}
    try:
        config = family.body_class.config_class.from_dict(
            {**values, "coca_form": form, "kv_cache": kv_cache}
        )
    except Exception as error:
        # A strict configuration wraps what its checks raised.
        raise UserError(f"no CoCA model can have this configuration: {error}") from error
    config._attn_implementation = old._attn_implementation
    config.name_or_path = old.name_or_path
    inputs: list[Tensor] = []
    done, total = 0, len(body.layers) + (0 if calibration is None else len(calibration))

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress("converting", done, total)

    if init == "calibrated":
        modules = [getattr(layer, family.body_class.attention_name) for layer in body.layers]
        check_calibration(calibration, config.vocab_size, modules)
        assert calibration is not None  # checked
        inputs = attention_inputs(model, modules, calibration, advance)

    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = config
    exchange_attention(body, family.body_class, init, inputs, advance)
    become(model, new_class, config)
    # Sharding plans and the like follow the class and are made here; the weights are not drawn.
    with initialization.no_init_weights():
        body.post_init()
        model.post_init()
    return model


def _classes_for(model: Any) -> tuple[type[CollinearForCausalLM], type]:
    """A model's family, and the class that it is to have."""
    for family in FAMILIES:
        if type(model) is family.__bases__[-1]:
            return family, family
        if type(model) is family.body_class.__bases__[-1]:
            return family, family.body_class
    known = ", ".join(vanilla_type(family) for family in FAMILIES)
    hint = ""
    if hasattr(model, "merge_and_unload"):
        hint = "; merge the adapters first (merge_and_unload)"
    raise UserError(
        f"{type(model).__name__} cannot be converted: supported are the causal language models of "
        f"the families {known}{hint}"
    )


def _check_projections(body: Any, body_class: type[CollinearModel]) -> None:
    modules = [getattr(layer, body_class.attention_name) for layer in body.layers]
    if len(set(map(id, modules))) < len(modules):
        raise UserError("layers share an attention module, which cannot be converted twice")
    for index, layer in enumerate(body.layers):
        attention = getattr(layer, body_class.attention_name)
        for name, module in attention.named_children():
            if not name.endswith(("proj", "query_key_value", "dense")):
                continue
            if type(module) is not nn.Linear:
                raise UserError(
                    f"layer {index}: {name} is a {type(module).__name__}, not a plain Linear: "
                    "merge adapters, and load the model without quantisation"
                )
            if module.weight.device == torch.device("meta"):
                raise UserError(
                    f"layer {index}: the weights of {name} are not in memory: load the model "
                    "without offloading"
                )
