"""Fused Triton kernels for CUDA; everything they do, PyTorch's own operations do elsewhere.

`maps` and `decode` import Triton, and are imported by the first call that needs them, so that
nothing here asks for it on a CPU.
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


def serve(tensor: Tensor) -> bool:
    """Whether the kernels take a tensor: on CUDA, with Triton, and not while compiling.

    torch.compile fuses the plain operations itself, together with what stands around them.
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
