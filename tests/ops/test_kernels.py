"""Triton kernels compared with PyTorch operations; in Triton's interpreter without a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import operands
from coca_attention.ops import FORMS, Rotation, kernels, key_map, query_map
from coca_attention.ops.forms import Pairing
from covering import pairs_slow

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensor(*shape, seed=0, dtype=torch.float32):
    return operands.normal(*shape, seed=seed, dtype=dtype).to(DEVICE)


def both_ways(monkeypatch, function, *inputs):
    """Results and gradients with PyTorch's operations, then with the kernels."""
    found = []
    for served in (False, True):
        supports = Mock(return_value=served)
        monkeypatch.setattr(kernels, "supports", supports)
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        output = function(*leaves)
        weights = tensor(*output.shape, seed=7).to(output.dtype)
        gradients = torch.autograd.grad(output, leaves, weights)
        supports.assert_called()
        found.append([output, *gradients])
    return zip(*found, strict=True)


# The same numbers, heads before rows or rows before heads, or with gaps between them.
LAYOUTS = {
    "heads": lambda x: x,
    "rows": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "gaps": lambda x: torch.cat((x, x), dim=-1)[..., : x.shape[-1]],
}


CASES = pairs_slow(
    FORMS,
    [(16, 16, False, 0), (16, 16, False, 8), (12, 12, True, 2), (12, 4, False, 0),
     (12, 4, True, 0)],
    LAYOUTS,
    [torch.float32, torch.bfloat16],
    ["of each row of the batch", "of all rows", "of one position"],
)  # fmt: skip


@pytest.mark.parametrize(("form", "pairs", "layout", "dtype", "places"), CASES, ids=str)
def test_maps(monkeypatch, form, pairs, layout, dtype, places):
    width, span, interleaved, free = pairs
    q = LAYOUTS[layout](tensor(2, 3, 5, width, dtype=dtype))
    t = LAYOUTS[layout](tensor(2, 9, 5, width // 2 + free, seed=1, dtype=dtype))
    positions = torch.arange(5, device=DEVICE)
    if places == "of each row of the batch":
        positions = torch.stack((positions, positions + 100))
    elif places == "of one position":
        positions = positions[3:4]
    cos, sin = Rotation(span).tables(positions)
    # Where PyTorch rounds once less or once more, the last place of the dtype differs.
    tolerance = 4 * torch.finfo(dtype).eps
    both = operands.maps(cos, sin, form, 0.3, free=free, interleaved=interleaved)
    for function, x in zip(both, (q, t), strict=True):
        for expected, ours in both_ways(monkeypatch, function, x):
            assert ours.dtype == dtype and ours.shape == expected.shape
            assert (ours - expected).abs().max() <= tolerance * expected.abs().max()


def test_no_positions_and_no_heads_to_map(monkeypatch):
    cos, sin = Rotation(8).tables(torch.arange(0, device=DEVICE))
    monkeypatch.setattr(kernels, "supports", lambda x: True)
    assert query_map(tensor(1, 2, 0, 8), cos, sin, form="slack").shape == (1, 2, 0, 8)
    assert key_map(tensor(0, 2, 0, 4), cos, sin).shape == (0, 2, 0, 8)


def test_second_derivatives_do_not_use_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "supports", lambda x: True)
    q = tensor(1, 1, 3, 4).requires_grad_()
    cos, sin = Rotation(4).tables(torch.arange(3, device=DEVICE))
    made = query_map(q, cos, sin, form="strict").sum()
    (first,) = torch.autograd.grad(made, q, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), q)
    # |q|^2 (cos + sin), summed: its second derivative by q is 2 (cos + sin).
    assert (second - 2 * (cos + sin).repeat(1, 2)).abs().max() < 1e-5


@pytest.mark.parametrize("axis", [1, 2], ids=["heads", "rows"])
def test_offsets_beyond_int32(axis):
    """Heads or rows 2^30 elements apart, on untouched memory: int32 offsets would crash."""
    from coca_attention.ops.kernels import maps

    slack = Pairing(FORMS["slack"], False, 8, 0)
    near = tensor(*(1, 3, 1, 8) if axis == 1 else (1, 1, 3, 8), dtype=torch.bfloat16)
    far = near.new_empty(2**31 + 8).as_strided(near.shape, (0, 2**30, 2**30, 1)).copy_(near)
    cos, sin = (x.unsqueeze(0) for x in Rotation(8).tables(torch.arange(near.shape[2]).to(DEVICE)))
    for function in (
        lambda x: maps.query_map(x, cos, sin, slack),
        lambda x: maps.query_gradient(near, x, cos, sin, slack),
        lambda x: maps.key_map(x[..., :4], cos, sin, 0),
        lambda x: maps.key_gradient(x, cos, sin, 0),
    ):
        assert torch.equal(function(far), function(near))


@pytest.mark.slow
def test_kernels_compile(tmp_path):
    """For CUDA, even without a GPU: the interpreter accepts code that the compiler rejects."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_kernels.py")],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        check=True,
    )


def test_kernels_support_cuda_but_not_float64():
    assert not kernels.supports(torch.zeros(1))
    if torch.cuda.is_available():
        assert kernels.supports(torch.zeros(1, device="cuda"))
        assert not kernels.supports(torch.zeros(1, device="cuda", dtype=torch.float64))
