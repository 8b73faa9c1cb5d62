"""Layers with roles as Transformers' GraniteSWA, which engines run without this package.

A model with a window in local layers and no positions in global ones, without temperature and
decay, computes the same as GraniteSWA. vLLM and SGLang read its folder, llama.cpp a GGUF file.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GraniteSWAConfig, GraniteSWAForCausalLM, PreTrainedModel

from coca_attention.errors import UserError
from coca_attention.models import CoCALlamaForCausalLM, use_fused_attention
from coca_attention.models.configuration import (
    GLOBAL,
    LOCAL,
    attention_of,
    head_width,
    layer_types,
    rope_parameters,
)
from coca_lab.evaluation.windows import TokenDocument, score_documents, shared_first_target
from coca_lab.export.gguf_file import check_tokenizer, write_gguf
from coca_lab.folders import new_folder, write_card, writing_model
from coca_lab.intervals import perplexity
from coca_lab.loading import load_model

NO_SINK = -1e4
"""Score of a sink that nothing attends to; finite in float16. GraniteSWA's initial 0 is not."""


@dataclass(frozen=True)
class Cost:
    """What a factor for a longer context costs within the training length."""

    length: int  # L, the training length in tokens
    before: float  # perplexity of windows of L tokens without the factor
    after: float
    tokens: int  # number of targets


def as_native(model: PreTrainedModel) -> GraniteSWAForCausalLM:
    """The GraniteSWA that computes the same; UserError names what GraniteSWA cannot compute."""
    if isinstance(model, GraniteSWAForCausalLM):
        return model
    config: Any = model.config
    _check_supported(model)
    base = rope_parameters(config)["rope_theta"]
    kinds = layer_types(config)
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps",
        "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "initializer_range",
        "sliding_window", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    # `head_dim` is read by the model, but no declared field of the configuration.
    same: dict[str, Any] = {name: getattr(config, name) for name in names}
    same["head_dim"] = head_width(config)
    native: Any = GraniteSWAForCausalLM(
        GraniteSWAConfig(
            **same,
            attention_multiplier=head_width(config) ** -0.5,
            layer_types=kinds,
            layer_rope_theta=[base if kind == LOCAL else 0 for kind in kinds],
            rope_parameters={"rope_type": "default", "rope_theta": base},
        )
    )
    weights = {name.replace(".t_proj.", ".k_proj."): w for name, w in model.state_dict().items()}
    for index in range(len(kinds)):
        sinks = torch.full((config.num_attention_heads,), NO_SINK)
        weights[f"model.layers.{index}.self_attn.sinks"] = sinks
    native.load_state_dict(weights)
    use_fused_attention(native)
    return native.to(model.dtype).eval()


def _check_supported(model: PreTrainedModel) -> None:
    config: Any = model.config
    if not isinstance(model, CoCALlamaForCausalLM) or set(layer_types(config)) != {LOCAL, GLOBAL}:
        raise UserError(
            f"only a GraniteSWA, or a Llama with local and global layers (model.layers: llg), can "
            f"be exported; this is a {type(model).__name__} with layers of type "
            f"{', '.join(sorted(set(layer_types(config))))}"
        )
    rope = rope_parameters(config)
    reasons = {
        f"{attention_of(config)} attention in local layers (model.attention: rope)": (
            attention_of(config) != "rope"
        ),
        "a temperature (model.temperature: false, and --context afterwards)": (
            rope.get("temperature") is not None
        ),
        "a decay (model.decay: 0)": bool(rope.get("decay")),
        "max_distance": rope.get("max_distance") is not None,
        "positions in global layers (model.turning_pairs: 0)": rope.get("turning_pairs") != 0,
        f"{rope['rope_type']} scaling": rope["rope_type"] != "default",
    }
    for what, present in reasons.items():
        if present:
            raise UserError(f"GraniteSWA, and so other engines, cannot compute {what}")


@torch.no_grad()
def fold_context(model: GraniteSWAForCausalLM, context: int) -> float:
    """Multiply the scores of global layers by ln(N + 1) / ln(L + 1), the factor, in the weights."""
    # L is the model's `max_position_embeddings`, which becomes the context N.
    config: Any = model.config
    length: int = config.max_position_embeddings
    if context < length:
        raise UserError(f"--context must be at least the training length, {length}; got {context}")
    factor = math.log(context + 1) / math.log(length + 1)
    layers: Any = model.model.layers
    for layer, kind in zip(layers, config.layer_types, strict=True):
        if kind == GLOBAL:
            for weight in layer.self_attn.q_proj.parameters():
                weight.mul_(factor)
    config.max_position_embeddings = context
    return factor


def export_native(
    source: str | Path,
    target: str | Path,
    *,
    context: int | None = None,
    gguf: bool = False,
    dtype: str = "auto",
    documents: Sequence[TokenDocument] = (),
) -> tuple[GraniteSWAForCausalLM, Cost | None]:
    """Write a model with layers with roles as a folder of a GraniteSWA; what its context costs."""
    target = new_folder(source, target)
    if gguf:
        check_tokenizer(source)
    model, cost = as_native(load_model(source, dtype=dtype, device="cpu")), None
    config: Any = model.config
    length: int = config.max_position_embeddings
    if context is not None:
        before = _scores(model, documents, length)
        fold_context(model, context)
        if documents:
            after = _scores(model, documents, length)
            tokens = sum(score.tokens for score in after)
            cost = Cost(length, perplexity(before), perplexity(after), tokens)
    # Read by llama.cpp's converter, which does not know `layer_rope_theta`.
    config.no_rope_layers = [int(bool(theta)) for theta in config.layer_rope_theta]
    with writing_model(model, source, target) as folder:
        sections = _card_sections(target.name, length, context, gguf)
        write_card(folder, config, name=target.name, source=source, sections=sections)
        if gguf:
            write_gguf(model, source, folder / f"{target.name}.gguf")
    return model, cost


def _scores(model: Any, documents: Sequence[TokenDocument], length: int) -> list[Any]:
    stride = max(1, length // 2)
    first = shared_first_target([length], stride)
    return score_documents(model, documents, window=length, stride=stride, first_target=first)


def _card_sections(name: str, length: int, context: int | None, gguf: bool) -> dict[str, str]:
    """What the model card says besides the facts of every card, in Markdown by heading."""
    text = (
        f"Trained on texts of {length:,} tokens. Local layers see a short window, global ones the "
        "whole text without positions."
    )
    if context is not None and context != length:
        text += (
            f" Queries of global layers are scaled for texts of {context:,} tokens, which the "
            "configuration has in place of its training length."
        )
    sections = {"Length": text}
    if gguf:
        command = f"llama-completion -m {name}.gguf -c {context or length} -fa off -p 'Once'"
        sections["llama.cpp"] = f"```sh\n{command}\n```"
    return sections
