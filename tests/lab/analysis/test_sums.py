"""Statistics accumulated over texts, on examples small enough to count by hand."""

import math

import pytest
import torch

from coca_lab.analysis.keys import SeenKeys
from coca_lab.analysis.shift import ScoreShift, visible_keys
from coca_lab.analysis.summary import AngleSums, DecaySums, numbers


def polar(sizes, angles) -> torch.Tensor:
    """Complex numbers (1, N, P) from rows of sizes and angles."""
    size, angle = (torch.tensor([rows], dtype=torch.float64) for rows in (sizes, angles))
    return torch.polar(size, angle)


def test_visible_keys_are_causal_and_inside_the_window():
    assert visible_keys(torch.tensor([0, 2]), 4).tolist() == [
        [True, False, False, False],
        [True, True, True, False],
    ]
    assert visible_keys(torch.tensor([3]), 4, 2).tolist() == [[False, False, True, True]]


def test_a_shift_ignores_what_softmax_ignores():
    before = torch.tensor([[[0.0, 2.0, 50.0]]], dtype=torch.float64)
    visible = torch.tensor([[True, True, False]])
    change = ScoreShift()
    # The same added to all that a query sees, and anything to what it does not see.
    after = before + torch.tensor([7.0, 7.0, -90.0])
    change.add(before, after, visible)
    assert change.score_change == change.attention_change == 0
    # Exchanged: the change has twice the spread, the attention moves by a difference of weights.
    change.add(before, before[..., [1, 0, 2]], visible)
    weight = 1 / (1 + math.exp(-2.0))
    assert change.score_change == pytest.approx(math.sqrt((0 + 4) / (1 + 1)))
    assert change.attention_change == pytest.approx((0 + weight - (1 - weight)) / 2)
    assert ScoreShift().score_change is ScoreShift().attention_change is None


def test_angles_are_counted_pair_by_pair_and_head_by_head():
    theta = torch.tensor([1.0, 0.5], dtype=torch.float64)
    sums = AngleSums(theta, [4], None, bins=4)
    key = torch.ones(2, 3, 2, dtype=torch.complex128)
    first = polar([[2, 1], [1, 1], [1, 0]], [[0.1, 6.0], [4.0, 2.0], [4.0, 1.0]])
    second = polar([[1, 1], [1, 1], [1, 1]], [[0.1, 0.1], [0.1, 0.1], [0.1, 0.1]])
    sums.add(torch.cat((first, second)), key, torch.tensor([1, 1, 3]))
    found = sums.values()
    assert found["samples"] == 6 and found["zero_share"] == pytest.approx([0, 1 / 6])
    assert found["case_d"] == pytest.approx([2 / 6, 1 / 5])
    assert found["cases"]["d"] == pytest.approx(3 / 11)
    assert found["case_d_by_head"] == pytest.approx([3 / 5, 0])
    assert found["case_d_weight"] == pytest.approx(3 / 12)
    assert found["histogram"] == [
        pytest.approx([4 / 6, 0, 2 / 6, 0]),
        pytest.approx([3 / 5, 1 / 5, 0, 1 / 5]),
    ]
    # τ is 2.28 of the first pair's, 0.57 of the second's: one of its keys at distance 1 is nearer.
    tau = [2 * math.pi - 4, (2 * math.pi - 6) / 0.5]
    assert found["tau"] == pytest.approx(tau)
    assert found["anomalous_share_read"] == pytest.approx([1 / 6, 0])
    assert found["lengths"][0]["anomalous_tokens"] == pytest.approx([2 * 2 / 6, 0])
    # Distances 1 and 2 of a text of 4 tokens are 5 of its 6 pairs.
    assert found["lengths"][0]["anomalous_share"] == pytest.approx([2 / 6 * 5 / 6, 0])
    mean = torch.polar(torch.ones(6).double(), torch.tensor([0.1, 4, 4, 0.1, 0.1, 0.1]).double())
    assert found["concentration"][0] == pytest.approx(mean.mean().abs().item())
    assert found["mean"][0] == pytest.approx(mean.mean().angle().item() % (2 * math.pi))


def test_scores_by_distance_are_relative_to_their_maximum():
    theta = torch.tensor([1.0, 0.1], dtype=torch.float64)
    query = polar([[3, 1], [2, 2], [0, 0]], [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]])
    key = torch.ones_like(query)
    sums = DecaySums(theta)
    sums.add(SeenKeys(query, key, key), torch.tensor([1, 4, 4]))
    near, far = sums.values()["by_distance"]
    assert (near["distance"], far["distance"]) == (1, 4)
    score = 3 * math.cos(2.0) + math.cos(2.1)
    assert near["score"] == pytest.approx(abs(score) / 4)
    # The key without size is left out.
    assert far["score"] == pytest.approx(abs(2 * math.cos(4) + 2 * math.cos(0.4)) / 4)
    c = abs(math.cos(4)) + abs(math.cos(4) + math.cos(0.4))
    assert far["eq20"] == pytest.approx(2 * c / 4)
    assert sums.values()["eq19"]["checked"] == 3


def test_scores_use_the_effective_key_and_eq_20_the_collinear_one():
    theta = torch.tensor([1.0, 0.1], dtype=torch.float64)
    query = polar([[1, 2]], [[0.3, 0.4]])
    built, effective = query * 0.5, query * torch.tensor([2.0, 0.1j])
    sums = DecaySums(theta)
    sums.add(SeenKeys(query, built, effective), torch.tensor([3]))
    row = sums.values()["by_distance"][0]
    # h is 2 and -0.4i of size 2.4; l is 0.5 and 2.
    assert row["score"] == pytest.approx(abs(2 * math.cos(3) + 0.4 * math.sin(0.3)) / 2.4)
    c = abs(math.cos(3)) + abs(math.cos(3) + math.cos(0.3))
    assert row["eq20"] == pytest.approx(2 * c / 2.4)
    assert sums.values()["eq20"]["largest_ratio"] == pytest.approx(
        abs(0.5 * math.cos(3) + 2 * math.cos(0.3)) / (2 * c)
    )


def test_numbers_that_json_does_not_support_are_none():
    assert numbers([1, math.nan, math.inf, None]) == [1.0, None, None, None]
