"""Reading a prompt into a cache."""

from collections.abc import Callable

import torch
from transformers import DynamicCache, PreTrainedModel

from coca_lab.studies.bench.case import Case
from coca_lab.studies.bench.models import (
    MODEL_SIZES,
    ROLES,
    gpu_run,
    model_variants,
    random_tokens,
)
from coca_lab.studies.bench.settings import TITLES, BenchSettings
from coca_lab.studies.bench.timing import Variant


def make(length: int, settings: BenchSettings) -> list[Variant]:
    """One pass of each model over a prompt, with the logits of its last token."""
    ids = random_tokens(length, settings)

    def prefill(model: PreTrainedModel) -> Callable[[], None]:
        @torch.inference_mode()
        def run() -> None:
            model(input_ids=ids, past_key_values=DynamicCache(), logits_to_keep=1)

        return run

    return model_variants(settings, prefill)


CASE = Case(
    "prefill",
    TITLES["prefill"],
    make,
    sizes=(*MODEL_SIZES, *ROLES),
    gpu_runs=(gpu_run(lengths=[8192, 32768]),),
)
