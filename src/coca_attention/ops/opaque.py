"""Functions that torch.compile calls without looking inside.

Attention in blocks of queries loops over the length: traced, every length would have a graph of its
own. An operator has one for all lengths.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "coca_attention"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def compiling() -> bool:
    """Whether torch.compile is tracing. False for torch.export, which allows no custom operator."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting()


def opaque(function: Callable[..., Tensor], differentiable: int) -> Callable[..., Tensor]:
    """Attention as an operator whose backward pass computes it again.

    Its schema is the function's annotations. The function starts with a query (..., T, D) and as
    many differentiable tensors, of which the last are values (..., S, Dv), and returns
    (..., T, Dv).
    """
    name = function.__name__.strip("_")

    def forward(*arguments: object) -> Tensor:
        return function(*arguments).contiguous()

    def gradients(gradient: Tensor, *arguments: Any) -> list[Tensor]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in arguments[:differentiable]]
            output = function(*leaves, *arguments[differentiable:])
        return [x.contiguous() for x in torch.autograd.grad(output, leaves, gradient)]

    def shape(*arguments: Any) -> Tensor:
        query, value = arguments[0], arguments[differentiable - 1]
        return value.new_empty(*query.shape[:-1], value.shape[-1])

    def shapes(_: Tensor, *arguments: Any) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in arguments[:differentiable]]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
        ctx.others = [None if isinstance(x, Tensor) else (x,) for x in inputs]

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensors = iter(ctx.saved_tensors)
        arguments = [next(tensors) if x is None else x[0] for x in ctx.others]
        found = operators.__getattr__(f"{name}_backward")(gradient, *arguments)
        return *found, *[None] * (len(arguments) - differentiable)

    schema = torch.library.infer_schema(function, mutates_args=())
    inputs = schema.removeprefix("(").rpartition(" -> ")[0]
    # Not `custom_op`, in whose functions autograd is switched off.
    _LIBRARY.define(f"{name}_backward(Tensor gradient, {inputs} -> Tensor[]")
    _LIBRARY.impl(f"{name}_backward", gradients, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}_backward", shapes, lib=_LIBRARY)
    operators = getattr(torch.ops, NAMESPACE)
    operator = torch.library.custom_op(
        f"{NAMESPACE}::{name}", forward, mutates_args=(), schema=schema
    )
    operator.register_fake(shape)
    operator.register_autograd(backward, setup_context=keep)
    return operator
