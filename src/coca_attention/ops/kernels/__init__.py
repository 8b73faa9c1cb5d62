"""Fused Triton kernels for CUDA; everything they do, PyTorch's own operations do elsewhere.

Triton is imported at the first call that needs it, so that nothing here asks for it on a CPU.
"""

from functools import cache
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


def query_map(*arguments: Any) -> Tensor:
    """`coca_attention.ops.kernels.maps.query_map`."""
    from coca_attention.ops.kernels import maps

    return maps.query_map(*arguments)


def query_gradient(*arguments: Any) -> Tensor:
    """`coca_attention.ops.kernels.maps.query_gradient`."""
    from coca_attention.ops.kernels import maps

    return maps.query_gradient(*arguments)


def key_map(*arguments: Any) -> Tensor:
    """`coca_attention.ops.kernels.maps.key_map`."""
    from coca_attention.ops.kernels import maps

    return maps.key_map(*arguments)


def key_gradient(*arguments: Any) -> Tensor:
    """`coca_attention.ops.kernels.maps.key_gradient`."""
    from coca_attention.ops.kernels import maps

    return maps.key_gradient(*arguments)


def attend_half(*arguments: Any) -> Tensor:
    """`coca_attention.ops.kernels.decode.attend_half`."""
    from coca_attention.ops.kernels import decode

    return decode.attend_half(*arguments)
