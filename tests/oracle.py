"""The paper's equations as printed, in float64 and without regard to cost: the reference in tests.

Legend: B batch, T query length, S key length, H query heads, G key/value heads, D head width,
P = D/2 rotary pairs, m a query's position, n a key's.

Scores are those of a query (..., T, D) and key coefficients t (..., S, P), followed by the second
members of free pairs' keys, at positions (T,) and (S,), with angles per token theta (P,) and a pair
layout: (..., T, S), float64. Only for small inputs: some allocate T * S * D complex numbers.
"""

import torch
from torch import Tensor

from coca_attention.ops.forms import get_form


def _angles(positions: Tensor, width: int, theta: Tensor | None) -> Tensor:
    """n θ_j, by default with the paper's θ_j = 10000^(-2j/d): (..., P)."""
    if theta is None:
        theta = 10000.0 ** (-2 * torch.arange(width // 2, dtype=torch.float64) / width)
    return positions.double().unsqueeze(-1) * theta


def _complex_pairs(x: Tensor, interleaved: bool) -> Tensor:
    """(x_2j + i x_2j+1): (..., D) to complex (..., P), from either pair layout."""
    x = x.double()
    if not interleaved:
        half = x.shape[-1] // 2
        x = torch.stack((x[..., :half], x[..., half:]), dim=-1).flatten(-2)
    return torch.complex(x[..., 0::2].contiguous(), x[..., 1::2].contiguous())


def _rotate(pairs: Tensor, positions: Tensor, width: int, theta: Tensor | None) -> Tensor:
    """Equation (1), f(x, n): every complex pair times e^{i n θ_j}."""
    angles = _angles(positions, width, theta)
    return pairs * torch.polar(torch.ones_like(angles), angles)


def rope_scores(
    query: Tensor,
    key: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    theta: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Equation (2): rotary attention scores before scaling, of keys (..., S, D)."""
    q = _complex_pairs(query, interleaved).unsqueeze(-2)
    k = _complex_pairs(key, interleaved).unsqueeze(-3)
    distance = query_positions.unsqueeze(-1) - key_positions
    return _rotate(q * k.conj(), distance, query.shape[-1], theta).real.sum(-1)


def strict_scores(
    query: Tensor,
    key_coefficients: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    theta: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Equation (9): Re<f(q_m, m), f(q_m, n) * t_n>, with a key for every query and key position."""
    width = query.shape[-1]
    q = _complex_pairs(query, interleaved)
    rotated_query = _rotate(q, query_positions, width, theta).unsqueeze(-2)
    keys = _rotate(q.unsqueeze(-2), key_positions, width, theta)
    keys = keys * key_coefficients.double().unsqueeze(-3)
    return (rotated_query * keys.conj()).real.sum(-1)


def slack_scores(
    query: Tensor,
    key_coefficients: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    theta: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Equation (10): Re<f(q_m, m), q_m * f(t_n, n)>, with an elementwise product."""
    width = query.shape[-1]
    q = _complex_pairs(query, interleaved)
    t = key_coefficients.double()
    # (..., T, P, 2), (..., S, P, 2): the two real members of every pair.
    rotated_query = torch.view_as_real(_rotate(q, query_positions, width, theta))
    rotated_t = torch.view_as_real(_rotate(torch.complex(t, t), key_positions, width, theta))
    keys = torch.view_as_real(q).unsqueeze(-3) * rotated_t.unsqueeze(-4)
    return (rotated_query.unsqueeze(-3) * keys).sum((-1, -2))


def magnitude_scores(
    query: Tensor,
    key_coefficients: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    theta: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Not from the paper: Equation (9) with every pair of the query divided by √|q_j|."""
    q = _complex_pairs(query, interleaved)
    q = torch.where(q == 0, 0, q / q.abs().sqrt())
    return strict_scores(
        torch.view_as_real(q).flatten(-2),
        key_coefficients,
        query_positions,
        key_positions,
        theta=theta,
        interleaved=True,
    )


def partial_scores(
    form: str,
    query: Tensor,
    key_coefficients: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    rotary_width: int,
    theta: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Scores with partial rotary: those of the rotated elements, plus the others at position 0."""
    pairs = rotary_width // 2
    rotated = form_scores(
        form,
        query[..., :rotary_width],
        key_coefficients[..., :pairs],
        query_positions,
        key_positions,
        theta=theta,
        interleaved=interleaved,
    )
    unrotated = form_scores(
        form,
        query[..., rotary_width:],
        key_coefficients[..., pairs:],
        torch.zeros_like(query_positions),
        torch.zeros_like(key_positions),
    )
    return rotated + unrotated


SCORES = {"slack": slack_scores, "strict": strict_scores, "magnitude": magnitude_scores}


def form_scores(
    form: str,
    query: Tensor,
    key_coefficients: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    theta: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Scores by the printed equation of a form, or by a registered form's own map in float64."""
    if form in SCORES:
        arguments = (query, key_coefficients, query_positions, key_positions)
        return SCORES[form](*arguments, theta=theta, interleaved=interleaved)
    pairs = _complex_pairs(query, interleaved)
    m, n = (_angles(x, query.shape[-1], theta) for x in (query_positions, key_positions))
    own = get_form(form)
    learned = {}
    if own.parameters:
        learned = own.initial_parameters(query.shape[-3], query.shape[-1] // 2)
    learned = {name: x.double().unsqueeze(1) for name, x in learned.items()}
    queries = own.query(pairs.real, pairs.imag, m.cos(), m.sin(), **learned)
    keys = key_coefficients.double().unsqueeze(-2) * torch.stack((n.cos(), n.sin()), dim=-2)
    return queries.flatten(-2) @ keys.flatten(-2).transpose(-2, -1)


def attention(
    scores: Tensor,
    value: Tensor,
    *,
    scale: float,
    is_causal: bool = True,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(scale * scores + bias) V, float64; when T < S the queries are the last positions."""
    queries, keys = scores.shape[-2:]
    scores = scores.double() * scale
    if bias is not None:
        scores = scores + bias.double()
    if is_causal:
        visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ value.double()


def free_scores(
    form: str,
    query: Tensor,
    key_coefficients: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    theta: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Scores with the last F pairs free: Equation (2) for these, the form's for the others."""
    pairs = query.shape[-1] // 2
    free = key_coefficients.shape[-1] - pairs
    angles = _angles(torch.ones(()), 2 * pairs, theta)
    q = torch.view_as_real(_complex_pairs(query, interleaved))
    first, second = key_coefficients.double()[..., -2 * free :].chunk(2, dim=-1)
    key = torch.stack((first, second), dim=-1).flatten(-2)
    positions = (query_positions, key_positions)
    scores = rope_scores(
        q[..., -free:, :].flatten(-2), key, *positions, theta=angles[-free:], interleaved=True
    )
    if free == pairs:
        return scores
    return scores + form_scores(
        form,
        q[..., :-free, :].flatten(-2),
        key_coefficients[..., : pairs - free],
        *positions,
        theta=angles[:-free],
        interleaved=True,
    )


def coca_attention(
    query: Tensor,
    key_coefficients: Tensor,
    value: Tensor,
    *,
    form: str = "slack",
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    theta: Tensor | None = None,
    interleaved: bool = False,
    rotary_width: int | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    bias: Tensor | None = None,
    max_distance: int | None = None,
) -> Tensor:
    """`coca_attention.ops.coca_attention` from the printed equations, in float64.

    Arguments as there, except that positions have one dimension, and that a bias of the scores is
    given as a matrix (T, S). Returns (B, H, T, Dv), float64.
    """
    heads, queries, width = query.shape[-3:]
    kv_heads, keys = key_coefficients.shape[-3:-1]
    if key_positions is None:
        key_positions = torch.arange(keys)
    if query_positions is None:
        query_positions = key_positions[keys - queries :]
    t = key_coefficients.repeat_interleave(heads // kv_heads, dim=-3)
    v = value.repeat_interleave(heads // kv_heads, dim=-3)

    def scores_of(query: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        tensors = (query, t, query_positions, key_positions)
        if t.shape[-1] > width // 2:
            return free_scores(form, *tensors, theta=theta, interleaved=interleaved)
        if rotary_width is None or rotary_width == width:
            return form_scores(form, *tensors, theta=theta, interleaved=interleaved)
        return partial_scores(
            form, *tensors, rotary_width=rotary_width, theta=theta, interleaved=interleaved
        )

    if max_distance is None:
        scores = scores_of(query, query_positions, key_positions)
    else:
        # For every query the keys that are farther away move to the largest distance.
        rows = [
            scores_of(query[..., [row], :], m[None], torch.maximum(key_positions, m - max_distance))
            for row, m in enumerate(query_positions)
        ]
        scores = torch.cat(rows, dim=-2)
    factor = width**-0.5 if scale is None else scale
    return attention(scores, v, scale=factor, is_causal=is_causal, bias=bias)
