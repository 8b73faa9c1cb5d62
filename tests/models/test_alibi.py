"""ALiBi as additional columns, compared with the bias matrix."""

import pytest
import torch

import oracle
from coca_attention.models import alibi
from coca_attention.ops import attend
from covering import covering


def test_slopes_of_a_power_of_two():
    assert alibi.slopes(8).tolist() == pytest.approx([2.0**-i for i in range(1, 9)])


def test_slopes_between_powers_of_two_take_every_other_of_the_finer_series():
    assert alibi.slopes(6).tolist() == pytest.approx(
        [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    )


@pytest.mark.parametrize(
    ("heads", "queries", "dtype"),
    covering([3, 8], [1, 40, 600], [torch.float64, torch.float32]),
    ids=str,
)
def test_columns_give_the_bias(heads, queries, dtype):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads, queries, 16, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 1, heads, 600, 16, generator=generator, dtype=torch.float64)
    distance = torch.arange(600 - queries, 600)[:, None] - torch.arange(600)
    scores = q @ k.mT * 0.25 - alibi.slopes(heads)[:, None, None] * distance
    expected = oracle.attention(scores, v, scale=1.0)
    augmented = alibi.augment(q.to(dtype), k.to(dtype), 0.25)
    ours = attend(*augmented, v.to(dtype), scale=0.25)
    assert (ours - expected).abs().max() <= (1e-12 if dtype == torch.float64 else 3e-5)


def test_bfloat16_distinguishes_all_distances():
    """Positions above 256 are not exact in bfloat16, so they are split into two columns."""
    q = torch.zeros(1, 4, 1, 16, dtype=torch.bfloat16)
    k = torch.zeros(1, 4, 5000, 16, dtype=torch.bfloat16)
    augmented_q, augmented_k = alibi.augment(q, k, 1.0)
    scores = (augmented_q.float() @ augmented_k.float().mT)[0, :, 0]
    steps = scores.diff(dim=-1)
    assert torch.equal(steps, alibi.slopes(4).float()[:, None].expand_as(steps))


def test_no_heads_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        alibi.slopes(0)
