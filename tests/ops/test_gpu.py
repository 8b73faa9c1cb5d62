"""The operator on a CUDA device: `pytest -m gpu`."""

import pytest
import torch

from coca_attention.ops import FORMS, coca_attention, oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def inputs(dtype: torch.dtype, length: int, heads: int = 4, groups: int = 2):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads, length, 64, generator=generator)
    t = torch.randn(1, groups, length, 32, generator=generator).relu()
    v = torch.randn(1, groups, length, 64, generator=generator)
    return [x.to("cuda", dtype) for x in (q, t, v)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 5e-2)], ids=str
)
def test_agrees_with_the_oracle(form, dtype, tolerance):
    q, t, v = inputs(dtype, 257)
    expected = oracle.coca_attention(q.cpu(), t.cpu(), v.cpu(), form=form)
    output = coca_attention(q, t, v, form=form).cpu().double()
    assert (output - expected).abs().max() <= tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_grouped_heads_hold_no_score_matrix(dtype, masked):
    """At 16,384 tokens the scores of 4 heads would take 2 or 4 GB."""
    q, t, v = inputs(dtype, 16384)
    mask = torch.ones(1, 1, 1, 16384, dtype=torch.bool, device="cuda") if masked else None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.inference_mode():
        coca_attention(q, t, v, attention_mask=mask)
    assert torch.cuda.max_memory_allocated() - before < 400e6
