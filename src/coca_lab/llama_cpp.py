"""Files for llama.cpp, of the architecture ``coca-llama`` that docs/llama-cpp.md describes.

Legend: D head width, P = D/2 rotary pairs, F free pairs.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from coca_attention.errors import UserError, install
from coca_attention.models.configuration import LOCAL_RULE, rotation
from coca_attention.models.fields import LOCAL, free_pairs, head_width, layer_types, rope_parameters
from coca_attention.ops.positions import Rotation
from coca_attention.ops.positions.rules import unscaled_frequencies
from coca_lab.files import writing
from coca_lab.loading import load_model

ARCHITECTURE = "coca-llama"
FORMS = ("slack", "strict", "magnitude")
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.t_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
STILL = 1e30
"""A divisor of frequencies after which a pair does not turn at any position."""
PRE_TOKENIZERS = {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}
"""llama.cpp's names for the splits of byte-level tokenizers, with GPT-2's regular expression."""
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # token types


def export_gguf(source: str | Path, target: str | Path, *, dtype: str = "auto") -> bool:
    """Write a CoCA model of the Llama family to a GGUF file.

    Vectors are written in float32, matrices in the dtype.

    Args:
        source: Folder of the model (or its name).
        target: File to write; must not exist.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto`` for that of the files.

    Returns:
        Whether the file has the model's tokenizer; only byte-level BPE tokenizers are supported.

    Raises:
        UserError: If the package gguf is missing, the source cannot be loaded or is not supported,
            or the target exists or cannot be written.
    """
    try:
        gguf: Any = importlib.import_module("gguf")
    except ImportError as error:
        raise UserError(f"this needs the package gguf: {install('gguf')}") from error
    target = Path(target)
    if target.exists():
        raise UserError(f"{target} exists: name a new file")
    model: Any = load_model(source, dtype=dtype, device="cpu")
    check_supported(model.config)
    try:
        with writing(target) as partial:
            writer = gguf.GGUFWriter(partial, ARCHITECTURE)
            writer.add_name(target.stem)
            _add_settings(writer, model.config)
            has_tokenizer = _add_tokenizer(writer, source, model.config)
            _add_tensors(gguf, writer, model)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}") from error
    return has_tokenizer


def check_supported(config: Any) -> None:
    """Raise UserError unless the architecture ``coca-llama`` can compute a model.

    Args:
        config: The model's configuration.
    """
    if config.model_type != "coca_llama":
        raise UserError(
            f"GGUF files are written for CoCA models of the Llama family (coca_llama); this is a "
            f"{config.model_type}"
        )
    found = rotation(config)
    reasons = {
        f"the score form {config.coca_form}, which is none of {', '.join(FORMS)}": (
            config.coca_form not in FORMS
        ),
        f"the activation {config.hidden_act} in place of silu": config.hidden_act != "silu",
        "a scaling rule in local layers": LOCAL_RULE in rope_parameters(config),
        "partial rotary": found.width != head_width(config),
        f"{found.rule.kind} scaling, which follows the text's length (use ntk, or set a length)": (
            found.follows_length
        ),
        "max_distance, which needs two scores for a query and a key": (
            found.max_distance is not None
        ),
        "a decay, a bias on scores that llama.cpp cannot add (make the model with decay 0)": (
            found.decay is not None
        ),
    }
    for what, present in reasons.items():
        if present:
            raise UserError(f"llama.cpp's graph for {ARCHITECTURE} does not support {what}")


def frequency_divisors(found: Rotation) -> Tensor:
    """What llama.cpp divides its frequencies, ``base ** (-2 j / D)``, by: (P,), float32."""
    theta = found.frequencies()
    return (unscaled_frequencies(found.width, found.base) / theta).clamp(max=STILL).float()


def _add_settings(writer: Any, config: Any) -> None:
    found, kinds = rotation(config), layer_types(config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_width(config))
    writer.add_value_length(head_width(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(found.width)
    writer.add_rope_freq_base(found.base)
    writer.add_string(f"{ARCHITECTURE}.form", config.coca_form)
    writer.add_array(f"{ARCHITECTURE}.free_pairs", [free_pairs(config, kind) for kind in kinds])
    if found.temperature is not None:
        writer.add_attn_temperature_length(found.temperature)
    if LOCAL in kinds:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == LOCAL for kind in kinds])


def _add_tensors(gguf: Any, writer: Any, model: Any) -> None:
    config, kinds = model.config, layer_types(model.config)
    types = gguf.GGMLQuantizationType
    kind_of = {torch.float32: types.F32, torch.float16: types.F16, torch.bfloat16: types.BF16}
    divisors = frequency_divisors(rotation(config))
    if (divisors != 1).any():
        writer.add_tensor("rope_freqs.weight", divisors.numpy())
    for name, tensor in model.state_dict().items():
        if name.startswith("lm_head.") and config.tie_word_embeddings:
            continue
        stem, _, part = name.rpartition(".")
        wide, prefix = tensor.float(), ""
        if stem.startswith("model.layers."):
            index, _, stem = stem.removeprefix("model.layers.").partition(".")
            prefix = f"blk.{index}."
            if stem == "self_attn.t_proj":
                # The factor on cos and sin, once for queries and once for keys.
                wide = wide * rotation(config, kinds[int(index)]).rule.magnitude ** 2
        kind = kind_of[tensor.dtype] if wide.dim() == 2 else types.F32
        data = gguf.quants.quantize(wide.numpy(), kind)
        writer.add_tensor(f"{prefix}{NAMES[stem]}.{part}", data, raw_dtype=kind)


def _add_tokenizer(writer: Any, source: str | Path, config: Any) -> bool:
    """Add a byte-level BPE tokenizer; returns whether the model has one."""
    tokenizer: Any = None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
        state = json.loads(tokenizer.backend_tokenizer.to_str())
    except (OSError, ValueError, KeyError, AttributeError):
        state = {}
    pre_tokenizer = _pre_tokenizer(state)
    if pre_tokenizer is None:
        writer.add_tokenizer_model("none")
        return False
    known = {i: (name, NORMAL) for name, i in state["model"]["vocab"].items()}
    for added in state["added_tokens"]:
        kind = CONTROL if added["special"] else USER_DEFINED
        known[added["id"]] = added["content"], kind
    tokens = [known.get(i, (f"[PAD{i}]", UNUSED)) for i in range(config.vocab_size)]
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list([name for name, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_token_merges(merges)
    for role in ("bos", "eos", "pad"):
        index = getattr(tokenizer, f"{role}_token_id")
        if index is not None:
            getattr(writer, f"add_{role}_token_id")(index)
    begins = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    writer.add_add_bos_token(begins)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
    return True


def _pre_tokenizer(state: dict[str, Any]) -> str | None:
    """llama.cpp's name for how a tokenizer splits text, None if it has none or is of another kind.

    Args:
        state: The tokenizer's JSON.
    """
    model = state.get("model", {})
    if model.get("type") != "BPE" or model.get("byte_fallback") or state["normalizer"] is not None:
        return None
    split = state["pre_tokenizer"] or {}
    steps = split.get("pretokenizers", [split])
    plain = all(
        step.get("use_regex", True)
        and not step.get("add_prefix_space")
        and step.get("individual_digits", True)
        for step in steps
    )
    return PRE_TOKENIZERS.get(tuple(step.get("type") for step in steps)) if plain else None
