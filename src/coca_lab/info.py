"""What `coca info` says: versions and hardware of this machine, or the configuration of a model."""

from typing import Any

import torch

from coca_attention.models.configuration import (
    GLOBAL,
    LOCAL,
    attention_of,
    head_width,
    rope_parameters,
    training_length,
)
from coca_lab.environment import describe_environment
from coca_lab.loading import model_without_weights

Rows = list[tuple[str, str]]


def machine() -> Rows:
    """Versions and hardware, as result files record them."""
    here = describe_environment()
    return [
        ("versions", ", ".join(f"{name} {number}" for name, number in here["versions"].items())),
        ("system", here["system"]),
        ("processor", f"{here['processor']}, {here['cores']} cores, {here['threads']} threads"),
        ("GPUs", ", ".join(here["gpus"]) or "none"),
        ("CUDA of torch", torch.version.cuda or "none"),
    ]


def model_folder(path: str) -> Rows:
    """What a model's configuration says, and its number of parameters; no weight is read.

    Raises:
        UserError: As `model_without_weights`.
    """
    model = model_without_weights(path, "auto", any_head=True)
    config = model.config.get_text_config()
    length, dtype = training_length(config), str(model.dtype).removeprefix("torch.")
    return [
        ("model", type(model).__name__),
        ("attention", _attention(config)),
        *_layers(config),
        ("training length", f"{length:,} tokens" if length else "not in config.json"),
        ("parameters", f"{model.num_parameters():,} ({dtype})"),
    ]


def _attention(config: Any) -> str:
    form, heads = attention_of(config), config.num_attention_heads
    text = {None: "unknown", "rope": "rotary", "alibi": "ALiBi"}.get(form, f"CoCA, {form}")
    if hasattr(config, "coca_form"):
        text += f", {config.kv_cache} cache"
    groups = getattr(config, "num_key_value_heads", None) or heads
    return f"{text}; {heads} heads of {head_width(config)}, {groups} for keys and values"


def _layers(config: Any) -> Rows:
    """The number of layers and their roles; rotary parameters, once if all types share them."""
    kinds = getattr(config, "layer_types", None) or [GLOBAL] * config.num_hidden_layers
    text = f"{len(kinds)} of {config.hidden_size:,}"
    if LOCAL in kinds:
        letters = "".join("l" if kind == LOCAL else "g" for kind in kinds)
        text += f": {letters} (l sees the last {config.sliding_window:,} tokens, g all)"
    rows = [("layers", text)]
    for kind in dict.fromkeys(kinds if attention_of(config) != "alibi" else ()):
        fields = (f"{name} {value}" for name, value in rope_parameters(config, kind).items())
        rows.append(("rotation", ", ".join(fields)))
    return list(dict.fromkeys(rows))
