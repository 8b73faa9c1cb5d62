"""Converting vanilla models and the authors' checkpoints to the CoCA models of their families."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    initialization,
)

from coca_attention.errors import UserError, check_is_loaded
from coca_attention.models.configuration import (
    GLOBAL,
    LOCAL,
    LOCAL_RULE,
    ROTATION_FIELDS,
    check_is_computed,
    has_own_roles,
    head_width,
    made_for,
    role_fields,
    rope_parameters,
    rotation,
    unsupported,
    with_global,
    without_positions,
)
from coca_attention.models.decoder import (
    CollinearHead,
    CollinearModel,
    change_class,
    replace_attention,
)
from coca_attention.models.families import FAMILIES, Family, supported_families
from coca_attention.models.fused import FUSED
from coca_attention.models.projections import AttentionLayout
from coca_attention.ops import DistanceMap
from coca_attention.roles import Conversion


def convert(model: PreTrainedModel, form: str | Conversion, **settings: Any) -> PreTrainedModel:
    """Convert a vanilla decoder to the CoCA model of its family, in place.

    Key projections (and key norms) are replaced by T projections, the pair means of their rows, and
    class and configuration by the registered ``coca_*`` ones. All other weights keep their tensors.
    Unless all of its pairs are free, the converted model computes a different function and needs
    further training.

    Args:
        model: A loaded model of a supported family: language model, model with a head for
            classification or question answering, or decoder. Of a model on the meta device,
            classes, configuration and shapes are converted.
        form: Name of the score form, or a `Conversion`.
        **settings: Fields of `Conversion`, such as ``near=4096``.

    Returns:
        The same model.

    Raises:
        UserError: If the model's family is not supported, the model is already
            converted or quantised, or its projections are not plain `Linear` modules in memory. The
            model is then unchanged.
        TypeError: If a setting is unknown.
    """
    check_is_loaded(model)
    wanted = replace(form if isinstance(form, Conversion) else Conversion(form), **settings)
    forget_gguf(model)
    family, new_class = _find_family(model)
    check_is_computed(model.config)
    body: Any = model.base_model
    _check_projections(family.layout.modules(body), family.layout)
    name_separate_head(model)
    old = model.config
    config = _new_configuration(family, old, wanted)
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = config
    replace_attention(body, family.body)
    change_class(model, new_class, config)
    # post_init sets up sharding plans and the like for the new class; keep the weights.
    with initialization.no_init_weights():
        body.post_init()
        model.post_init()
    return model


def forget_gguf(model: PreTrainedModel) -> None:
    """Of a model whose weights were unpacked from a GGUF file, forget that they were in one.

    Transformers refuses to save such a model, though its weights are ordinary ones.
    """
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is None or quantizer.quantization_config.quant_method != "gguf":
        return
    if all(weight.is_floating_point() for weight in model.parameters()):  # not packed blocks
        quantizer.remove_quantization_config(model)


def name_separate_head(model: PreTrainedModel) -> None:
    """Of a model whose output head is not its embeddings, let the configuration say so.

    Transformers loads a separate head also where the configuration says that the two are tied, with
    a warning. What builds on that configuration would tie them again, and the head would be lost.
    """
    head: Any = model.get_output_embeddings()
    embeddings: Any = model.get_input_embeddings()
    if head is None or embeddings is None:
        return
    weight: Any = getattr(head, "weight", None)
    if weight is None or weight.is_meta or embeddings.weight.is_meta:
        return  # packed, or not in memory
    if weight.data_ptr() != embeddings.weight.data_ptr():
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def _find_family(model: PreTrainedModel) -> tuple[Family, type]:
    """The family of a vanilla model, and its new class."""
    name = type(model).__name__
    if isinstance(model, CollinearHead | CollinearModel):
        raise UserError(
            f"{name} has its attention from this package already, by convert or extend_context: "
            "start from the model that it was made from"
        )
    if isinstance(getattr(model, "base_model", None), CollinearModel):
        raise UserError(
            f"the decoder of this {name} was converted separately: convert the language model "
            "instead"
        )
    if torch.is_inference_mode_enabled():
        raise UserError(
            "weights created under torch.inference_mode() cannot be trained: convert outside of it"
        )
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    obstacles = {
        "is quantised: convert it in full precision, and quantise what that writes. Methods yarn, "
        "dynamic and ntk of extend_context take it as it is": getattr(
            model.config, "quantization_config", None
        ),
        unsupported(text): unsupported(text),
        "has no rotary positions": not any(
            getattr(text, field, None) for field in ("rope_parameters", "rotary_dim")
        ),
        "has layers without positions: method temperature of extend_context is for them": any(
            without_positions(text)
        ),
        "has layers of other types than attention": set(kinds) - {LOCAL, GLOBAL},
        "has sinks, learned scores for attending to nothing": any(
            each.endswith(".sinks") for each, _ in model.named_parameters()
        ),
    }
    for obstacle, present in obstacles.items():
        if present:
            raise UserError(f"{name} cannot be converted: it {obstacle}")
    for family in FAMILIES:
        for _, vanilla, made in family.classes:
            if type(model) is vanilla:
                return family, made
    parts = text is not model.config
    hint = "; convert(model.get_decoder()) converts its language model" if parts else ""
    raise UserError(
        f"{name} cannot be converted: supported are the models of {supported_families(model)}{hint}"
    )


def _check_projections(modules: Sequence[nn.Module], layout: AttentionLayout) -> None:
    if len(set(map(id, modules))) < len(modules):
        raise UserError("layers share an attention module, which is not supported")
    for index, attention in enumerate(modules):
        for name, module in attention.named_children():
            if not (name.endswith("proj") or name in (layout.fused_name, layout.output_name)):
                continue
            # Some libraries leave the module and pack its weight.
            kind = type(module.weight) if type(module) is nn.Linear else type(module)
            if type(module) is not nn.Linear or kind.__module__.partition(".")[0] != "torch":
                raise UserError(
                    f"layer {index}: expected {name} to be a torch.nn.Linear, got "
                    f"{kind.__module__}.{kind.__name__}: merge adapters, and load the model "
                    "without quantisation"
                )
            offloaded = module.weight.is_meta and hasattr(module, "_hf_hook")
            if offloaded or hasattr(module.weight, "ds_id"):
                raise UserError(
                    f"layer {index}: the weights of {name} are not in memory: load the model "
                    "without offloading or DeepSpeed ZeRO-3"
                )


def _new_configuration(family: Family, old: PreTrainedConfig, wanted: Conversion) -> Any:
    """The configuration of the converted model."""
    # An auto_map would name code of the original.
    foreign = ("model_type", "architectures", "auto_map")
    values = {k: v for k, v in old.to_dict().items() if k not in foreign}
    rope = rope_parameters(old)
    added: dict[str, Any] = {
        "coca_form": wanted.form,
        "coca_free_pairs": wanted.free_pairs,
        "kv_cache": wanted.kv_cache,
    }
    if wanted.roles is not None or wanted.limits_distances:
        length = wanted.length or made_for(old)[0]
        if length is None:
            raise UserError(
                f"roles and limits of distances need a training length; {old.model_type} has no "
                "max_position_embeddings"
            )
        if wanted.roles is not None:
            added |= role_fields(wanted.roles, wanted.form, old, length)
        else:
            near = length if wanted.near is None else wanted.near
            if near > length:
                raise UserError(
                    f"`near` must be at most the training length of {length} tokens, got {near}"
                )
            limits = {"temperature": length, "distance_map": asdict(DistanceMap.limited(near))}
            added["rope_parameters"] = with_global(old, rope | limits)
    try:
        config = family.config.from_dict({**values, **added})
        if has_own_roles(config) and rope.get("rope_type", "default") != "default":
            kept = {name: x for name, x in rope.items() if name not in ROTATION_FIELDS}
            config.rope_parameters[LOCAL_RULE] = kept
            rotation(config, LOCAL)  # checks it
    except Exception as error:
        # Strict configurations wrap the errors of their checks.
        raise UserError(f"not a valid configuration of a CoCA model: {error}") from error
    theirs = old._attn_implementation
    config._attn_implementation = "sdpa" if theirs == FUSED else theirs
    config._experts_implementation = old._experts_implementation
    return config


MODELS: dict[str, Any] = {
    "llama": LlamaForCausalLM,
    "gpt_neox": GPTNeoXForCausalLM,
}
"""Model types of the authors' checkpoints."""
RENAMED = {r"self_attn\.t_proj": "self_attn.k_proj", r"^embed_out\.": "lm_head."}
"""By the authors' names, those of a vanilla model's tensors: T is as wide as the keys, and in
GPT-NeoX in their place in ``query_key_value``."""
VANILLA = "Vanilla models are converted by coca convert --form, or convert(model)"
BUFFERS = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias")
"""Buffers that old versions of Transformers saved with the weights."""


def load_original(source: str | Path, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a checkpoint in the format of the paper's authors, and fold its T projections.

    Args:
        source: A folder with config.json and weights (safetensors, or .bin files, of which nothing
            but tensors is read). A Llama may have been saved again by Transformers 5; of a
            GPT-NeoX nothing would tell such a folder from that of a vanilla model.
        dtype: dtype of the weights; default: that of the checkpoint.

    Returns:
        A ``coca_llama`` or ``coca_gpt_neox`` model of the slack form, in evaluation mode.

    Raises:
        UserError: If the folder or a file cannot be read, the model type is not one of the
            authors', the model has partial rotary embedding, or weights are missing, unknown or of
            the wrong shape.
    """
    config = _original_configuration(Path(source))
    try:
        model, info = MODELS[config.model_type].from_pretrained(
            str(source),
            config=config,
            dtype=dtype or "auto",
            key_mapping=RENAMED,
            ignore_mismatched_sizes=True,  # reported below
            output_loading_info=True,
            local_files_only=True,
        )
    except Exception as error:  # anything that a damaged file raises
        raise UserError(
            f"{source}: no weights could be loaded, or a file is damaged or contains more than "
            f"tensors: {error}"
        ) from error
    keys = sorted(name for name in _tensor_names(Path(source)) if "self_attn.k_proj." in name)
    if keys:  # of a vanilla Llama, which have been taken for T of the same shape
        raise UserError(
            f"{source}: {keys[0]} is not known: the authors' models have a t_proj in its place. "
            f"{VANILLA}"
        )
    unknown = [name for name in sorted(info["unexpected_keys"]) if not name.endswith(BUFFERS)]
    problems = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    problems += [f"{name} is not known" for name in unknown]
    for name, found, expected in sorted(info["mismatched_keys"]):
        problems.append(f"{name} has shape {tuple(found)}, expected {tuple(expected)}")
    if problems:
        named = "; ".join(problems[:3]).replace("self_attn.k_proj", "self_attn.t_proj")
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(f"{source}: the weights do not fit the configuration: {named}{more}")
    return convert(model, "slack").eval()


def _tensor_names(folder: Path) -> set[str]:
    """The names of all tensors of a folder whose files have been read, and are sound."""
    found = set[str]()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as content:
            found.update(content.keys())
    if not found:
        for file in folder.glob("pytorch_model*.bin"):
            found.update(torch.load(file, map_location="meta", weights_only=True))
    return found


def _original_configuration(folder: Path) -> PreTrainedConfig:
    """The configuration of the vanilla model that a checkpoint of the authors fits."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: config.json cannot be read: {error}") from error
    kind = settings.get("model_type") if isinstance(settings, Mapping) else None
    if kind not in MODELS:
        raise UserError(
            f"{folder}: expected model_type {' or '.join(MODELS)}, as in the authors' checkpoints; "
            f"got {kind!r}"
        )
    if kind == "gpt_neox" and "rope_parameters" in settings:
        # T and keys have one name and shape here, so weights do not tell which they are; those of
        # Llama do, whatever wrote its configuration.
        raise UserError(
            f"{folder}: config.json has rope_parameters, which Transformers 5 writes for vanilla "
            "models, and the authors' code does not. If it is theirs, saved again, take their own "
            f"config.json. {VANILLA}"
        )
    values = {k: v for k, v in settings.items() if k not in ("model_type", "auto_map")}
    try:
        config = MODELS[kind].config_class(**values)
        rotated = rotation(config).width
        head = head_width(config)
    except Exception as error:
        raise UserError(f"{folder}: the configuration cannot be used: {error!r}") from error
    if rotated != head:
        raise UserError(
            f"{folder}: the rotary width is {rotated}, less than the head width {head}. The "
            "original code folds the whole head, so its pairs would not be collinear; only "
            "rotary_pct = 1 is supported"
        )
    return config
