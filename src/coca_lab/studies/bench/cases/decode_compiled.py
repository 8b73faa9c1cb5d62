"""Decoding one token with torch.compile over a cache of fixed size (`StaticCache`)."""

from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from coca_attention.testing import difference
from coca_lab.studies.bench import models
from coca_lab.studies.bench.case import Case
from coca_lab.studies.bench.settings import TITLES, BenchSettings
from coca_lab.studies.bench.timing import Variant


def make(length: int, settings: BenchSettings) -> list[Variant]:
    """Each decoder, compiled."""
    torch._dynamo.reset()  # after another length, the compiler would assume dynamic shapes
    return models.decoder_variants(compiled_decoder, length, settings)


def compiled_decoder(
    name: str, form: str | None, kv_cache: str, length: int, settings: BenchSettings
) -> Variant:
    """A compiled model, compared with itself without compilation."""
    model = models.make_model(settings, form, kv_cache)
    filled = models.random_cache(model, length, settings)
    cache = StaticCache(config=model.config, max_cache_len=length + settings.rounds + 8)
    layers: Any = filled.layers
    for index, layer in enumerate(layers):
        cache.update(layer.keys, layer.values, index)
    token = models.random_tokens(1, settings)
    step = torch.compile(model.forward, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def run() -> Tensor:
        return step(input_ids=token, past_key_values=cache).logits

    with torch.no_grad():
        exact = model(input_ids=token, past_key_values=filled).logits
    error = max(difference(run(), exact), models.decoding_error(model))
    run()
    return Variant(name, run, error, models.cache_facts(cache))


CASE = Case(
    "decode-compiled",
    TITLES["decode-compiled"],
    make,
    sizes=models.MODEL_SIZES,
    gpu_runs=(models.gpu_run(lengths=[32768], layers=4, kv_heads=4),),
)
