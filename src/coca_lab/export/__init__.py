"""Layers with roles as Transformers' GraniteSWA or Cohere2, which engines run without this package.

A Llama with a window in local layers and no positions in global ones, without temperature and
decay, computes the same as GraniteSWA. A GraniteSWA or Cohere2 (``model.body``) stays what it is.
vLLM and SGLang read the folder, llama.cpp a GGUF file.
What was written is read again, and its logits are compared with those of the source.
"""

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cohere2ForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from coca_attention.errors import UserError
from coca_attention.models import CoCALlamaForCausalLM, use_fused_attention
from coca_attention.models.configuration import (
    GLOBAL,
    LOCAL,
    attention_of,
    head_width,
    layer_types,
    rope_parameters,
    rotation,
)
from coca_attention.models.folding import fold_temperature, position_free_queries
from coca_attention.testing import difference, logits, some_tokens
from coca_lab.data import load_tokenizer
from coca_lab.export.gguf_file import (
    check_settings,
    check_tokenizer,
    end_tokens,
    write_gguf,
)
from coca_lab.export.llama_cpp import log_probabilities, serve
from coca_lab.folders import new_folder, served_by_vllm, write_card, writing_model
from coca_lab.loading import load_model, model_without_weights, no_progress_bars

Native = GraniteSWAForCausalLM | Cohere2ForCausalLM
NO_SINK = -1e4
"""Score of a sink that nothing attends to; finite in float16. GraniteSWA's initial 0 is not."""
READ, LAST = 4096, 256
"""Most tokens of the text that is read to compare a source with what was written, and of how many
of them, the last ones, the logits are compared."""
ROUND_OFF, HALF_ROUND_OFF = 1e-3, 3e-2
"""Largest difference of logits by round-off, as a share of the largest one: in float32, and in an
engine that computes in a half precision."""


def as_native(model: PreTrainedModel) -> Native:
    """The model of a stock class that computes the same; UserError names what none can compute."""
    if isinstance(model, Native):
        return model
    config: PreTrainedConfig = model.config
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
    # Made in the dtype, not turned into it, which would round the frequencies of rotations.
    native: Any = GraniteSWAForCausalLM._from_config(
        GraniteSWAConfig(
            **same,
            attention_multiplier=head_width(config) ** -0.5,
            layer_types=kinds,
            layer_rope_theta=[base if kind == LOCAL else 0 for kind in kinds],
            rope_parameters={"rope_type": "default", "rope_theta": base},
        ),
        dtype=model.dtype,
    )
    weights = {name.replace(".t_proj.", ".k_proj."): w for name, w in model.state_dict().items()}
    for index in range(len(kinds)):
        sinks = torch.full((config.num_attention_heads,), NO_SINK)
        weights[f"model.layers.{index}.self_attn.sinks"] = sinks
    native.load_state_dict(weights)
    native.generation_config = copy.deepcopy(model.generation_config)
    use_fused_attention(native)
    return native.eval()


def _check_supported(model: PreTrainedModel) -> None:
    config: PreTrainedConfig = model.config
    if not type(config).__module__.startswith("coca_attention"):
        raise UserError(
            f"a plain {type(model).__name__} needs no export: engines that know this class of "
            "Transformers read its folder as it is"
        )
    if not isinstance(model, CoCALlamaForCausalLM) or set(layer_types(config)) != {LOCAL, GLOBAL}:
        raise UserError(
            f"only a GraniteSWA, a Cohere2, or a Llama with local and global layers (model.layers: "
            f"llg) can be exported; this is a {type(model).__name__} with layers of type "
            f"{', '.join(sorted(set(layer_types(config))))}"
        )
    rope, local = rope_parameters(config), rotation(config, LOCAL)
    reasons = {
        f"{attention_of(config)} attention in local layers (model.attention: rope)": (
            attention_of(config) != "rope"
        ),
        "a temperature (model.temperature: false, and --context afterwards)": (
            rope.get("temperature") is not None
        ),
        "a decay (leave out model.decay)": bool(rope.get("decay")),
        "a distance map": rope.get("distance_map") is not None,
        "positions in global layers (model.turning_pairs: 0)": rope.get("turning_pairs") != 0,
        f"{rope['rope_type']} scaling": rope["rope_type"] != "default",
        f"{local.rule.kind} scaling in local layers": local.rule.kind != "none",
        "partial rotary embedding in local layers": local.width != head_width(config),
    }
    for what, present in reasons.items():
        if present:
            raise UserError(f"GraniteSWA, and so other engines, cannot compute {what}")


def fold_context(model: PreTrainedModel, context: int) -> float:
    """Fold a temperature for N tokens, which become the model's length; returns the factor."""
    length: int = model.config.max_position_embeddings
    if context < length:
        raise UserError(f"`context` must be at least the training length, {length}; got {context}")
    factor = math.log(context + 1) / math.log(length + 1)
    fold_temperature(position_free_queries(model), factor)
    model.config.max_position_embeddings = context
    return factor


def export_native(
    source: str | Path,
    target: str | Path,
    *,
    context: int | None = None,
    gguf: bool = False,
    dtype: str = "auto",
) -> Native:
    """Write a model with layers with roles as a folder of a stock class.

    Args:
        source: The folder of the model.
        target: The new folder.
        context: N of `fold_context`; None leaves the scores as they are.
        gguf: Whether to write a file for llama.cpp, too.
        dtype: Precision of the weights; ``auto`` keeps it.

    Raises:
        UserError: If no stock class, or llama.cpp, can compute the same, or the logits of what was
            written differ from those of the source by more than round-off. Nothing is then left.
    """
    target = new_folder(source, target)
    if gguf:
        check_tokenizer(source)
    # What is refused is refused before its weights are read.
    with torch.device("meta"):
        planned = as_native(model_without_weights(source))
    if gguf:
        check_settings(planned.config)
    if context is not None:
        fold_context(planned, context)
    model = load_model(source, dtype=dtype, device="cpu")
    native = as_native(model)
    config: Any = native.config
    length: int = config.max_position_embeddings
    if gguf:
        end_tokens(native.generation_config, source)
    if context is not None:
        for each in {id(x): x for x in (model, native)}.values():  # often one and the same
            fold_context(each, context)
    if isinstance(native, GraniteSWAForCausalLM):
        # Read by llama.cpp's converter, which does not know `layer_rope_theta`.
        config.no_rope_layers = [int(bool(theta)) for theta in config.layer_rope_theta]
    exact = model if model.dtype == torch.float32 else copy.deepcopy(model).float()
    with writing_model(native, source, target) as folder:
        sections = _card_sections(target.name, config, length, context, gguf)
        write_card(folder, config, name=target.name, source=source, sections=sections)
        file = folder / f"{target.name}.gguf"
        if gguf:
            write_gguf(native, source, file)
        with no_progress_bars():
            written: Any = type(native).from_pretrained(folder, dtype=torch.float32)
        written.eval()
        tokens = min(length, 2 * config.sliding_window, READ)
        ids = some_tokens(written, batch=1, length=tokens)
        ours, theirs = (logits(each, ids, logits_to_keep=LAST) for each in (written, exact))
        _check_difference("the folder", difference(ours, theirs), ROUND_OFF)
        if gguf:
            bound = ROUND_OFF if native.dtype == torch.float32 else HALF_ROUND_OFF
            _check_difference("llama.cpp", _error_in_llama_cpp(file, source, written, ids), bound)
    return native


def _error_in_llama_cpp(
    file: Path, source: str | Path, model: PreTrainedModel, ids: Tensor
) -> float:
    letter, errors = load_tokenizer(source)("a").input_ids[-1], []
    server = serve(file, ids.shape[1] + 1)
    for length in (ids.shape[1] // 3 + 1, ids.shape[1]):
        expected = logits(model, ids[:, :length], logits_to_keep=1)[0, -1]
        found = log_probabilities(server, ids[0, :length].tolist(), len(expected), letter)
        said = ~found.isnan()
        error = (found - expected.log_softmax(-1))[said].abs().max() / expected.abs().max()
        errors.append(error.item())
    return max(errors)


def _check_difference(what: str, error: float, bound: float) -> None:
    """Raise UserError unless an error, of logits as a share of the largest, is within a bound."""
    if not error < bound:  # nor NaN
        raise UserError(
            f"{what} does not compute what the source does: logits differ by {error:.1e} of the "
            f"largest, and round-off is at most {bound:.0e}. Nothing was written; please report it "
            "with the source's config.json"
        )


def _card_sections(
    name: str, config: PreTrainedConfig, length: int, context: int | None, gguf: bool
) -> dict[str, str]:
    """What the model card says besides the facts of every card, in Markdown by heading."""
    text = (
        f"Trained with a context of {length:,} tokens. Local layers see a short window, global "
        "ones the whole text without positions."
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
    return sections | served_by_vllm(config, name)
