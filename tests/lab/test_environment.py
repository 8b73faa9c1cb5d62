"""What is measured of the process."""

import sys

import pytest
import torch

from coca_lab.environment import peak_growth


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell the memory")
def test_memory_that_was_used_before_counts_again():
    def work():
        return [torch.ones(8_000) for _ in range(2_000)] and None  # 64 MB in pieces of 32 kB

    first, second = peak_growth(work), peak_growth(work)
    assert 60 < second < 80 and second > 0.8 * first
