"""Compile every Triton kernel for an H100 with the arguments of real calls; needs no GPU.

Triton's interpreter, in which the tests run without a GPU, accepts code that the compiler rejects.
This is a separate program, because the tests select the interpreter before Triton is imported.
"""

from typing import Any

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from coca_attention.ops import Rotation, key_frames, tile_length
from coca_attention.ops.decoding import paired_query
from coca_attention.ops.forms import FORMS, Pairing
from coca_attention.ops.kernels import decode, maps

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "i8"}


def compiled(self: Any, *values: Any, grid: Any, warmup: bool, **constants: Any) -> None:
    """Compiles instead of launching a kernel."""
    signature, fixed = {}, {}
    for index, parameter in enumerate(self.params):
        name = parameter.name
        value = constants[name] if name in constants else values[index]
        if parameter.is_constexpr or (type(value) is int and value == 1):
            signature[name], fixed[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
    source = ASTSource(self, signature, constexprs=fixed)
    options = {"num_warps": constants.get("num_warps", 4)}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert kernel.metadata.shared <= 99 * 1024, "more shared memory than desktop GPUs have"
    print(self.__name__, TYPES[values[0].dtype], len(kernel.asm["cubin"]), flush=True)


def main() -> None:
    """Calls every kernel in half and in single precision."""
    triton.JITFunction.run = compiled  # pyright: ignore[reportAttributeAccessIssue]
    mask = torch.ones(2, 1, 1, 200, dtype=torch.bool)
    for dtype, form, width, free, attention_mask in (
        (torch.bfloat16, "slack", 128, 40, mask),
        (torch.float32, "magnitude", 256, 0, None),
    ):
        query, grad, value = torch.zeros(3, 2, 8, 200, width, dtype=dtype)
        t = query[:, :2, :, : width // 2 + free]
        cos, sin = (x.unsqueeze(0) for x in Rotation(width).tables(torch.arange(200)))
        maps.query_map(query, cos, sin, Pairing(FORMS[form], False, width, free))
        pairing = Pairing(FORMS[form], True, width // 2, free)
        maps.query_gradient(query, grad, cos, sin, pairing)
        maps.key_map(t, cos, sin, free)
        maps.key_gradient(grad, cos, sin, free)
        for heads in (8, 2):
            with FakeTensorMode():
                tile = tile_length(torch.empty(t.shape, dtype=dtype, device="cuda"), heads)
            frames = key_frames(
                torch.zeros(1), 200, Rotation(width), tile=tile, pairs=width // 2, free_pairs=free
            )
            single = paired_query(query[:, :heads, :1], t.shape[-1])
            decode.attend_half(single, t, value[:, :2], frames, attention_mask, 0.1)
    # Key map and decoding do not depend on the form.
    strict = Pairing(FORMS["strict"], False, width, free)
    maps.query_map(query, cos, sin, strict)
    maps.query_gradient(query, grad, cos, sin, strict)


if __name__ == "__main__":
    main()
