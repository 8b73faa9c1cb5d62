"""The formulas as they are written, with a score for every query and key: for reading and tests.

Legend: B batch, T tokens, H query heads, G key/value heads, D head width, P = D/2 rotary pairs.
"""

import torch
from torch import Tensor

from coca_attention.ops.positions import Rotation, split_pairs


def naive_scores(
    query: Tensor, key_coefficients: Tensor, form: str = "slack", rotation: Rotation | None = None
) -> Tensor:
    """a(m, n), (B, H, T, T), of queries (B, H, T, D) and coefficients t (B, G, T, P) at 0 … T - 1.

    With q = (q_0, q_1) a pair of the query and θ its angle per token, the sum over pairs of

        slack (Eq. 10):    <R_m q, q * R_n (t, t)>, with an elementwise product
        strict (Eq. 9):    <R_m q, t R_n q> = t |q|² cos((m - n) θ)
        magnitude:         t |q| cos((m - n) θ)
    """
    t = key_coefficients.repeat_interleave(query.shape[1] // key_coefficients.shape[1], 1)
    q0, q1 = (x.unsqueeze(-2) for x in split_pairs(query))
    turning = Rotation(query.shape[-1]) if rotation is None else rotation
    angles = turning.angles(torch.arange(query.shape[-2], device=query.device))
    m, n = angles.unsqueeze(-2), angles.unsqueeze(-3)
    if form == "slack":
        first = q0 * (q0 * m.cos() - q1 * m.sin()) * (n.cos() - n.sin())
        scores = first + q1 * (q0 * m.sin() + q1 * m.cos()) * (n.sin() + n.cos())
    else:
        square = q0.square() + q1.square()
        scores = (square.sqrt() if form == "magnitude" else square) * (m - n).cos()
    return (scores * t.unsqueeze(-3)).sum(-1)


def naive_coca_attention(
    query: Tensor,
    key_coefficients: Tensor,
    value: Tensor,
    form: str = "slack",
    rotation: Rotation | None = None,
) -> Tensor:
    """softmax(a(m, n) / sqrt(D)) V over n ≤ m: see `coca_attention.ops.coca_attention`."""
    scores = naive_scores(query, key_coefficients, form, rotation) * query.shape[-1] ** -0.5
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1).to(scores)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value


def naive_linear_attention(
    query: Tensor,
    key_coefficients: Tensor,
    value: Tensor,
    form: str = "strict",
    rotation: Rotation | None = None,
) -> Tensor:
    """Σ a(m, n) v_n / Σ w(m, n) over n ≤ m, see `coca_linear_attention`; w is a at angle 0."""
    scores = naive_scores(query, key_coefficients, form, rotation).tril()
    norms = naive_scores(query, key_coefficients, form, Rotation(query.shape[-1], turning=0)).tril()
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1).to(scores)
    return scores @ value / norms.sum(-1, keepdim=True)
