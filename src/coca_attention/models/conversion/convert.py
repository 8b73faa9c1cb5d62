"""Converting a vanilla decoder to the CoCA model of its family, in place."""

import gc
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, initialization

from coca_attention.errors import UserError
from coca_attention.models.configuration import LOCAL_RULE, ROTATION_FIELDS, has_own_roles
from coca_attention.models.conversion.calibration import (
    attention_inputs,
    calibrate_t_projection,
    check_calibration,
)
from coca_attention.models.decoder import (
    CollinearHead,
    CollinearModel,
    change_class,
    replace_attention,
)
from coca_attention.models.families import FAMILIES, Family, supported_families
from coca_attention.models.fields import GLOBAL, head_width, rope_parameters, training_length
from coca_attention.models.projections import AttentionLayout, is_sharded
from coca_attention.models.roles import Roles, rotation_fields

DECAY = 0.5
"""Exponent of the decay beyond ``max_distance``, with a decay length of L / 8."""
Initialisation = Literal["fold", "calibrated", "random"]
"""How the T projections of a converted model begin."""
INITIALISATIONS: tuple[str, ...] = get_args(Initialisation)


def convert(
    model: PreTrainedModel,
    form: str = "slack",
    *,
    init: Initialisation = "fold",
    calibration: Tensor | None = None,
    free_pairs: int = 0,
    roles: Roles | None = None,
    max_distance: int | None = None,
    length: int | None = None,
    kv_cache: str = "full",
    progress: Callable[[str, int, int], Any] | None = None,
    empty: bool = False,
    group: dist.ProcessGroup | None = None,
) -> PreTrainedModel:
    """Convert a vanilla decoder to the CoCA model of its family, in place.

    Key projections (and key norms) are replaced by T projections, and class and configuration by
    the registered ``coca_*`` ones. All other weights keep their tensors. Unless all of its pairs
    are free, the converted model computes a different function and needs further training.

    Args:
        model: A loaded model of a supported family: language model, model with a head for
            classification or question answering, or decoder. A composite model, such as LLaVA,
            has its decoder converted, and a decoder's composite model learns of it.
        form: Name of the score form: ``slack`` (the paper's Eq. 10), ``strict`` (Eq. 9) or
            ``magnitude``; with roles, that of the local layers. ``rope`` keeps rotary attention:
            without roles it limits distances alone (ReRoPE), and texts of up to W tokens give what
            they did.
        init: Initialisation of the T projections. ``fold``: the pair means of the key projection's
            rows, so that t_j is the ReLU of the mean of key pair j. ``calibrated``: fitted to the
            model's own scores on the calibration texts (`calibration.py`), for models without a
            norm on keys. ``random``: random weights.
        calibration: Token ids (texts, tokens) for ``calibrated``, a few thousand tokens of the
            intended kind of text. T tokens of a text need memory for T² attention weights per head.
        free_pairs: The last pairs of every head, which keep their rotary keys and scores. With all
            of them free the model computes what it did before.
        roles: Which layers become local and which global; by default the family's own. Not for
            families with rotary parameters of their own per layer type.
        max_distance: W; in layers that see the whole text, keys farther back than W tokens are
            scored as if W back, their weight falls with `DECAY`, and queries beyond the training
            length L grow with the logarithm of the tokens they see (docs/conversion.md). Default:
            L for ``rope`` without roles, which changes nothing in texts of up to L tokens, or else
            no limit.
        length: L, for roles and limits; default: `training_length` of the configuration.
        kv_cache: ``full`` or ``half``, see `CoCAConfig`.
        progress: Called with a label, the number of calibration texts read and layers converted so
            far, and their total.
        empty: Whether the model is on the meta device, without weights: classes, configuration and
            shapes are converted, and nothing is calibrated.
        group: Processes that make the same call: each reads some of the calibration texts, and all
            get the same projections. By default the process reads them all.

    Returns:
        The same model.

    Raises:
        UserError: If the model's family is not supported, the model is already converted, or its
            projections are not plain `Linear` modules in memory. The model is then unchanged.
    """
    if init not in INITIALISATIONS:
        raise UserError(f"init must be one of {', '.join(INITIALISATIONS)}; got {init!r}")
    if calibration is not None and init != "calibrated":
        raise UserError(f"calibration requires init calibrated; got init {init}")
    if isinstance(model, CollinearHead | CollinearModel):
        raise UserError(f"{type(model).__name__} is already a CoCA model")
    if torch.is_inference_mode_enabled():
        raise UserError(
            "weights created under torch.inference_mode() cannot be trained: convert outside of it"
        )
    inner = _inner_decoder(model)
    if inner is not None:
        convert(
            inner,
            form,
            init=init,
            calibration=calibration,
            free_pairs=free_pairs,
            roles=roles,
            max_distance=max_distance,
            length=length,
            kv_cache=kv_cache,
            progress=progress,
            empty=empty,
            group=group,
        )
        return model
    family, new_class = _find_family(model)
    body: Any = model.base_model
    owners = _owners(body) if body is model else []
    if isinstance(body, CollinearModel):
        raise UserError(
            f"the decoder of this {type(model).__name__} was converted separately: convert the "
            "language model instead"
        )
    modules = family.layout.modules(body)
    _check_projections(modules, family.layout, empty)
    old: Any = model.config
    # An auto_map would name code of the original.
    foreign = ("model_type", "architectures", "auto_map")
    values = {k: v for k, v in old.to_dict().items() if k not in foreign}
    added: dict[str, Any] = {"coca_form": form, "coca_free_pairs": free_pairs}
    if roles is not None:
        if max_distance is not None:
            raise UserError("roles determine the largest distance: set max_distance there")
        added = _role_fields(old.get_text_config(), roles, form, free_pairs, length)
    elif form == "rope" or max_distance is not None:
        added |= _limit_fields(old.get_text_config(), max_distance, length)
    elif length is not None:
        raise UserError(f"a length is for roles and limits of distances, got {length}")
    if form == "rope" and roles is None:
        if free_pairs:
            raise UserError("all pairs are free with form rope: leave out free_pairs")
        # The form of a model whose pairs are all free does not matter.
        added |= {"coca_form": "strict", "coca_free_pairs": head_width(old.get_text_config()) // 2}
    try:
        config = family.config.from_dict({**values, **added, "kv_cache": kv_cache})
    except Exception as error:
        # Strict configurations wrap the errors of their checks.
        raise UserError(f"not a valid configuration of a CoCA model: {error}") from error
    rope = rope_parameters(old.get_text_config())
    if has_own_roles(config) and rope.get("rope_type", "default") != "default":
        kept = {name: x for name, x in rope.items() if name not in ROTATION_FIELDS}
        config.rope_parameters[LOCAL_RULE] = kept
    config._attn_implementation = old._attn_implementation
    config.name_or_path = old.name_or_path
    inputs: list[Tensor] = []
    done, total = 0, len(body.layers)

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress("converting", done, total)

    if init == "calibrated":
        if is_sharded(model):
            raise UserError(
                "init calibrated runs the model, whose weights DeepSpeed ZeRO-3 has sharded: "
                "convert it before sharding"
            )
        check_calibration(calibration, config.vocab_size, modules)
        assert calibration is not None  # checked
        if group is not None and len(calibration) >= group.size():
            calibration = calibration[group.rank() :: group.size()]
        else:
            group = None
        total += len(calibration)
        if not empty:
            inputs = attention_inputs(model, modules, calibration, advance)

    def prepare(attention: Any, index: int) -> None:
        if init == "random":
            attention.t_proj.init_folded(config.initializer_range)
        if inputs:
            calibrate_t_projection(attention, inputs[index], group)
        advance()

    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = config
    for owner, name in owners:
        setattr(owner, name, config)
    replace_attention(body, family.body, prepare)
    change_class(model, new_class, config)
    # post_init sets up sharding plans and the like for the new class; keep the weights.
    with initialization.no_init_weights():
        body.post_init()
        model.post_init()
    return model


def _inner_decoder(model: Any) -> Any:
    """The decoder of a composite model, such as LLaVA, if its family is supported."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    apart = decoder is not None and getattr(decoder, "config", None) is not model.config
    return decoder if apart and any(type(decoder) is f.vanilla_body for f in FAMILIES) else None


def _owners(body: Any) -> list[tuple[Any, str]]:
    """Configurations of composite models that hold this decoder's, and their fields' names.

    A module does not know what it is part of, so they are looked for among all objects.

    Raises:
        UserError: If one reads its field as a configuration of the vanilla family.
    """
    found = [
        (owner, name)
        for owner in gc.get_objects()
        if issubclass(type(owner), PreTrainedConfig)
        for name, value in vars(owner).items()
        if value is body.config
    ]
    for owner, name in found:
        if owner.sub_configs.get(name) is not AutoConfig:
            raise UserError(
                f"this {type(body).__name__} is part of a model of type {owner.model_type}, which "
                f"always loads its {name} as {body.config.model_type}, so the converted model "
                "could not be loaded again: convert the language model by itself"
            )
    return found


def _find_family(model: Any) -> tuple[Family, type]:
    """The family of a vanilla model, and its new class."""
    for family in FAMILIES:
        for _, vanilla, made in family.classes:
            if type(model) is vanilla:
                return family, made
    raise UserError(
        f"{type(model).__name__} cannot be converted: supported are the models of "
        f"{supported_families(model)}"
    )


def _role_fields(
    config: Any, roles: Roles, form: str, free_pairs: int, length: int | None
) -> dict[str, Any]:
    length, rope = _checked_length(config, length), rope_parameters(config)
    if free_pairs:
        raise UserError("roles determine the free pairs: leave out free_pairs")
    if length is None or rope is not (config.rope_parameters or {}):
        raise UserError(
            f"roles need a training length and one set of rotary parameters; {config.model_type} "
            "has rotary parameters per layer type or no max_position_embeddings"
        )
    # Qwen drops its window unless told to use it.
    kept = {"use_sliding_window": True} if hasattr(config, "use_sliding_window") else {}
    return kept | roles.fields(
        form,
        num_layers=config.num_hidden_layers,
        head_width=head_width(config),
        length=length,
        rope_parameters=rope,
    )


def _checked_length(config: Any, length: int | None) -> int | None:
    """The training length: that given, or the configuration's."""
    if length is not None and length < 1:
        raise UserError(f"the training length must be at least 1 token, got {length}")
    return length or training_length(config)


def _limit_fields(config: Any, max_distance: int | None, length: int | None) -> dict[str, Any]:
    length, rope = _checked_length(config, length), config.rope_parameters or {}
    if length is None:
        raise UserError(
            f"a limit of distances needs a training length; {config.model_type} has no "
            "max_position_embeddings"
        )
    if max_distance is not None and max_distance > length:
        raise UserError(
            f"max_distance must be at most the training length of {length} tokens, got "
            f"{max_distance}"
        )
    added = rotation_fields(
        length,
        temperature=True,
        decay=DECAY,
        max_distance=length if max_distance is None else max_distance,
    )
    if rope_parameters(config) is rope:
        return {"rope_parameters": rope | added}
    return {"rope_parameters": rope | {GLOBAL: rope[GLOBAL] | added}}


def _check_projections(modules: list[Any], layout: AttentionLayout, empty: bool) -> None:
    if len(set(map(id, modules))) < len(modules):
        raise UserError("layers share an attention module, which is not supported")
    for index, attention in enumerate(modules):
        for name, module in attention.named_children():
            if not (name.endswith("proj") or name in (layout.fused_name, layout.output_name)):
                continue
            if type(module) is not nn.Linear:
                raise UserError(
                    f"layer {index}: expected {name} to be a torch.nn.Linear, got "
                    f"{type(module).__module__}.{type(module).__name__}: merge adapters, and load "
                    "the model without quantisation"
                )
            if module.weight.is_meta and not empty:
                raise UserError(
                    f"layer {index}: the weights of {name} are not in memory: load the model "
                    "without offloading"
                )
