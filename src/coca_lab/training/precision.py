"""Which precision a training computes in where its recipe leaves it open."""

import logging
import time
from functools import lru_cache
from pathlib import Path

import torch

from coca_lab.recipe import Recipe, load_recipe
from coca_lab.training.folder import RECIPE_FILE

log = logging.getLogger(__name__)

SHAPE = (512, 64, 512)
"""Of the product that is timed. Without arithmetic of its own bfloat16 takes some 40 times as long
in it as float32, with it a half to a quarter."""


def with_precision(recipe: Recipe, output: Path) -> Recipe:
    """The recipe with a precision in place of ``auto``, and a warning of one that is slow here.

    It is that of the run in the folder, if there is one, so that it goes on in the same on another
    machine; else what the device computes natively.
    """
    precision = recipe.training.precision
    saved = output / RECIPE_FILE
    if precision != "auto":
        if precision == "bfloat16" and not torch.accelerator.is_available():
            ratio = bfloat16_ratio()
            if ratio > 1:
                log.warning(
                    "training.precision bfloat16 takes %.0f times as long as float32 on this "
                    "processor, which has no such arithmetic: set auto or float32",
                    ratio,
                )
        return recipe
    if saved.is_file():
        precision = load_recipe(saved).training.precision
    else:
        precision = native_precision()
        log.info("training.precision: auto is %s here", precision)
    return recipe.changed("training", precision=precision)


def native_precision() -> str:
    """The precision for autocast that the device computes natively: bfloat16, else float32."""
    if not torch.accelerator.is_available():
        return "bfloat16" if bfloat16_ratio() <= 1 else "float32"
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float32"
    return "bfloat16"


@lru_cache(maxsize=1)
def bfloat16_ratio() -> float:
    """How long a product in bfloat16 takes on this processor, by the time of one in float32."""
    # Measured, because the names of processors' flags differ, and PyTorch may not use them.
    rows, inner, columns = SHAPE
    times = {}
    for dtype in (torch.float32, torch.bfloat16):
        left = torch.ones(rows, inner, dtype=dtype)
        right = torch.ones(inner, columns, dtype=dtype)
        taken = []
        for _ in range(5):
            started = time.perf_counter()
            torch.matmul(left, right)
            taken.append(time.perf_counter() - started)
        times[dtype] = min(taken)
    return times[torch.bfloat16] / times[torch.float32]
