"""The operator's forward and backward pass."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from coca_lab.studies.bench.case import Case
from coca_lab.studies.bench.operators import gpu_run, operator_variants
from coca_lab.studies.bench.settings import TITLES


def backward_run(function: Callable[..., Tensor], tensors: dict[str, Tensor]) -> Callable[[], None]:
    """One forward and backward pass."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}

    def run() -> None:
        output = function(**leaves)
        gradient = torch.ones_like(output)
        # An operator reads either the keys or the key coefficients: the others have no gradient.
        torch.autograd.grad(output, list(leaves.values()), gradient, allow_unused=True)

    return run


CASE = Case(
    "operator-training",
    TITLES["operator-training"],
    partial(operator_variants, make_run=backward_run),
    gpu_runs=(gpu_run(lengths=[4096, 8192, 16384, 32768]),),
)
