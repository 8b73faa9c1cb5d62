"""Equations 19 to 21: the bounds as printed, and that they hold."""

import cmath

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from coca_attention.ops import Rotation
from coca_lab.analysis.decay import (
    BoundCheck,
    collinear_bound,
    rotary_bound,
    rotary_scores,
    steps,
)

numbers = st.floats(-100, 100, allow_subnormal=False)


@st.composite
def coefficients(draw):
    """h_j of some pairs of tokens, (N, P), and their distances (N,)."""
    pairs = draw(st.integers(1, 6))
    rows = draw(st.integers(1, 3))
    values = draw(st.lists(numbers, min_size=2 * rows * pairs, max_size=2 * rows * pairs))
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
    checks = [BoundCheck() for _ in range(3)]
    rotary = rotary_bound(h, distances, theta)
    collinear = collinear_bound(h.abs(), distances, theta)
    checks[0].add(rotary_scores(h, distances, theta).abs(), rotary, size)
    checks[1].add(rotary_scores(h.abs(), distances, theta).abs(), collinear, size)
    checks[2].add(steps(h.abs()), steps(h), size.unsqueeze(-1))
    assert [check.violations for check in checks] == [0, 0, 0]
    assert [check.checked for check in checks] == [len(h), len(h), h.numel()]
    assert all(check.largest_ratio is None or check.largest_ratio <= 1 + 1e-9 for check in checks)
    for row, distance in enumerate(distances.tolist()):
        values = h[row].tolist()
        expected = printed(values, distance, theta.tolist(), collinear=False)
        assert rotary[row].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
        sizes: list[complex] = [abs(x) for x in values]
        expected = printed(sizes, distance, theta.tolist(), collinear=True)
        assert collinear[row].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(coefficients())
def test_the_collinear_bound_is_never_looser(drawn):
    h, distances = drawn
    theta = Rotation(2 * h.shape[-1]).frequencies()
    wide = rotary_bound(h, distances, theta)
    assert (collinear_bound(h.abs(), distances, theta) <= wide * (1 + 1e-9) + 1e-9).all()


def test_scores_match_the_oracle():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 8, generator=generator, dtype=torch.float64)
    q, k = (torch.complex(x[..., :4], x[..., 4:]) for x in (query, key))
    positions = torch.tensor([37]), torch.tensor([5])
    expected = oracle.rope_scores(query, key, *positions)
    found = rotary_scores(q * k.conj(), torch.tensor([32]), Rotation(8).frequencies())
    torch.testing.assert_close(found, expected[0])


def test_the_bound_needs_the_zero_after_the_last_pair():
    h, distance, theta = torch.ones(1, 4).double(), torch.tensor([1]), Rotation(8).frequencies()
    assert rotary_scores(h, distance, theta).item() > 1
    assert not h.diff(dim=-1).any()  # the steps between pairs alone
    assert rotary_bound(h, distance, theta).item() >= rotary_scores(h, distance, theta).item()


def test_the_collinear_bound_does_not_hold_for_other_angles():
    # With sin instead of cos, scores do not vanish where the sums of cosines do.
    theta = torch.tensor([1.0]).double()
    distance = torch.tensor([11])  # 11 radians are near 3.5 π
    h = torch.tensor([[1j]])
    check = BoundCheck()
    score = rotary_scores(h, distance, theta).abs()
    check.add(score, collinear_bound(h.abs(), distance, theta), h.abs().sum(-1))
    assert check.violations == 1 and check.largest_ratio is not None and check.largest_ratio > 100


def test_a_check_counts_violations_beyond_round_off():
    check = BoundCheck()
    left = torch.tensor([1.0, 2.0, 3.0 + 1e-12, 0.0]).double()
    right = torch.tensor([2.0, 1.0, 3.0, 0.0]).double()
    check.add(left, right, torch.ones(4).double())
    assert (check.checked, check.violations, check.largest_ratio) == (4, 1, 2.0)
    check.add(left[:1], right[:1], torch.ones(1).double())
    assert (check.checked, check.violations, check.largest_ratio) == (5, 1, 2.0)
