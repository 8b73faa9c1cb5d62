"""Fused Triton kernels for CUDA; on other devices PyTorch operations compute the same.

`maps` and `decode` import Triton. They are imported on first use, so that CPUs do not need Triton.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_INSTALLED = find_spec("triton") is not None


def supports(tensor: Tensor) -> bool:
    """Whether the kernels support a tensor: on CUDA, with Triton, and not under torch.compile."""
    # Which fuses the PyTorch operations itself, together with those around them.
    return (
        tensor.is_cuda
        and tensor.dtype in DTYPES
        and not torch.compiler.is_compiling()
        and _INSTALLED
    )


def __getattr__(name: str) -> ModuleType:
    """Import `maps` and `decode` on first access."""
    if name in ("maps", "decode"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
