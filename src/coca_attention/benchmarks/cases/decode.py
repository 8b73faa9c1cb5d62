"""Decoding one token over a cache that grows."""

from functools import partial

import torch

from coca_attention.benchmarks.case import Case, register_case
from coca_attention.benchmarks.models import (
    MODEL_SIZES,
    cache_facts,
    decoder_variants,
    decoding_error,
    gpu_run,
    make_model,
    random_cache,
    random_tokens,
)
from coca_attention.benchmarks.settings import BenchSettings
from coca_attention.benchmarks.timing import Variant


def decoder(
    name: str, form: str | None, kv_cache: str, length: int, settings: BenchSettings
) -> Variant:
    """Every run decodes the same token and removes it from the cache."""
    model = make_model(settings, form, kv_cache)
    cache = random_cache(model, length, settings)
    token = random_tokens(1, settings)

    @torch.inference_mode()
    def run() -> None:
        model(input_ids=token, past_key_values=cache)
        cache.crop(-1)

    return Variant(name, run, decoding_error(model), cache_facts(cache))


register_case(
    Case(
        "decode",
        "One token decoded, by the length of the cache",
        partial(decoder_variants, decoder),
        sizes=MODEL_SIZES,
        gpu_runs=(gpu_run(lengths=[32768, 131072], kv_heads=4),),
    )
)
