"""How fast a run trains: tokens a second, and the share of a GPU's arithmetic that they need."""

import re
from typing import Any

import torch
from torch import nn

from coca_attention.models.fields import LOCAL, head_width, layer_types

# By words in the name of a GPU, the first that fit: peak FLOP/s in bfloat16 and float16 without
# sparsity, and bytes of memory. From NVIDIA's data sheets, which print twice the FLOP/s, with
# sparsity; of the A100 there is one of 80 GB as well.
DEVICES: dict[str, tuple[float, float]] = {
    "GB200": (2500e12, 186e9),  # GB200 NVL72 data sheet, of 72 GPUs
    "B200": (2250e12, 180e9),  # Blackwell architecture technical brief
    "H200 NVL": (835.5e12, 141e9),  # H200 data sheet
    "H200": (989.5e12, 141e9),
    "H100 PCIe": (756e12, 80e9),  # H100 data sheet
    "H100 NVL": (835.5e12, 94e9),
    "H100": (989.5e12, 80e9),
    "A100": (312e12, 40e9),  # A100 data sheet
    "L40S": (362e12, 48e9),  # L40S data sheet
    "L40": (181e12, 48e9),  # L40 data sheet
    "L4": (121e12, 24e9),  # L4 data sheet
    "RTX 4090": (165e12, 24e9),  # Ada architecture white paper, accumulating in float32
}

# Parts of a GPU, and other chips that share a name: RTX 4090 Laptop GPU, RTX 4090 D.
OTHERS = r"\b(MIG|Laptop|D)\b"
# Names that mixtures of experts have for the number of experts in their configurations.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def peak_flops(device: str, precision: str) -> float | None:
    """Peak FLOP/s of a device, or None where it is not known.

    Args:
        device: Name of a GPU as CUDA reports it, or anything else.
        precision: ``bfloat16`` or ``float16``; in float32 the peak depends on settings of CUDA.
    """
    if precision == "float32" or re.search(OTHERS, device):
        return None
    peaks = (peak for name, (peak, _) in DEVICES.items() if re.search(rf"\b{name}\b", device))
    return next(peaks, None)


def mean_keys(length: int, window: int | None = None) -> float:
    """Keys that a query sees in the mean over a text of so many tokens, under causality."""
    window = min(window or length, length)
    return window - window * (window - 1) / (2 * length)


def training_flops(model: nn.Module, length: int) -> float | None:
    """Floating-point operations per token that a training step of a model needs.

    Two per weight in the forward pass and four in the backward pass, two where the weight is
    frozen; and 12 per query, key that it sees and channel of every head. What is not counted:
    lookups of embeddings, norms, activations, and what checkpointing computes again.

    Args:
        model: A causal language model of Transformers, on any device.
        length: Tokens of a block.

    Returns:
        The number, or None where it is not known: of a mixture of experts, which does not use all
        weights for a token, and of weights that ZeRO-3 has split over processes.
    """
    module: Any = model
    config = module.config.get_text_config()
    is_mixture = any(getattr(config, name, None) for name in EXPERTS)
    if is_mixture or not all(w.numel() for w in model.parameters()):
        return None
    weights = {id(w): w for w in model.parameters() if w.dim() > 1}
    embeddings, head = module.get_input_embeddings(), module.get_output_embeddings()
    if head is None or head.weight is not embeddings.weight:
        weights.pop(id(embeddings.weight))
    dense = sum((6 if w.requires_grad else 4) * w.numel() for w in weights.values())
    windows = {LOCAL: getattr(config, "sliding_window", None)}
    keys = sum(mean_keys(length, windows.get(kind)) for kind in layer_types(config))
    return dense + 12 * config.num_attention_heads * head_width(config) * keys


def device_name(device: torch.device) -> str:
    """Name of a GPU as CUDA reports it, of other devices their kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
