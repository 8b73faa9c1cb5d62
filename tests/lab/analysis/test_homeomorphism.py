"""Theorem 2 (App. D.3): the map between scores of any and of equal-membered queries, both ways."""

import pytest
import torch
from torch import Tensor

from coca_attention.ops import Rotation, key_map, query_map
from coca_lab.analysis.angles import complex_pairs
from coca_lab.analysis.capture import LayerHeads
from coca_lab.analysis.shift import relative_parts

PAIRS, KEYS, POSITION = 4, 24, 30
ROTATION = Rotation(2 * PAIRS, 10000.0)


def random_queries(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, PAIRS, 2, generator=generator, dtype=torch.float64)


COEFFICIENTS = random_queries(KEYS, seed=1)[..., 0].abs()
DISTANCES = POSITION - torch.arange(KEYS)
RESPONSES = COEFFICIENTS * (DISTANCES.double().unsqueeze(-1) * ROTATION.frequencies()).cos()


def equal_members(query: Tensor) -> Tensor:
    """The query of Eq. 29, with equal, non-negative members in every pair, and the same scores.

    Args:
        query: Pairs as complex numbers, (..., P).

    Returns:
        (..., P), complex.
    """
    member = query.abs() / 2**0.5
    return torch.complex(member, member)


def query_of_scores(scores: Tensor, responses: Tensor) -> Tensor:
    """The query with equal, non-negative members that has these scores: the way back.

    Args:
        scores: Scores of Eq. 26 of one query against N keys, (..., N), float64.
        responses: t_nj cos((m - n) θ_j), the score of a query with |q_j| = 1, (N, P).

    Returns:
        (..., P), complex128.

    Raises:
        ValueError: If these keys do not determine the query: the rank of ``responses`` is below P.
    """
    pairs = responses.shape[-1]
    if int(torch.linalg.matrix_rank(responses)) < pairs:
        raise ValueError(
            f"the scores of these {len(responses)} keys do not determine a query of {pairs} pairs; "
            "give more keys, with other coefficients or distances"
        )
    squares = (torch.linalg.pinv(responses) @ scores.unsqueeze(-1)).squeeze(-1)
    # Round-off makes squares of 0 slightly negative.
    return equal_members(squares.clamp(min=0).sqrt().to(torch.complex128))


def scores(query: torch.Tensor, form: str = "strict") -> torch.Tensor:
    """Scores that the operator gives to queries (count, P), complex, against the keys."""
    wide = torch.view_as_real(query).flatten(-2).view(1, 1, -1, 2 * PAIRS)
    at, positions = torch.tensor([POSITION]), torch.arange(KEYS)
    query_tables = [x.expand(wide.shape[2], -1) for x in ROTATION.tables(at, torch.float64)]
    mapped = query_map(wide, *query_tables, form=form, interleaved=True)
    key = key_map(COEFFICIENTS[None, None], *ROTATION.tables(positions, torch.float64))
    return (mapped @ key.transpose(-2, -1))[0, 0]


def some_queries(count: int = 50) -> torch.Tensor:
    return torch.view_as_complex(random_queries(count))


def test_the_map_is_the_identity_on_scores():
    query = some_queries()
    equal = equal_members(query)
    assert torch.equal(equal.real, equal.imag)
    torch.testing.assert_close(scores(equal), scores(query), rtol=1e-12, atol=1e-12)


def test_the_way_back_inverts_it_from_both_sides():
    query = some_queries()
    found = query_of_scores(scores(query), RESPONSES)
    torch.testing.assert_close(found, equal_members(query), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(scores(found), scores(query), rtol=1e-10, atol=1e-10)
    equal = equal_members(some_queries(20) * 3)
    found = query_of_scores(scores(equal), RESPONSES)
    torch.testing.assert_close(found, equal, rtol=1e-10, atol=1e-10)


def test_zeros_and_sizes_of_many_orders():
    query = some_queries(4)
    query[0] = 0
    query[1, 2] = 0
    query[2] *= 1e6
    query[3] *= 1e-6
    found = query_of_scores(scores(query), RESPONSES)
    size = query.abs().amax(-1, keepdim=True)
    assert ((found - equal_members(query)).abs() <= 1e-6 * size).all()
    assert found[0].abs().max() == 0


def test_both_ways_are_continuous():
    query, step = some_queries(), torch.view_as_complex(random_queries(50, seed=2))
    for size in (1e-2, 1e-4, 1e-6):
        moved = query + size * step
        # Forward: 1-Lipschitz in every pair.
        change = (equal_members(moved) - equal_members(query)).abs()
        assert (change <= size * step.abs() * (1 + 1e-9)).all()
        # Back: at most the square root of the change of the scores, also next to 0.
        for start in (query, torch.zeros_like(query)):
            before, after = scores(start), scores(start + size * step)
            squares = (torch.linalg.pinv(RESPONSES) @ (after - before).T).T.abs()
            change = query_of_scores(after, RESPONSES) - query_of_scores(before, RESPONSES)
            assert (change.abs() <= squares.sqrt() * (1 + 1e-6) + 1e-7).all()
    # Nothing better holds at 0: scores that change by size² move the query by size.
    size = 1e-4
    moved = query_of_scores(scores(size * query), RESPONSES)
    assert (moved.abs() / size).allclose(query.abs())


def test_keys_that_do_not_determine_the_query_are_refused():
    with pytest.raises(ValueError, match="3 keys do not determine a query of 4 pairs"):
        query_of_scores(torch.zeros(3, dtype=torch.float64), RESPONSES[:3])
    with pytest.raises(ValueError, match="do not determine"):
        query_of_scores(torch.zeros(KEYS, dtype=torch.float64), RESPONSES * torch.eye(4)[0])


def test_queries_themselves_are_not_determined():
    query = some_queries()
    turned = query * torch.polar(torch.ones(PAIRS).double(), torch.arange(PAIRS).double())
    torch.testing.assert_close(scores(turned), scores(query))
    assert (turned - query).abs().max() > 1
    # Not every set of queries contains its equal-membered ones: then the theorem fails.
    axis = torch.tensor([[3.0, 0, 0, 0]], dtype=torch.complex128)
    assert not torch.isclose(axis.real, axis.imag).all()
    assert not torch.isclose(equal_members(axis), axis).all()


def layer(form: str, query: torch.Tensor) -> LayerHeads:
    wide = torch.view_as_real(query).flatten(-2)[None, None]
    key = COEFFICIENTS[None, None]
    return LayerHeads(0, form, wide, key, ROTATION, None, True, None, 1.0, None)


def test_the_slack_form_spans_a_larger_space():
    query = some_queries(20)
    assert (scores(equal_members(query), "slack") - scores(query, "slack")).abs().max() > 0.1
    # Its scores determine q² in every pair: two numbers, not one.
    relative, absolute = (x[0] for x in relative_parts(layer("slack", query), query[None]))
    plus, minus, product = 2 * relative.real, 2 * absolute.real, 2 * relative.imag
    total, difference = (plus + minus) / 2, product
    square = torch.complex(difference, plus - total)
    torch.testing.assert_close(square, query.square())


@pytest.mark.parametrize("form", ["slack", "strict", "magnitude"])
def test_a_score_is_its_relative_and_its_absolute_part(form):
    query = some_queries(7)
    heads = layer(form, query)
    assert torch.equal(complex_pairs(heads.query, 2 * PAIRS, True)[0, 0], query)
    relative, absolute = (x[0] for x in relative_parts(heads, query[None]))
    theta = ROTATION.frequencies()

    def waves(steps: torch.Tensor) -> torch.Tensor:
        angles = steps.double().unsqueeze(-1) * theta
        return torch.polar(torch.ones_like(angles), -angles)

    sums = POSITION + torch.arange(KEYS)
    parts = relative.unsqueeze(1) * waves(DISTANCES) + absolute.unsqueeze(1) * waves(sums)
    torch.testing.assert_close((parts * COEFFICIENTS).sum(-1).real, scores(query, form))
    if form == "slack":
        # It is relative where both members are equal, and wholly absolute where they are opposite.
        equal = equal_members(query)
        relative, absolute = relative_parts(layer(form, equal), equal[None])
        assert absolute.abs().max() < 1e-12 < relative.abs().min()
        opposite = torch.complex(equal.real, -equal.imag)
        relative, absolute = relative_parts(layer(form, opposite), opposite[None])
        assert relative.abs().max() < 1e-12 < absolute.abs().min()
    else:
        assert absolute.abs().max() < 1e-12
