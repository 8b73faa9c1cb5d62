"""One training step of a model."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

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
    """Forward pass, backward pass and AdamW step of each model."""
    ids = random_tokens(length, settings)

    def training_step(model: PreTrainedModel) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5)

        def run() -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return run

    return model_variants(settings, training_step)


CASE = Case(
    "training",
    TITLES["training"],
    make,
    sizes=(*MODEL_SIZES, *ROLES),
    gpu_runs=(gpu_run(lengths=[2048, 8192], batch=2),),
)
