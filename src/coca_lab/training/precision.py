"""Which precision a training computes in where its recipe leaves it open."""

import logging
from pathlib import Path

import torch

from coca_lab.recipe import Recipe, load_recipe
from coca_lab.training.folder import RECIPE_FILE

log = logging.getLogger(__name__)


def with_precision(recipe: Recipe, output: Path) -> Recipe:
    """The recipe with a precision in place of ``auto``, and a warning of one that is slow here.

    It is that of the run in the folder, if there is one, so that it goes on in the same on another
    machine; else what the device computes natively.
    """
    precision = recipe.training.precision
    native = native_precision()
    saved = output / RECIPE_FILE
    if precision != "auto":
        if precision == "bfloat16" != native and not torch.accelerator.is_available():
            log.warning(
                "training.precision bfloat16 may take many times as long as float32 on this "
                "processor, which has no such arithmetic: set auto or float32"
            )
        return recipe
    if saved.is_file():
        precision = load_recipe(saved).training.precision
    else:
        precision = native
        log.info("training.precision: auto is %s here", precision)
    return recipe.changed("training", precision=precision)


def native_precision() -> str:
    """The precision for autocast that the device computes natively: bfloat16, else float32."""
    if torch.cuda.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif torch.accelerator.is_available():
        native = True
    else:
        # Of x86 alone: PyTorch's builds for other processors need not use what these have.
        capabilities = torch.cpu.get_capabilities()
        native = any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    return "bfloat16" if native else "float32"
