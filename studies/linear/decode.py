"""Milliseconds of one decoding step, and bytes of the cache, after 1,000 and after 100,000 tokens.

python studies/linear/decode.py
"""

import copy
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from coca_attention.models import CoCALlamaConfig

LENGTHS = 1_000, 100_000
ROUNDS = 40
SIZES: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 688, "max_position_embeddings": 2048,
}  # fmt: skip


@torch.no_grad()
def read(model: Any, length: int) -> DynamicCache:
    """The cache after random tokens, which are read in parts."""
    cache = DynamicCache(config=model.config)
    for part in torch.randint(0, 1024, (1, length)).split(2_000, dim=1):
        model.model(part, past_key_values=cache)
    return cache


def size(cache: DynamicCache) -> int:
    """Bytes of all tensors of a cache."""
    tensors = [
        tensor
        for layer in cache.layers
        for tensor in (layer.keys, layer.values, *getattr(layer, "recurrent_states", {}).values())
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@torch.no_grad()
def main() -> None:
    """Steps of all lengths in turn, so that a busy machine slows all of them."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = CoCALlamaConfig(**SIZES, coca_form="strict", coca_linear=True)
    model = AutoModelForCausalLM.from_config(config).eval()
    caches = {length: read(model, length) for length in LENGTHS}
    times: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for _ in range(ROUNDS):
        for length, cache in caches.items():
            used = copy.deepcopy(cache)
            start = time.perf_counter()
            model(torch.tensor([[1]]), past_key_values=used)
            times[length].append(1000 * (time.perf_counter() - start))
    for length, cache in caches.items():
        middle = statistics.median(times[length])
        print(f"{length:,} tokens: {middle:.2f} ms, {size(cache):,} bytes")


if __name__ == "__main__":
    main()
