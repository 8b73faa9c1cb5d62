"""A GraniteSWA or a Cohere2 as a GGUF file with its tokenizer, for llama.cpp.

Fields and tensors are those of llama.cpp's own converter. The package gguf 0.19 does not know
GraniteSWA, so the names of its own fields are written here.
"""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from coca_attention.errors import UserError
from coca_attention.models.configuration import LOCAL
from coca_lab.data import load_tokenizer
from coca_lab.export.llama_cpp import package

PRE_TOKENIZERS = {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}
"""llama.cpp's names for the splits of byte-level tokenizers, with GPT-2's regular expression."""
ENDS = ("eos", "eot", "eom")
"""The fields for tokens at which llama.cpp stops, by role."""
SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
"""Fields for how llama.cpp draws tokens unless it is told otherwise, by Transformers' names."""
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # token types


def write_gguf(model: PreTrainedModel, source: str | Path, path: Path) -> None:
    """Write a model and its tokenizer: matrices in the model's dtype, vectors in float32."""
    gguf = package("gguf")
    config: PreTrainedConfig = model.config
    writer = gguf.GGUFWriter(path, config.model_type)  # llama.cpp has Transformers' names
    writer.add_name(path.stem)
    _add_settings(writer, config)
    _add_tokenizer(writer, source, config.vocab_size, model.generation_config)
    _add_sampling(writer, model.generation_config)
    _add_tensors(gguf, writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_settings(config: PreTrainedConfig) -> None:
    """Raise UserError if llama.cpp computes, or loads, something else than a model has."""
    reasons = {
        f"hidden_act {config.hidden_act!r} (only silu)": config.hidden_act != "silu",
        "no layer with a window": LOCAL not in config.layer_types,
    }
    if config.model_type == "cohere2":
        kind = config.rope_parameters["rope_type"]
        reasons |= {
            "an untied output head": not config.tie_word_embeddings,
            "attention_bias": config.attention_bias,
            f"{kind} scaling": kind != "default",
        }
    else:
        bases = {theta for theta in config.layer_rope_theta if theta}
        reasons |= {
            "several rotary bases in layer_rope_theta": len(bases) > 1,
            "no rotary layer": not bases,
        }
    for what, present in reasons.items():
        if present:
            raise UserError(
                f"llama.cpp cannot run a {config.model_type} model with {what}: export without "
                "--gguf"
            )


def check_tokenizer(source: str | Path) -> None:
    """Raise UserError unless llama.cpp and the package gguf are there, and it has the tokenizer."""
    for name in ("gguf", "xllamacpp"):  # writes the file, and reads it again
        package(name)
    _pre_tokenizer(load_tokenizer(source))


def end_tokens(generation: GenerationConfig, source: str | Path) -> list[int]:
    """The tokens that end a text: the tokenizer's own, if it does, and then the others.

    Raises:
        UserError: If there are more than a GGUF file has fields for.
    """
    own: Any = load_tokenizer(source).eos_token_id
    said: Any = generation.eos_token_id
    every = [own] if said is None else said if isinstance(said, list) else [said]
    found = sorted({each for each in every if each is not None}, key=lambda each: each != own)
    if len(found) > len(ENDS):
        raise UserError(
            f"{source}: texts end at {len(found)} tokens, and a GGUF file has fields for "
            f"{len(ENDS)}: leave as many in eos_token_id of generation_config.json, or export "
            "without --gguf"
        )
    return found


def _add_settings(writer: Any, config: PreTrainedConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == LOCAL for kind in config.layer_types])
    if config.model_type == "cohere2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_logit_scale(config.logit_scale)
        return
    (base,) = {theta for theta in config.layer_rope_theta if theta}
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(base)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_attention_scale(config.attention_multiplier)
    rotary = [bool(theta) for theta in config.layer_rope_theta]
    writer.add_array(f"{config.model_type}.attention.rope_pattern", rotary)
    # Layers that take in an image: none.
    writer.add_array(f"{config.model_type}.deepstack_mapping", [-1] * config.num_hidden_layers)


def _add_tensors(gguf: ModuleType, writer: Any, model: PreTrainedModel) -> None:
    config: PreTrainedConfig = model.config
    types = gguf.GGMLQuantizationType
    kind_of = {torch.float32: types.F32, torch.float16: types.F16, torch.bfloat16: types.BF16}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    # Layers whose pairs are (j, j + D / 2); those of Cohere2 are neighbours already.
    halves = getattr(config, "layer_rope_theta", [0] * config.num_hidden_layers)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name.startswith("lm_head.") and config.tie_word_embeddings:
            continue
        wide, parts = tensor.float(), name.split(".")
        count = heads.get(parts[-2])
        if count is not None and halves[int(parts[2])]:
            wide = _interleaved(wide, count)
        # The tensors of a Llama, and sinks.
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if parts[-1] == "sinks":
            known = f"blk.{parts[2]}.attn_sinks.weight"
        kind = kind_of[tensor.dtype] if wide.dim() == 2 else types.F32
        data = gguf.quants.quantize(wide.contiguous().numpy(), kind)
        writer.add_tensor(known, data, raw_dtype=kind)


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows (j, j + D / 2) of every head, which turn together, as rows (2j, 2j + 1)."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def _add_sampling(writer: Any, generation: GenerationConfig) -> None:
    """Add how the model is to be sampled, where its settings say so."""
    if generation.do_sample:
        for name, field in SAMPLING.items():
            value = getattr(generation, name)
            if value is not None:
                getattr(writer, f"add_sampling_{field}")(value)
    if generation.repetition_penalty not in (None, 1.0):
        writer.add_sampling_penalty_repeat(generation.repetition_penalty)
        writer.add_sampling_penalty_last_n(-1)  # of all tokens, as in Transformers


def _add_tokenizer(
    writer: Any, source: str | Path, entries: int, generation: GenerationConfig
) -> None:
    """Add the tokenizer, with unused tokens up to the number of the model's embeddings."""
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(source)
    pre_tokenizer, state = _pre_tokenizer(tokenizer), _state(tokenizer)
    known = {i: (name, NORMAL) for name, i in state["model"]["vocab"].items()}
    for added in state["added_tokens"]:
        kind = CONTROL if added["special"] else USER_DEFINED
        known[added["id"]] = added["content"], kind
    tokens = [known.get(i, (f"[PAD{i}]", UNUSED)) for i in range(entries)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list([name for name, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["model"]["merges"]]
    writer.add_token_merges(merges)
    special = dict(zip(ENDS, end_tokens(generation, source), strict=False))
    special |= {"bos": tokenizer.bos_token_id, "pad": tokenizer.pad_token_id}
    for role, index in special.items():
        if index is not None:
            getattr(writer, f"add_{role}_token_id")(index)
    begins = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    writer.add_add_bos_token(begins)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _state(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {} if backend is None else json.loads(backend.to_str())


def _pre_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """llama.cpp's name for how a tokenizer splits text; UserError if it is of another kind."""
    state = _state(tokenizer)
    model = state.get("model", {})
    split = state.get("pre_tokenizer") or {}
    steps = split.get("pretokenizers", [split])
    plain = all(
        step.get("use_regex", True)
        and not step.get("add_prefix_space")
        and step.get("individual_digits", True)
        for step in steps
    )
    name = PRE_TOKENIZERS.get(tuple(step.get("type") for step in steps))
    plain = plain and model.get("type") == "BPE" and not model.get("byte_fallback")
    if plain and not model.get("merges"):
        raise UserError("llama.cpp cannot load a vocabulary without merges: export without --gguf")
    if name is None or not plain or state.get("normalizer") is not None:
        raise UserError(
            "--gguf takes byte-level BPE tokenizers with GPT-2's splits, such as coca train makes: "
            "export without --gguf, and convert the folder with llama.cpp's convert_hf_to_gguf.py"
        )
    return name
