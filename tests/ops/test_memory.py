"""Peak memory of a forward pass, measured in a process of its own."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from coca_attention.ops import coca_attention
heads, groups, queries, keys, value_width, form = (
    int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]),
    sys.argv[6])
warm = torch.randn(1, heads, 64, 64)
coca_attention(warm, torch.rand(1, groups, 64, 32), torch.rand(1, groups, 64, value_width))
q = torch.randn(1, heads, queries, 64)
t = torch.rand(1, groups, keys, 32)
v = torch.randn(1, groups, keys, value_width)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with torch.inference_mode():
    coca_attention(q, t, v, form=form)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def peak_megabytes(*arguments) -> float:
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
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


@pytest.mark.slow
@pytest.mark.parametrize("form", ["slack", "strict"])
def test_32768_tokens_peak_under_1500_megabytes(form):
    assert peak_megabytes(16, 16, 32768, 32768, 64, form) < 1500
