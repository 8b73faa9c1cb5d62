"""The map of Theorem 2 (CoCA paper, App. D.3) between scores of any and of equal-membered queries.

Legend: P rotary pairs, N keys, m a query's position, n a key's.

The scores are those of Eq. 26, a(m, n) = Σ_j t_nj |q_j|² cos((m - n) θ_j). The theorem's map takes
the scores of a query to those of the query with two equal members √(|q_j|²/2) in every pair. These
are the same numbers, so on scores the map is the identity. docs/analysis.md says what follows.
"""

import torch
from torch import Tensor


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
