"""Peak memory of `coca_attention`, measured in a separate process."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from coca_attention.ops import Rotation, coca_attention
for index, case in enumerate(sys.argv[1:]):
    *sizes, form, mode = case.split()
    heads, kv_heads, queries, keys, value_width = map(int, sizes)
    if index == 0:
        warm = torch.randn(1, heads, 64, 64)
        coca_attention(warm, torch.rand(1, heads, 64, 32), torch.rand(1, heads, 64, value_width))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    q = torch.randn(1, heads, queries, 64)
    t = torch.rand(1, kv_heads, keys, 32)
    v = torch.randn(1, kv_heads, keys, value_width)
    mask, train, rotation = None, mode != "infer", None
    if mode == "decay":
        rotation = Rotation(64, decay=1.0)
    elif train:
        mask = torch.ones(1, 1, 1, keys, dtype=torch.bool)
    q.requires_grad_(train)
    with torch.set_grad_enabled(train):
        output = coca_attention(q, t, v, form=form, attention_mask=mask, rotation=rotation)
    if train:
        output.sum().backward()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def peak_megabytes(*cases: str) -> list[float]:
    """Growth of the process's peak memory until the end of each case, one after the other.

    A case: heads, key/value heads, queries, keys, value width, form, and ``infer``,
    ``train`` (with a mask) or ``decay`` (training with a decay).
    """
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, *cases], capture_output=True, text=True, check=True
    )
    return [float(line) for line in finished.stdout.split()]


@pytest.mark.slow
def test_no_score_matrix_is_allocated():
    """A score matrix of these sizes would take 1,024 MB (768 MB for the last queries).

    The masks of all blocks together would take 268 MB as numbers, the scores in training 2,147 MB.
    """
    *inference, decay, training = peak_megabytes(
        "4 4 8192 8192 64 slack infer",
        "4 1 8192 8192 64 strict infer",
        "4 4 6000 8192 64 slack infer",  # the last queries
        "4 2 8192 8192 48 slack infer",
        "4 4 8192 8192 64 slack decay",
        "4 4 8192 8192 64 slack train",  # with a mask
    )
    assert max(inference) < 200
    assert decay < 250
    assert training < 400


@pytest.mark.slow
def test_32768_tokens_peak_under_1500_megabytes():
    cases = (f"16 16 32768 32768 64 {form} infer" for form in ("slack", "strict"))
    assert peak_megabytes(*cases)[-1] < 1500
