"""Theorem 2 (App. D.3): the map between scores of any and of equal-membered queries, both ways."""

import torch
from torch import Tensor

from coca_attention.ops import Rotation, key_map, query_map
from studies.angles.layers import Layer, relative_parts

PAIRS, KEYS, POSITION = 4, 24, 30
ROTATION = Rotation(2 * PAIRS, 10000.0)


def random_pairs(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, PAIRS, 2, generator=generator, dtype=torch.float64)


QUERIES = torch.view_as_complex(random_pairs(50, 0))
COEFFICIENTS = random_pairs(KEYS, 1)[..., 0].abs()
DISTANCES = POSITION - torch.arange(KEYS)
# t_nj cos((m - n) θ_j), the score of a query with |q_j| = 1, (N, P), of rank P: otherwise these
# keys would not determine the query.
RESPONSES = COEFFICIENTS * (DISTANCES.double().unsqueeze(-1) * ROTATION.frequencies()).cos()


def equal_members(query: Tensor) -> Tensor:
    """The query of Eq. 29, (..., P), complex: equal, non-negative members and the same scores."""
    member = query.abs() / 2**0.5
    return torch.complex(member, member)


def query_of_scores(scores: Tensor) -> Tensor:
    """The query with equal, non-negative members that has these scores (..., N): the way back."""
    squares = (torch.linalg.pinv(RESPONSES) @ scores.unsqueeze(-1)).squeeze(-1)
    # Round-off makes squares of 0 slightly negative.
    return equal_members(squares.clamp(min=0).sqrt().to(torch.complex128))


def scores(query: Tensor, form: str = "strict") -> Tensor:
    """Scores that the operator gives to queries (count, P), complex, against the keys."""
    wide = torch.view_as_real(query).flatten(-2).view(1, 1, -1, 2 * PAIRS)
    at, positions = torch.tensor([POSITION]), torch.arange(KEYS)
    query_tables = [x.expand(wide.shape[2], -1) for x in ROTATION.tables(at, torch.float64)]
    mapped = query_map(wide, *query_tables, form=form, interleaved=True)
    key = key_map(COEFFICIENTS[None, None], *ROTATION.tables(positions, torch.float64))
    return (mapped @ key.transpose(-2, -1))[0, 0]


def parts(form: str, query: Tensor) -> list[Tensor]:
    wide = torch.view_as_real(query).flatten(-2)[None, None]
    key = COEFFICIENTS[None, None]
    layer = Layer(0, form, wide, key, ROTATION, None, True, None, 1.0)
    return [part[0] for part in relative_parts(layer, query[None])]


def test_the_map_is_the_identity_on_scores_and_continuous_both_ways():
    equal = equal_members(QUERIES)
    torch.testing.assert_close(scores(equal), scores(QUERIES), rtol=1e-12, atol=1e-12)
    for wanted in (equal, 3 * equal[:20]):
        found = query_of_scores(scores(wanted))
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    # Back: at most the square root of the change of the scores, also next to 0.
    step = torch.view_as_complex(random_pairs(50, 2))
    for start in (QUERIES, torch.zeros_like(QUERIES)):
        before, after = scores(start), scores(start + 1e-4 * step)
        squares = (torch.linalg.pinv(RESPONSES) @ (after - before).T).T.abs()
        change = query_of_scores(after) - query_of_scores(before)
        assert (change.abs() <= squares.sqrt() * (1 + 1e-6) + 1e-7).all()


def test_the_slack_form_spans_a_larger_space():
    assert (scores(equal_members(QUERIES), "slack") - scores(QUERIES, "slack")).abs().max() > 0.1
    # Its scores determine q² in every pair: two numbers, not one.
    relative, absolute = parts("slack", QUERIES)
    square = torch.complex(2 * relative.imag, relative.real - absolute.real)
    torch.testing.assert_close(square, QUERIES.square())
    # It is relative where both members are equal, and wholly absolute where they are opposite.
    relative, absolute = parts("slack", equal_members(QUERIES))
    assert absolute.abs().max() < 1e-12 < relative.abs().min()
    relative, absolute = parts("slack", equal_members(QUERIES).conj().resolve_conj())
    assert relative.abs().max() < 1e-12 < absolute.abs().min()
    for form in ("strict", "magnitude"):
        assert parts(form, QUERIES)[1].abs().max() < 1e-12
