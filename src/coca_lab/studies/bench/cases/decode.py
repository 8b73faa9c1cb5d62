"""Decoding one token over a cache that grows."""

from functools import partial

import torch

from coca_lab.studies.bench import models
from coca_lab.studies.bench.case import Case
from coca_lab.studies.bench.settings import TITLES, BenchSettings
from coca_lab.studies.bench.timing import Variant


def decoder(
    name: str, form: str | None, kv_cache: str, length: int, settings: BenchSettings
) -> Variant:
    """Every run decodes the same token and removes it from the cache."""
    model = models.make_model(settings, form, kv_cache)
    cache = models.random_cache(model, length, settings)
    token = models.random_tokens(1, settings)

    @torch.inference_mode()
    def run() -> None:
        model(input_ids=token, past_key_values=cache)
        cache.crop(-1)

    return Variant(name, run, models.decoding_error(model), models.cache_facts(cache))


CASE = Case(
    "decode",
    TITLES["decode"],
    partial(models.decoder_variants, decoder),
    sizes=models.MODEL_SIZES,
    gpu_runs=(models.gpu_run(lengths=[32768, 131072], kv_heads=4),),
)
