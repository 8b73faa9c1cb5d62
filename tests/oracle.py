"""The paper's equations as printed, in float64 and without regard to cost: the reference in tests.

Legend: B batch, T query length, S key length, H query heads, G key/value heads, D head width,
P = D/2 rotary pairs, m a query's position, n a key's.

Scores are those of the complex pairs q (..., T, P) of queries and key coefficients t (..., S, P) at
positions m (T,) and n (S,), with angles per token theta (P,): (..., T, S), float64. Only for small
inputs: some allocate T * S * D complex numbers.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from coca_attention.ops import DistanceMap
from coca_attention.ops.forms import get_form


def thetas(width: int) -> Tensor:
    """The paper's θ_j = 10000^(-2j/d)."""
    return 10000.0 ** (-2 * torch.arange(width // 2, dtype=torch.float64) / width)


def pairs_of(x: Tensor, interleaved: bool = False, rotary_width: int | None = None) -> Tensor:
    """x_2j + i x_2j+1: (..., D) to complex (..., P), from either pair layout.

    With partial rotary, pairs are formed within the rotary width; the others are half-split.
    """
    if rotary_width is not None and rotary_width < x.shape[-1]:
        parts = pairs_of(x[..., :rotary_width], interleaved), pairs_of(x[..., rotary_width:])
        return torch.cat(parts, dim=-1)
    x = x.double()
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.complex(first.contiguous(), second.contiguous())


def rotate(pairs: Tensor, positions: Tensor, theta: Tensor) -> Tensor:
    """Equation (1), f(x, n): every complex pair times e^{i n θ_j}."""
    angles = positions.double().unsqueeze(-1) * theta
    return pairs * torch.polar(torch.ones_like(angles), angles)


def rope_scores(q: Tensor, k: Tensor, m: Tensor, n: Tensor, theta: Tensor) -> Tensor:
    """Equation (2): rotary attention scores before scaling, of the pairs k (..., S, P) of keys."""
    products = q.unsqueeze(-2) * k.unsqueeze(-3).conj()
    return rotate(products, m.unsqueeze(-1) - n, theta).real.sum(-1)


def strict_scores(q: Tensor, t: Tensor, m: Tensor, n: Tensor, theta: Tensor) -> Tensor:
    """Equation (9): Re<f(q_m, m), f(q_m, n) * t_n>, with a key for every query and key position."""
    keys = rotate(q.unsqueeze(-2), n, theta) * t.unsqueeze(-3)
    return (rotate(q, m, theta).unsqueeze(-2) * keys.conj()).real.sum(-1)


def slack_scores(q: Tensor, t: Tensor, m: Tensor, n: Tensor, theta: Tensor) -> Tensor:
    """Equation (10): Re<f(q_m, m), q_m * f(t_n, n)>, with an elementwise product."""
    # (..., T, P, 2), (..., S, P, 2): the two real members of every pair.
    rotated_query = torch.view_as_real(rotate(q, m, theta))
    rotated_t = torch.view_as_real(rotate(torch.complex(t, t), n, theta))
    keys = torch.view_as_real(q).unsqueeze(-3) * rotated_t.unsqueeze(-4)
    return (rotated_query.unsqueeze(-3) * keys).sum((-1, -2))


def magnitude_scores(q: Tensor, t: Tensor, m: Tensor, n: Tensor, theta: Tensor) -> Tensor:
    """Not from the paper: Equation (9) with every pair of the query divided by √|q_j|."""
    return strict_scores(torch.where(q == 0, 0, q / q.abs().sqrt()), t, m, n, theta)


SCORES = {"slack": slack_scores, "strict": strict_scores, "magnitude": magnitude_scores}


def form_scores(form: str, q: Tensor, t: Tensor, m: Tensor, n: Tensor, theta: Tensor) -> Tensor:
    """Scores by the printed equation of a form, or by a registered form's own map in float64."""
    if form in SCORES:
        return SCORES[form](q, t, m, n, theta)
    own = get_form(form)
    learned = own.initial_parameters(q.shape[-3], q.shape[-1]) if own.parameters else {}
    learned = {name: x.double().unsqueeze(1) for name, x in learned.items()}
    m, n = (x.double().unsqueeze(-1) * theta for x in (m, n))
    queries = own.query(q.real, q.imag, m.cos(), m.sin(), **learned)
    keys = t.unsqueeze(-2) * torch.stack((n.cos(), n.sin()), dim=-2)
    return queries.flatten(-2) @ keys.flatten(-2).transpose(-2, -1)


def scores(form: str, q: Tensor, t: Tensor, m: Tensor, n: Tensor, theta: Tensor) -> Tensor:
    """Those of a form; with t (..., S, P + F), of the last F pairs those of Equation (2).

    Pairs that theta does not name are not rotated.
    """
    pairs, t = q.shape[-1], t.double()
    collinear, theta = 2 * pairs - t.shape[-1], pad(theta, (0, pairs - len(theta)))
    if collinear == pairs:
        return form_scores(form, q, t, m, n, theta)
    k = torch.complex(*(x.contiguous() for x in t[..., collinear:].chunk(2, dim=-1)))
    found = rope_scores(q[..., collinear:], k, m, n, theta[collinear:])
    if not collinear:
        return found
    q, t = q[..., :collinear], t[..., :collinear]
    return found + form_scores(form, q, t, m, n, theta[:collinear])


def mapped_scores(form: str, q: Tensor, t: Tensor, distance: Tensor, theta: Tensor) -> Tensor:
    """`scores` of one query at 0 and keys so far back, (S, P'), an own distance for every pair."""
    rows = []
    for key, back in enumerate(distance):
        # Any distance of a pair is -1 with another angle per token.
        m, n = torch.zeros(1, dtype=torch.float64), -torch.ones(1, dtype=torch.float64)
        rows.append(scores(form, q, t[..., [key], :], m, n, back * theta))
    return torch.cat(rows, dim=-1)


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
    distance_map: DistanceMap | None = None,
) -> Tensor:
    """`coca_attention.ops.coca_attention` from the printed equations, in float64.

    Arguments as there, except that positions have one dimension, and that a bias of the scores is
    given as a matrix (T, S). Returns (B, H, T, Dv), float64.
    """
    heads, queries, width = query.shape[-3:]
    kv_heads, keys = key_coefficients.shape[-3:-1]
    n = torch.arange(keys) if key_positions is None else key_positions
    m = n[keys - queries :] if query_positions is None else query_positions
    t, v = (x.repeat_interleave(heads // kv_heads, dim=-3) for x in (key_coefficients, value))
    q = pairs_of(query, interleaved, rotary_width)
    theta = thetas(rotary_width or width) if theta is None else theta
    if distance_map is None:
        found = scores(form, q, t, m, n, theta)
    else:
        # For every query and pair the far keys move. Positions are then angles per θ = 1.
        slope, start = (
            torch.as_tensor(x, dtype=torch.float64).expand(len(theta))
            for x in (distance_map.slope, distance_map.start)
        )
        rows = []
        for row, at in enumerate(m):
            away = (at - n).double().unsqueeze(-1)
            groups = (at // distance_map.group - n // distance_map.group).double().unsqueeze(-1)
            is_near = (away < distance_map.near) | (at < distance_map.after)
            mapped = torch.where(is_near, away, slope * groups + start)
            rows.append(mapped_scores(form, q[..., [row], :], t, mapped, theta))
        found = torch.cat(rows, dim=-2)
    factor = width**-0.5 if scale is None else scale
    return attention(found, v, scale=factor, is_causal=is_causal, bias=bias)
