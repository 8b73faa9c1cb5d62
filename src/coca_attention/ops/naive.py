"""The formulas as they are written, with a score for every query and key: for reading and tests.

Legend: B batch, T tokens, H query heads, G key/value heads, D head width, P = D/2 rotary pairs, R
rotary width.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from coca_attention.ops.forms import check_shift_invariant, get_form
from coca_attention.ops.linear import check_linear
from coca_attention.ops.positions import Rotation, rotation_of, split_pairs


def naive_scores(
    query: Tensor, key_coefficients: Tensor, form: str = "slack", rotation: Rotation | None = None
) -> Tensor:
    """a(m, n), (B, H, T, T), of queries (B, H, T, D) and coefficients t (B, G, T, P) at 0 … T - 1.

    With q = (q_0, q_1) a pair of the query and θ its angle per token, the sum over pairs of

        slack (Eq. 10):    <R_m q, q * R_n (t, t)>, with an elementwise product
        strict (Eq. 9):    <R_m q, t R_n q> = t |q|² cos(f(m - n) θ)
        magnitude:         t |q| cos(f(m - n) θ)

    Of a rotation f is the distance map; its rule's magnitude multiplies R_m and R_n, and its factor
    on queries the sum. With groups g of far keys f is slope * (m // g - n // g) + start.

    Raises:
        ValueError: If the form is none of these, or slack with a distance map.
    """
    rotation = rotation_of(rotation, query.shape[-1])
    if form not in ("slack", "strict", "magnitude"):
        raise ValueError(f"form must be slack, strict or magnitude, got {form!r}")
    positions = torch.arange(query.shape[-2], device=query.device)
    if rotation.follows_length:
        rotation = rotation.for_length(len(positions))
    missing = (0, query.shape[-1] // 2 - rotation.width // 2)  # pairs that are not rotated
    theta = F.pad(rotation.frequencies().to(query.device), missing)
    square = torch.full_like(theta, rotation.rule.magnitude**2)
    square[rotation.width // 2 :] = 1.0
    t = key_coefficients.repeat_interleave(query.shape[1] // key_coefficients.shape[1], 1)
    q0, q1 = (x.unsqueeze(-2) for x in split_pairs(query, rotary_width=rotation.width))
    if form == "slack":
        if rotation.distance_map is not None:
            check_shift_invariant(get_form(form), "a distance map")
        m, n = positions[:, None, None] * theta, positions[None, :, None] * theta
        first = q0 * (q0 * m.cos() - q1 * m.sin()) * (n.cos() - n.sin())
        scores = first + q1 * (q0 * m.sin() + q1 * m.cos()) * (n.sin() + n.cos())
    else:
        distance = _distances(positions)
        found = rotation.distance_map
        if found is not None:
            slope, start = (
                F.pad(
                    torch.tensor(x, dtype=theta.dtype, device=theta.device).expand(
                        rotation.width // 2
                    ),
                    missing,
                )
                for x in (found.slope, found.start)
            )
            far = slope * _distances(positions // found.group) + start
            distance = torch.where(distance < found.near, distance, far)
        size = q0.square() + q1.square()
        scores = (size.sqrt() if form == "magnitude" else size) * (distance * theta).cos()
    scores = (scores * square * t.unsqueeze(-3)).sum(-1)
    factor = rotation.query_factor(positions, torch.float64)
    return scores if factor is None else scores * factor.unsqueeze(-1)


def _distances(positions: Tensor) -> Tensor:
    """m - n of all positions (T,): (T, T, 1), float64."""
    return (positions[:, None] - positions).double().unsqueeze(-1)


def naive_coca_attention(
    query: Tensor,
    key_coefficients: Tensor,
    value: Tensor,
    form: str = "slack",
    rotation: Rotation | None = None,
) -> Tensor:
    """softmax(a(m, n) / sqrt(D)) V over n ≤ m: see `coca_attention.ops.coca_attention`.

    A decay c multiplies the weight of a key by (1 + (m - n) / length)^-c.
    """
    scores = naive_scores(query, key_coefficients, form, rotation) * query.shape[-1] ** -0.5
    if rotation is not None and rotation.decay:
        positions = torch.arange(query.shape[-2], device=query.device)
        distance = (positions[:, None] - positions).clamp(min=0).double()
        scores = scores - rotation.decay * (1 + distance / rotation.decay_length).log()
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
    rotation = rotation_of(rotation, query.shape[-1])
    check_linear(get_form(form), rotation)
    scores = naive_scores(query, key_coefficients, form, rotation).tril()
    norms = naive_scores(query, key_coefficients, form, replace(rotation, turning=0)).tril()
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1).to(scores)
    return scores @ value / norms.sum(-1, keepdim=True)
