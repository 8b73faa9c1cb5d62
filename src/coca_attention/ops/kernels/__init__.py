"""Fused Triton kernels for CUDA; elsewhere PyTorch's own operations compute the same.

`maps` and `decode` import Triton. They are imported by the first call that needs them, so that a
CPU needs no Triton.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def supports(tensor: Tensor) -> bool:
    """Whether the kernels take a tensor: on CUDA, with Triton, and not under torch.compile.

    torch.compile fuses the plain operations itself, together with those around them.
    """
    return (
        tensor.is_cuda
        and tensor.dtype in DTYPES
        and not torch.compiler.is_compiling()
        and _installed()
    )


def __getattr__(name: str) -> Any:
    """The modules `maps` and `decode`, imported when first asked for."""
    if name in ("maps", "decode"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
