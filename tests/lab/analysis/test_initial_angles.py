"""Angles, cases, anomalous tokens and borders on vectors whose answer is known."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from coca_attention.ops import Rotation
from coca_attention.ops.positions import join_pairs
from coca_lab.analysis.angles import (
    CASES,
    TURN,
    anomalous_distance,
    anomalous_share,
    anomalous_tokens,
    borders_crossed,
    complex_pairs,
    farthest_key,
    figure_3_cases,
    initial_angles,
    signed_angles,
)

DEGREES = [0, 30, 90, 135, 180, 181, 225, 270, 315, 359]


def head_of(angles: torch.Tensor, lengths: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """A head whose pairs point at these angles: (..., P) to (..., D)."""
    return join_pairs(lengths * angles.cos(), lengths * angles.sin(), interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("key_degrees", [0, 100, 200, 300])
def test_angles_of_known_vectors_in_every_quadrant(interleaved, key_degrees):
    wanted = torch.tensor(DEGREES, dtype=torch.float64).deg2rad()
    begin = torch.full_like(wanted, math.radians(key_degrees))
    lengths = torch.arange(1, len(DEGREES) + 1, dtype=torch.float64)
    query = head_of(begin + wanted, lengths, interleaved)
    key = head_of(begin, 1 / lengths, interleaved)
    width = query.shape[-1]
    q, k = (complex_pairs(x, width, interleaved) for x in (query, key))
    torch.testing.assert_close(initial_angles(q, k), wanted, atol=1e-12, rtol=0)
    # Counterclockwise from key to query; the other way round it is 2π minus this angle.
    torch.testing.assert_close(
        initial_angles(k, q), torch.remainder(-wanted, TURN), atol=1e-12, rtol=0
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_give_the_scores_of_the_oracle(interleaved):
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    queries, keys = torch.arange(20, 25), torch.arange(5)
    q, k = (complex_pairs(x, 8, interleaved) for x in (query, key))
    q, k = q.unsqueeze(1), k.unsqueeze(0)
    angles = initial_angles(q, k)
    distance = (queries.unsqueeze(1) - keys).unsqueeze(-1)
    # Equation (3).
    scores = (q.abs() * k.abs() * (angles + distance * Rotation(8).frequencies()).cos()).sum(-1)
    expected = oracle.rope_scores(query, key, queries, keys, interleaved=interleaved)
    torch.testing.assert_close(scores, expected)


def test_elements_that_are_not_rotated_have_no_angle():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0, 9.0])
    assert complex_pairs(x, 4).tolist() == [1 + 3j, 2 + 4j]
    assert complex_pairs(x, 4, interleaved=True).tolist() == [1 + 2j, 3 + 4j]


def test_round_off_does_not_make_a_collinear_key_a_full_turn():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(10_000, 2, generator=generator, dtype=torch.float64)
    q = complex_pairs(query, 2)
    key = query * torch.rand(10_000, 1, generator=generator, dtype=torch.float64)
    k = complex_pairs(key, 2)
    assert (signed_angles(q, k) < 0).any()  # round-off there is
    assert not initial_angles(q, k).any()
    almost = torch.polar(*torch.tensor([1.0, TURN - 1e-6], dtype=torch.float64))
    found = initial_angles(almost, torch.ones_like(almost))
    assert found.item() == pytest.approx(TURN - 1e-6, abs=1e-12)


def test_the_four_cases_of_figure_3():
    angles = torch.tensor([[1.0, math.pi, 4.0]], dtype=torch.float64)
    assert [CASES[i] for i in figure_3_cases(angles, torch.tensor([5]))[0]] == ["b", "b", "d"]
    assert [CASES[i] for i in figure_3_cases(angles, torch.tensor([-5]))[0]] == ["a", "a", "c"]
    with pytest.raises(ValueError, match="zero"):
        figure_3_cases(angles, torch.tensor([0]))


def test_cases_determine_the_direction_of_the_score():
    # b and c fall with the distance, a and d rise.
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(200, 1, generator=generator, dtype=torch.float64) * TURN
    for sign in (1, -1):
        cases = figure_3_cases(angles, torch.full((200,), sign))[:, 0]
        moved = (angles + sign * 1e-6).cos() - angles.cos()
        rises = torch.tensor([CASES[i] in "ad" for i in cases])
        assert torch.equal(rises, moved[:, 0] > 0)


def test_anomalous_distance_is_where_the_score_stops_rising():
    theta = Rotation(16).frequencies()
    angles = torch.linspace(0, TURN - 1e-3, 50, dtype=torch.float64).unsqueeze(-1)
    tau = anomalous_distance(angles, theta)
    assert not tau[angles[:, 0] <= math.pi].any()
    above = angles[:, 0] > math.pi
    torch.testing.assert_close(tau[above], ((TURN - angles) / theta)[above])

    def slope(distance):
        return -(angles + distance * theta).sin()[above]

    assert (slope(tau * 0.999) > 0).all() and (slope(tau * 1.001) < 0).all()
    assert (slope(tau * 0.001) > 0).all()


def test_the_score_of_a_pair_that_does_not_turn_never_rises():
    tau = anomalous_distance(torch.tensor([4.0, 4.0]), torch.tensor([1.0, 0.0]))
    assert tau.tolist() == pytest.approx([TURN - 4.0, 0.0])


@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_scaling_widens_the_zone_as_in_the_paper(factor):
    # Appendix D.2: k times under PI, λ^(2j/d) times where the base is multiplied by λ.
    angles = torch.full((8,), 5.0, dtype=torch.float64)
    theta = Rotation(16).frequencies()
    plain = anomalous_distance(angles, theta)
    torch.testing.assert_close(anomalous_distance(angles, theta / factor), plain * factor)
    j = torch.arange(8, dtype=torch.float64)
    torch.testing.assert_close(
        anomalous_distance(angles, Rotation(16, base=10000.0 * factor).frequencies()),
        plain * factor ** (2 * j / 16),
    )


@pytest.mark.parametrize("window", [None, 1, 2, 7, 100])
@pytest.mark.parametrize("length", [2, 3, 12, 40])
def test_anomalous_tokens_and_share_match_a_count(length, window):
    for tau in (0.0, 0.5, 1.0, 1.5, 3.0, 6.2, 11.0, 39.5, 1e9):
        pairs = [m - n for m in range(length) for n in range(m) if window is None or m - n < window]
        counted = sum(d < tau for d in pairs)
        last = [d for d in range(1, length) if (window is None or d < window) and d < tau]
        tokens = anomalous_tokens(torch.tensor(tau, dtype=torch.float64), length, window)
        assert tokens.item() == len(last)
        if pairs:
            share = anomalous_share(tokens, length, window)
            assert share.item() == pytest.approx(counted / len(pairs), abs=1e-12)


def test_farthest_key_stays_inside_the_text_and_the_window():
    assert [farthest_key(10), farthest_key(10, 4), farthest_key(3, 4)] == [9, 3, 2]


@given(
    angle=st.floats(0.01, 6.27).filter(lambda x: abs(x - math.pi) > 0.01),
    theta=st.sampled_from([1.0, 0.31, 0.07, 0.004]),
    distance=st.integers(0, 300),
)
def test_borders_are_the_reversals_of_the_score(angle, theta, distance):
    angles = torch.tensor([angle], dtype=torch.float64)
    found = borders_crossed(angles, torch.tensor([theta], dtype=torch.float64), distance)
    fine = torch.linspace(0, distance, 40_001, dtype=torch.float64)
    turned = angle + fine * theta
    rising = -turned.sin() > 0
    changes = rising[1:] != rising[:-1]
    # At the very end the grid and the formula may differ by round-off.
    if (turned[-1].remainder(math.pi) - math.pi / 2).abs() > math.pi / 2 - 1e-6:
        return
    assert found.peaks.item() == (changes & rising[:-1]).sum()
    assert found.troughs.item() == (changes & ~rising[:-1]).sum()
    assert found.returns.item() == math.floor(distance * theta / TURN)


def test_a_collinear_key_meets_borders_at_the_same_distances_everywhere():
    theta = Rotation(8).frequencies()
    found = borders_crossed(torch.zeros(3, 4, dtype=torch.float64), theta, 1000)
    assert torch.equal(found.peaks + found.troughs, (1000 * theta / math.pi).floor().expand(3, 4))
    assert torch.equal(found.peaks, found.returns)
    assert not any(part.any() for part in borders_crossed(torch.zeros(4).double(), theta, 0))
