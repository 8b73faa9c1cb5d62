"""Peak memory of a forward pass, measured in a process of its own."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from coca_attention.ops import coca_attention
heads, groups, queries, keys, value_width = map(int, sys.argv[1:6])
form, train = sys.argv[6], sys.argv[7] == "train"
warm = torch.randn(1, heads, 64, 64)
coca_attention(warm, torch.rand(1, groups, 64, 32), torch.rand(1, groups, 64, value_width))
q = torch.randn(1, heads, queries, 64)
t = torch.rand(1, groups, keys, 32)
v = torch.randn(1, groups, keys, value_width)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
mask = None
if train:
    mask = torch.ones(1, 1, 1, keys, dtype=torch.bool)
    q.requires_grad_()
with torch.set_grad_enabled(train):
    output = coca_attention(q, t, v, form=form, attention_mask=mask)
if train:
    output.sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def peak_megabytes(*arguments, mode="infer") -> float:
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments), mode],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(finished.stdout)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param((4, 4, 8192, 8192, 64, "slack"), id="square"),
        pytest.param((4, 1, 8192, 8192, 64, "strict"), id="grouped"),
        pytest.param((4, 4, 6000, 8192, 64, "slack"), id="last-queries"),
        pytest.param((4, 2, 8192, 8192, 48, "slack"), id="narrow-value"),
    ],
)
def test_no_score_matrix_is_held(case):
    """A score matrix of this size would take 1,024 MB (768 for the last queries)."""
    assert peak_megabytes(*case) < 200


def test_training_with_a_mask_keeps_no_mask_of_every_block():
    """The masks of all blocks together would take 268 MB as numbers, the scores 2,147."""
    assert peak_megabytes(4, 4, 8192, 8192, 64, "slack", mode="train") < 400


@pytest.mark.parametrize("form", ["slack", pytest.param("strict", marks=pytest.mark.slow)])
def test_32768_tokens_peak_under_1500_megabytes(form):
    assert peak_megabytes(16, 16, 32768, 32768, 64, form) < 1500
