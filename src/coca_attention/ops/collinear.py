"""Collinear Constrained Attention (CoCA): every key is collinear with the query, k = q * t.

Legend: B batch, T query length, S key length, H query heads, G key/value heads, D head width,
P = D/2 rotary pairs, m a query's position, n a key's.

The paper writes the scores of its two forms with a key for every (query, key) pair. Both are
ordinary dot products of an effective query Q' and an effective key K' of the usual width D:

    slack  (Eq. 10):      Q' = q * R_m q                         K' = R_n [t, t]
    strict (Eq. 9, 17):   Q'_j = |q_j|^2 (cos m θ_j, sin m θ_j)   K'_j = t_j (cos n θ_j, sin n θ_j)

so any kernel for softmax(Q K^T) V computes CoCA exactly, in memory linear in S. The strict scores
depend on m - n alone; the slack ones depend on both positions, so they need true positions.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from coca_attention.ops.attention import attend
from coca_attention.ops.rotary import check_width, rotary_cos_sin, split_pairs

Form = Literal["slack", "strict"]
FORMS: tuple[str, ...] = get_args(Form)


def fold(x: Tensor, interleaved: bool = False, rotary_width: int | None = None) -> Tensor:
    """Mean of the two members of every rotary pair, as in the authors' released code.

    Args:
        x: (..., D).
        interleaved: Pair layout, see `split_pairs`.
        rotary_width: Numbers of a head that are rotated, see `split_pairs`; default D.

    Returns:
        (..., P).
    """
    first, second = split_pairs(x, interleaved, rotary_width)
    return (first + second) / 2


def score_scale(dtype: torch.dtype) -> float:
    """Power of two to divide Q' by, and to give to the attention kernel as its scale.

    Q' grows with |q|^2. In float16, with its largest number of 65,504, |q| of 700 would overflow;
    divided by 1024 it may reach 16,000 for a head of 16 and more for wider ones. Kernels multiply
    by their scale in float32, so nothing is lost. 1 for every other dtype.
    """
    return 1024.0 if dtype == torch.float16 else 1.0


def query_map(
    query: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    form: Form,
    scale: float = 1.0,
    interleaved: bool = False,
) -> Tensor:
    """Effective query Q', such that scale * a(m, n) = Q'_m · K'_n.

    Computed in float32 or wider and cast last, because |q|^2 leaves the range of half precision
    long before the scores do.

    Args:
        query: q before rotation, (B, H, T, D).
        cos: cos of the angles at the queries' positions, (T, R/2) or (B, T, R/2). R is the rotary
            width: D, or less under partial rotary, whose other pairs are not rotated.
        sin: Like cos.
        form: ``slack`` (Eq. 10) or ``strict`` (Eq. 9).
        scale: Folded into the result, so that attention runs with scale 1; see `score_scale`.
        interleaved: Pair layout of the query, see `split_pairs`.

    Returns:
        (B, H, T, D) in the dtype of the query, always in the half-split layout.
    """
    check_form(form)
    wide = torch.promote_types(query.dtype, torch.float32)
    q0, q1 = split_pairs(query.to(wide), interleaved, 2 * cos.shape[-1])
    cos, sin = _over_all_pairs(cos, sin, q0.shape[-1], wide)
    if form == "slack":
        first = q0 * (q0 * cos - q1 * sin)
        second = q1 * (q0 * sin + q1 * cos)
    else:
        magnitude = q0 * q0 + q1 * q1
        first, second = magnitude * cos, magnitude * sin
    return (torch.cat((first, second), dim=-1) * scale).to(query.dtype)


def key_map(key_coefficients: Tensor, cos: Tensor, sin: Tensor, *, form: Form) -> Tensor:
    """Effective key K'.

    Args:
        key_coefficients: t, non-negative, (B, G, S, P).
        cos: cos of the angles at the keys' positions, (S, R/2) or (B, S, R/2), see `query_map`.
        sin: Like cos.
        form: ``slack`` or ``strict``.

    Returns:
        (B, G, S, D) in the dtype of the coefficients, in the half-split layout.
    """
    check_form(form)
    wide = torch.promote_types(key_coefficients.dtype, torch.float32)
    t = key_coefficients.to(wide)
    cos, sin = _over_all_pairs(cos, sin, t.shape[-1], wide)
    if form == "slack":
        key = torch.cat((t * (cos - sin), t * (sin + cos)), dim=-1)
    else:
        key = torch.cat((t * cos, t * sin), dim=-1)
    return key.to(key_coefficients.dtype)


def _over_all_pairs(
    cos: Tensor, sin: Tensor, pairs: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin for every head and pair; pairs beyond the rotary width have angle zero."""
    missing = pairs - cos.shape[-1]
    if missing:
        cos, sin = F.pad(cos, (0, missing), value=1.0), F.pad(sin, (0, missing))
    return cos.to(dtype).unsqueeze(-3), sin.to(dtype).unsqueeze(-3)


def coca_attention(
    query: Tensor,
    key_coefficients: Tensor,
    value: Tensor,
    *,
    form: Form = "slack",
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    base: float = 10000.0,
    interleaved: bool = False,
    rotary_width: int | None = None,
    attention_mask: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Collinear Constrained Attention (arXiv 2309.08646).

    Args:
        query: q before rotation, (B, H, T, D), D even. When T < S the queries are the last T
            positions.
        key_coefficients: t, already non-negative (the paper's ReLU applied), (B, G, S, D/2);
            G divides H.
        value: (B, G, S, Dv); Dv may differ from D.
        form: ``slack`` (Eq. 10, what the authors trained) or ``strict`` (Eq. 9 = Eq. 17,
            shift-invariant).
        query_positions: (T,) or (B, T); default: the last T of 0 … S - 1.
        key_positions: (S,) or (B, S); default 0 … S - 1. Give true positions for padded or packed
            batches: the slack form is not shift-invariant.
        base: Base of the rotary frequencies (see `ntk_base` for scaled ones).
        interleaved: Pair layout of the query: False for pairs (j, j + D/2), True for (2j, 2j + 1).
        rotary_width: Numbers of a head that are rotated (partial rotary), see `split_pairs`;
            default D.
        attention_mask: Boolean (True = may attend) or additive, broadcastable to (B, H, T, S);
            applied on top of causality.
        is_causal: Causality by index, not by position: query i sees keys 0 … S - T + i.
        scale: Multiplies the scores; default 1/sqrt(D).

    Returns:
        (B, H, T, Dv) in the dtype of the query.

    Raises:
        ValueError: If a shape does not fit; the message says which and what was expected.
        TypeError: If query, key coefficients and value differ in dtype.
    """
    _check_inputs(query, key_coefficients, value)
    queries, keys, width = query.shape[-2], key_coefficients.shape[-2], query.shape[-1]
    if key_positions is None:
        key_positions = torch.arange(keys, device=query.device)
    if query_positions is None:
        if queries > keys:
            raise ValueError(
                f"{queries} queries and {keys} keys: without query_positions the queries are the "
                "last positions of the keys, so there must be at least as many keys"
            )
        query_positions = key_positions[..., keys - queries :]
    for name, positions, length in (
        ("query_positions", query_positions, queries),
        ("key_positions", key_positions, keys),
    ):
        if tuple(positions.shape) not in ((length,), (query.shape[0], length)):
            raise ValueError(
                f"{name} must have shape ({length},) or ({query.shape[0]}, {length}), got "
                f"{tuple(positions.shape)}"
            )
    wide = torch.promote_types(query.dtype, torch.float32)
    factor = width**-0.5 if scale is None else scale
    divisor = score_scale(query.dtype)
    span = width if rotary_width is None else rotary_width
    cos, sin = rotary_cos_sin(query_positions, span, base=base, dtype=wide)
    q = query_map(query, cos, sin, form=form, scale=factor / divisor, interleaved=interleaved)
    cos, sin = rotary_cos_sin(key_positions, span, base=base, dtype=wide)
    k = key_map(key_coefficients, cos, sin, form=form)
    return attend(q, k, value, attention_mask=attention_mask, is_causal=is_causal, scale=divisor)


def check_form(form: str) -> None:
    """Raise ValueError unless ``form`` names a CoCA form."""
    if form not in FORMS:
        raise ValueError(f"unknown CoCA form {form!r}; choose one of {', '.join(FORMS)}")


def _check_inputs(query: Tensor, key_coefficients: Tensor, value: Tensor) -> None:
    for name, tensor in (
        ("query", query),
        ("key_coefficients", key_coefficients),
        ("value", value),
    ):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (batch, heads, length, width), got shape "
                f"{tuple(tensor.shape)}"
            )
        if tensor.dtype != query.dtype or not tensor.is_floating_point():
            raise TypeError(
                f"query, key_coefficients and value must share one floating dtype; {name} is "
                f"{tensor.dtype}, query is {query.dtype}"
            )
    batch, heads, _, width = query.shape
    check_width(width)
    groups, _, pairs = key_coefficients.shape[1:]
    if pairs != width // 2:
        raise ValueError(
            f"key_coefficients must hold one number per rotary pair, width {width // 2} for a "
            f"head of {width}; got {pairs} (use fold() to halve a full-width projection)"
        )
    if value.shape[:3] != key_coefficients.shape[:3] or batch != value.shape[0]:
        raise ValueError(
            f"batch, key/value heads and key length must agree: query {tuple(query.shape)}, "
            f"key_coefficients {tuple(key_coefficients.shape)}, value {tuple(value.shape)}"
        )
    if groups == 0 or heads % groups:
        raise ValueError(
            f"the number of key/value heads must divide the number of query heads; got {groups} "
            f"and {heads}"
        )
