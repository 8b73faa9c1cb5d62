"""Angles, anomalous tokens, borders and bounds on vectors whose answer is known."""

import cmath
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coca_attention.ops import Rotation
from coca_lab.analysis.angles import (
    TURN,
    SeenKeys,
    angle_sums,
    angle_values,
    anomalous_share,
    anomalous_tokens,
    borders_crossed,
    bound_check,
    collinear_bound,
    complex_pairs,
    decay_sums,
    decay_values,
    initial_angles,
    numbers,
    rotary_bound,
    rotary_scores,
    signed_angles,
    steps,
)
from coca_lab.analysis.task import _added


@pytest.mark.parametrize("window", [None, 1, 2, 7, 100])
@pytest.mark.parametrize("length", [2, 3, 12, 40])
def test_anomalous_tokens_and_share_match_a_count(length, window):
    for tau in (0.0, 0.5, 1.0, 1.5, 3.0, 6.2, 11.0, 39.5, 1e9):
        pairs = [m - n for m in range(length) for n in range(m) if window is None or m - n < window]
        last = [d for d in range(1, length) if (window is None or d < window) and d < tau]
        tokens = anomalous_tokens(torch.tensor(tau, dtype=torch.float64), length, window)
        assert tokens.item() == len(last)
        if pairs:
            counted = sum(d < tau for d in pairs) / len(pairs)
            share = anomalous_share(tokens, length, window)
            assert share.item() == pytest.approx(counted, abs=1e-12)


@given(
    angle=st.floats(0.01, 6.27).filter(lambda x: abs(x - math.pi) > 0.01),
    theta=st.sampled_from([1.0, 0.31, 0.07, 0.004]),
    distance=st.integers(0, 300),
)
def test_borders_are_the_reversals_of_the_score(angle, theta, distance):
    angles = torch.tensor([angle], dtype=torch.float64)
    found = borders_crossed(angles, torch.tensor([theta], dtype=torch.float64), distance)
    turned = angle + torch.linspace(0, distance, 40_001, dtype=torch.float64) * theta
    rising = -turned.sin() > 0
    changes = rising[1:] != rising[:-1]
    # At the very end the grid and the formula may differ by round-off.
    if (turned[-1].remainder(math.pi) - math.pi / 2).abs() > math.pi / 2 - 1e-6:
        return
    assert found.peaks.item() == (changes & rising[:-1]).sum()
    assert found.troughs.item() == (changes & ~rising[:-1]).sum()
    assert found.returns.item() == math.floor(distance * theta / TURN)


def polar(sizes, angles) -> torch.Tensor:
    """Complex numbers (1, N, P) from rows of sizes and angles."""
    size, angle = (torch.tensor([rows], dtype=torch.float64) for rows in (sizes, angles))
    return torch.polar(size, angle)


def test_angles_are_counted_pair_by_pair():
    theta = torch.tensor([1.0, 0.5], dtype=torch.float64)
    key = torch.ones(2, 3, 2, dtype=torch.complex128)
    first = polar([[2, 1], [1, 1], [1, 0]], [[0.1, 6.0], [4.0, 2.0], [4.0, 1.0]])
    second = polar([[1, 1], [1, 1], [1, 1]], [[0.1, 0.1], [0.1, 0.1], [0.1, 0.1]])
    query = torch.cat((first, second))
    # A text without pairs changes nothing.
    nothing = angle_sums(query[:, :0], key[:, :0], theta, [4], None, bins=4)
    sums = angle_sums(query, key, theta, [4], None, bins=4)
    every = [{n: torch.as_tensor(x) for n, x in each.items()} for each in (nothing, sums)]
    found = angle_values({n: every[0][n] + every[1][n] for n in sums}, theta, [4], None)
    assert found["samples"] == 6 and found["zero_share"] == pytest.approx([0, 1 / 6])
    assert found["case_d"] == pytest.approx([2 / 6, 1 / 5])
    assert found["cases"] == pytest.approx({"a": 0, "b": 8 / 11, "c": 0, "d": 3 / 11})
    assert found["histogram"] == [
        pytest.approx([4 / 6, 0, 2 / 6, 0]),
        pytest.approx([3 / 5, 1 / 5, 0, 1 / 5]),
    ]
    tau = [2 * math.pi - 4, (2 * math.pi - 6) / 0.5]
    assert found["tau"] == pytest.approx(tau)
    assert found["lengths"][0]["anomalous_tokens"] == pytest.approx([2 * 2 / 6, 0])
    # Distances 1 and 2 of a text of 4 tokens are 5 of its 6 pairs.
    assert found["lengths"][0]["anomalous_share"] == pytest.approx([2 / 6 * 5 / 6, 0])


FLOATS = st.floats(-100, 100, allow_subnormal=False)


@st.composite
def coefficients(draw):
    """h_j of some pairs of tokens, (N, P), and their distances (N,)."""
    pairs, rows = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    values = draw(st.lists(FLOATS, min_size=2 * rows * pairs, max_size=2 * rows * pairs))
    real, imaginary = torch.tensor(values).double().view(2, rows, pairs)
    distances = draw(st.lists(st.integers(1, 100_000), min_size=rows, max_size=rows))
    return torch.complex(real, imaginary), torch.tensor(distances)


def printed(h: list[complex], distance: int, theta: list[float], collinear: bool) -> float:
    """Right side of Eq. 19 (or 20) as a loop, with h zero after the last pair."""
    step = max(abs(b - a) for a, b in zip(h, [*h[1:], 0], strict=True))
    total = 0.0
    for j in range(len(h)):
        turned = sum(cmath.exp(1j * distance * theta[k]) for k in range(j + 1))
        total += abs(turned.real if collinear else turned)
    return step * total


@given(coefficients())
def test_the_inequalities_hold_and_the_bounds_match_the_printed_ones(drawn):
    h, distances = drawn
    theta = Rotation(2 * h.shape[-1]).frequencies()
    size = h.abs().sum(-1)
    rotary = rotary_bound(h, distances, theta)
    collinear = collinear_bound(h.abs(), distances, theta)
    assert (collinear <= rotary * (1 + 1e-9) + 1e-9).all()  # never looser
    checks = [
        bound_check(rotary_scores(h, distances, theta).abs(), rotary, size),
        bound_check(rotary_scores(h.abs(), distances, theta).abs(), collinear, size),
        bound_check(steps(h.abs()), steps(h), size.unsqueeze(-1)),
    ]
    assert [check["violations"] for check in checks] == [0, 0, 0]
    assert [check["checked"] for check in checks] == [len(h), len(h), h.numel()]
    assert all((check["largest_ratio"] or 0) <= 1 + 1e-9 for check in checks)
    for row, distance in enumerate(distances.tolist()):
        values, angles = h[row].tolist(), theta.tolist()
        expected = printed(values, distance, angles, collinear=False)
        assert rotary[row].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
        expected = printed([abs(x) for x in values], distance, angles, collinear=True)
        assert collinear[row].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_check_counts_violations_beyond_round_off():
    left = torch.tensor([1.0, 2.0, 3.0 + 1e-12, 0.0]).double()
    right = torch.tensor([2.0, 1.0, 3.0, 0.0]).double()
    first, nothing = (bound_check(left[i], right[i], torch.ones(1)) for i in (..., slice(0)))
    assert first == {"checked": 4, "violations": 1, "largest_ratio": 2.0}
    assert nothing["largest_ratio"] is None
    assert _added("eq19", [first, nothing, first]) == first | {"checked": 8, "violations": 2}


def test_scores_by_distance_are_relative_to_their_maximum():
    """Scores and Eq. 19 use the effective key, h; Eq. 20 the collinear one, l."""
    theta = torch.tensor([1.0, 0.1], dtype=torch.float64)
    query = polar([[3, 1], [2, 2], [0, 0]], [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]])
    effective = polar([[1, 1], [1, 0.1], [1, 1]], [[0, 0], [0, 0.5], [0, 0]])
    built = torch.tensor([1, 0.5], dtype=torch.complex128).expand_as(query)
    seen = SeenKeys(query, built, effective)
    values = decay_values(decay_sums(seen, torch.tensor([1, 4, 4]), theta))
    near, far = values["by_distance"]
    assert (near["distance"], far["distance"]) == (1, 4)
    assert near["score"] == pytest.approx(abs(3 * math.cos(2.0) + math.cos(2.1)) / 4)
    # The key without size is left out. h is 2 and 0.2 at an angle of -0.5, l is 2 and 1.
    score = 2 * math.cos(4) + 0.2 * math.cos(0.4 - 0.5)
    assert far["score"] == pytest.approx(abs(score) / 2.2)
    c = abs(math.cos(4)) + abs(math.cos(4) + math.cos(0.4))
    assert far["eq20"] == pytest.approx(c / 2.2)
    assert values["eq19"]["checked"] == 3
    # Nearer to its bound than at distance 1.
    ratio = abs(2 * math.cos(4) + math.cos(0.4)) / c
    assert values["eq20"]["largest_ratio"] == pytest.approx(ratio)
    # At other angles it does not bound the scores.
    assert values["score_against_eq20"]["violations"] == 1
    assert values["score_against_eq20"]["largest_ratio"] == pytest.approx(abs(score) / c)


def test_numbers_that_json_does_not_support_are_none():
    assert numbers(torch.tensor([1, math.nan, math.inf])) == [1.0, None, None]


def test_round_off_does_not_make_a_collinear_key_a_full_turn():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(10_000, 2, generator=generator, dtype=torch.float64)
    key = query * torch.rand(10_000, 1, generator=generator, dtype=torch.float64)
    q, k = complex_pairs(query, 2), complex_pairs(key, 2)
    assert (signed_angles(q, k) < 0).any()  # round-off there is
    assert not initial_angles(q, k).any()
    almost = torch.polar(*torch.tensor([1.0, TURN - 1e-6], dtype=torch.float64))
    found = initial_angles(almost, torch.ones_like(almost))
    assert found.item() == pytest.approx(TURN - 1e-6, abs=1e-12)
