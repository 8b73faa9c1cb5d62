"""Checkpoints in the format of the paper's authors.

Their models are Llama with a T projection as wide as the key projection
(``self_attn.t_proj``), and GPT-NeoX with T instead of the key in ``query_key_value``. Renamed,
their weights load as those of a vanilla model; folding its key projections gives the CoCA model.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PreTrainedModel

from coca_attention.errors import UserError
from coca_attention.models.configuration import rotation
from coca_attention.models.conversion.convert import convert
from coca_attention.models.fields import head_width

CONFIGS = {"llama": LlamaConfig, "gpt_neox": GPTNeoXConfig}
# Buffers that old versions of Transformers saved with the weights.
BUFFERS = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias")
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def load_original(
    source: str | Path | tuple[Mapping[str, Any], Mapping[str, Tensor]],
    *,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """Load a checkpoint in the authors' format and fold its T projections.

    Args:
        source: A folder with config.json and weights (safetensors, or .bin files, which are loaded
            with ``weights_only=True``), or a configuration and its state dict.
        dtype: dtype of the weights; default: that of the checkpoint.

    Returns:
        A ``coca_llama`` or ``coca_gpt_neox`` model of the slack form, in evaluation mode.

    Raises:
        UserError: If the folder or a file cannot be read, the model type is not one of the
            authors', the model has partial rotary embedding, or weights are missing, unknown or of
            the wrong shape.
    """
    if isinstance(source, str | Path):
        label = str(source)
        settings, weights = _read_folder(Path(source))
    else:
        label = "original checkpoint"
        settings, weights = source
    if not isinstance(settings, Mapping) or not isinstance(weights, Mapping):
        raise UserError(
            f"{label}: configuration and state dict must be mappings; got "
            f"{type(settings).__name__} and {type(weights).__name__}"
        )
    if isinstance(weights.get("state_dict"), Mapping):
        raise UserError(
            f"{label}: the weights are nested under 'state_dict': save that dictionary instead"
        )
    kind = settings.get("model_type")
    if kind not in CONFIGS:
        raise UserError(
            f"{label}: expected model_type {' or '.join(CONFIGS)}, as in the authors' checkpoints; "
            f"got {kind!r}"
        )
    values = {k: v for k, v in settings.items() if k not in ("model_type", "auto_map")}
    try:
        config = CONFIGS[kind](**values)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise UserError(f"{label}: the configuration cannot be used: {error!r}") from error
    rotated, head = rotation(config).width, head_width(config)
    if rotated != head:
        raise UserError(
            f"{label}: the rotary width is {rotated}, less than the head width {head}. The original"
            " code folds the whole head, so its pairs would not be collinear; only rotary_pct = 1 "
            "is supported"
        )
    renamed = {_renamed(name): w for name, w in weights.items() if not name.endswith(BUFFERS)}
    _check_weights(model, renamed, label)
    model.load_state_dict(
        {name: w.to(dtype) if dtype else w.clone() for name, w in renamed.items()},
        strict=False,  # checked above: a tied head may be missing
        assign=True,
    )
    model.tie_weights()
    model.config.dtype = model.dtype
    return convert(model, "slack", init="fold").eval()


def _renamed(name: str) -> str:
    name = name.replace(".self_attn.t_proj.", ".self_attn.k_proj.")
    return "lm_head.weight" if name == "embed_out.weight" else name


def _check_weights(model: PreTrainedModel, weights: Mapping[str, Tensor], label: str) -> None:
    wanted = {name: tuple(w.shape) for name, w in model.state_dict().items()}
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    problems = [
        *(f"{name} is missing" for name in sorted(wanted.keys() - weights.keys() - tied)),
        *(f"{name} is not known" for name in sorted(weights.keys() - wanted.keys())),
        *(
            f"{name} has shape {tuple(weights[name].shape)}, expected {wanted[name]}"
            for name in sorted(wanted.keys() & weights.keys())
            if tuple(weights[name].shape) != wanted[name]
        ),
    ]
    if problems:
        shown = "; ".join(
            p.replace(".k_proj.", ".t_proj.") if "self_attn" in p else p for p in problems[:3]
        )
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(f"{label}: the weights do not fit the configuration: {shown}{more}")


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error
    for name in WEIGHT_FILES:
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{index}: not an index of weight files ({error!r})") from error
        elif (folder / name).is_file():
            files = [name]
        else:
            continue
        weights: dict[str, Tensor] = {}
        for file in files:
            part = _read_weights(folder / file)
            if not isinstance(part, Mapping):
                raise UserError(
                    f"{folder / file}: expected a mapping of tensors, got {type(part).__name__}"
                )
            weights.update(part)
        return settings, weights
    raise UserError(f"{folder}: no weights; expected {' or '.join(WEIGHT_FILES)}")


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    except (SafetensorError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(f"{path}: a weight file is damaged ({error})") from error
    except Exception as error:  # pickle.UnpicklingError, or anything a damaged pickle raises
        raise UserError(
            f"{path}: not loaded, because it is damaged or contains more than tensors ({error})"
        ) from error
