"""The query and key maps: CoCA scores as plain dot products of an effective query and key.

Legend: B batch, T query length, S key length, H query heads, G key/value heads, D head width,
P = D/2 rotary pairs, R rotary width, F free pairs, C = P - F collinear pairs.

Q' depends on the score form (`coca_attention.ops.forms`); K' is the rotary key of (t, 0) for
collinear pairs and of (k_0, k_1) for free pairs. The coefficients of a token and key head are
[t, k_0, k_1], P + F numbers: the first members of all pairs, then the second members of free pairs.

Each map reads its input once and writes its output once, forward and backward, so a call costs
less than rotating queries and keys in ordinary rotary attention. The backward pass of the query map
needs only q, in its own dtype; the key map is linear and needs only cos and sin.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from coca_attention.errors import check_whole
from coca_attention.ops import kernels
from coca_attention.ops.forms import Pairing, ScoreForm, check_parameters, get_form
from coca_attention.ops.positions import join_pairs, split_pairs


def fold(
    x: Tensor, interleaved: bool = False, rotary_width: int | None = None, free_pairs: int = 0
) -> Tensor:
    """Key coefficients of full-width keys: the mean of the two members of every collinear pair.

    (..., D) to (..., P + F). The authors' released code takes the same mean. The last F pairs of a
    head are free and keep both members. For the pair layout and the rotary width see `split_pairs`.

    Raises:
        ValueError: If D or the rotary width is odd, or they or F are out of range.
    """
    check_whole("free_pairs", free_pairs, 0, x.shape[-1] // 2)
    first, second = split_pairs(x, interleaved, rotary_width)
    means = (first + second) / 2
    if not free_pairs:
        return means
    return torch.cat(
        (means[..., :-free_pairs], first[..., -free_pairs:], second[..., -free_pairs:]), -1
    )


def activate(x: Tensor, pairs: int) -> Tensor:
    """ReLU of the coefficients (..., P + F) of collinear pairs (Eq. 5, 6), not of free ones."""
    collinear = 2 * pairs - x.shape[-1]
    if collinear == pairs:
        return x.relu()
    return torch.cat((x[..., :collinear].relu(), x[..., collinear:]), dim=-1)


def score_scale(dtype: torch.dtype) -> float:
    """Power of two that divides Q' and is passed to the attention kernel as its scale.

    Q' grows with |q|^2. In float16, whose largest number is 65,504, |q| of 700 would overflow;
    with Q' divided by 1024, |q| may reach 16,000 for a head of 16 and more for wider ones. Kernels
    apply their scale in float32, so no precision is lost. 1 for every other dtype.
    """
    return 1024.0 if dtype == torch.float16 else 1.0


def query_map(
    query: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    form: str | ScoreForm,
    scale: float = 1.0,
    factor: Tensor | None = None,
    interleaved: bool = False,
    free_pairs: int = 0,
    parameters: dict[str, Tensor] | None = None,
) -> Tensor:
    """Effective query Q', such that scale * a(m, n) = Q'_m · K'_n.

    Computed in float32 or wider and cast last, because |q|^2 exceeds the range of half precision
    long before the scores do.

    Args:
        query: q before rotation, (B, H, T, D).
        cos: cos of the angles at the query positions, (T, R/2) or (B, T, R/2), from
            `Rotation.tables`. Pairs beyond the rotary width are not rotated. Treated as a
            constant: it gets no gradient.
        sin: Like cos.
        form: A score form or its name.
        scale: Folded into the result, so that attention runs with scale 1; see `score_scale`.
        factor: Multiplies every query, (T,) or (B, T), from `Rotation.query_factor`; also a
            constant.
        interleaved: Pair layout of the query, see `split_pairs`.
        free_pairs: F.
        parameters: The form's learned parameters, each (H, ...); default: their initial values.

    Returns:
        (B, H, T, D) in the dtype of the query, always in the half-split layout.

    Raises:
        ValueError: If the form is unknown or has other parameters, or cos or sin requires a
            gradient.
    """
    form = get_form(form)
    if parameters is not None:
        check_parameters(form, parameters, query.shape[1])
    wide = torch.promote_types(query.dtype, torch.float32)
    span = 2 * cos.shape[-1]
    cos, sin = over_all_pairs(cos, sin, query.shape[-1] // 2, wide)
    scales = scale if factor is None else scale * factor.to(wide)[..., None, :, None]
    pairing = Pairing(form, interleaved, span, free_pairs)
    cos = cos * scales
    sin = sin * scales
    if form.gradient is not None:
        # Without gradients `apply` would slow down decoding.
        make = _QueryMap.apply if torch.is_grad_enabled() else _effective_query
        return make(query, cos, sin, pairing)
    if parameters is None:
        parameters = form.initial_parameters(query.shape[1], query.shape[-1] // 2 - free_pairs)
    learned = {name: x.to(cos).unsqueeze(1) for name, x in parameters.items()}
    return _query(query, cos, sin, pairing, learned)


def key_map(key_coefficients: Tensor, cos: Tensor, sin: Tensor, *, free_pairs: int = 0) -> Tensor:
    """Effective key K', the same for every score form.

    Args:
        key_coefficients: t, non-negative, and both members of free pairs: (B, G, S, P + F).
        cos: cos of the angles at the key positions, (S, R/2) or (B, S, R/2), from
            `Rotation.tables`; see `query_map`.
        sin: Like cos.
        free_pairs: F.

    Returns:
        (B, G, S, D) in the dtype of the coefficients, in the half-split layout.

    Raises:
        ValueError: If cos or sin requires a gradient.
    """
    wide = torch.promote_types(key_coefficients.dtype, torch.float32)
    cos, sin = over_all_pairs(cos, sin, key_coefficients.shape[-1] - free_pairs, wide)
    make = _KeyMap.apply if torch.is_grad_enabled() else _effective_key
    return make(key_coefficients, cos, sin, free_pairs)


def over_all_pairs(
    cos: Tensor, sin: Tensor, pairs: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin, broadcast over heads and padded to all pairs with angle 0."""
    if cos.requires_grad or sin.requires_grad:
        raise ValueError(
            "cos and sin must not require gradients, because learned rotary frequencies are not "
            "supported; call detach() on them"
        )
    missing = pairs - cos.shape[-1]
    if missing:
        cos = F.pad(cos, (0, missing), value=1.0)
        sin = F.pad(sin, (0, missing))
    return cos.to(dtype).unsqueeze(-3), sin.to(dtype).unsqueeze(-3)


def _query(
    query: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing, parameters: dict[str, Tensor]
) -> Tensor:
    """Q' computed with PyTorch operations, differentiable by autograd."""
    q0, q1 = split_pairs(query.to(cos.dtype), pairing.interleaved, pairing.span)
    collinear = q0.shape[-1] - pairing.free_pairs
    effective = pairing.form.query(
        q0[..., :collinear],
        q1[..., :collinear],
        cos[..., :collinear],
        sin[..., :collinear],
        **parameters,
    )
    if pairing.free_pairs:
        q0, q1, c, s = (x[..., collinear:] for x in (q0, q1, cos, sin))
        rotated = torch.stack((q0 * c - q1 * s, q0 * s + q1 * c), dim=-2)
        effective = torch.cat((effective, rotated), dim=-1)
    return effective.flatten(-2).to(query.dtype)


def _query_gradient(
    query: Tensor, grad: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing
) -> Tensor:
    """Gradient of q, given the gradient (g0, g1) of Q'."""
    assert pairing.form.gradient is not None  # others have no `Function`
    q0, q1 = split_pairs(query.to(cos.dtype), pairing.interleaved, pairing.span)
    g0, g1 = grad.to(cos.dtype).chunk(2, dim=-1)
    collinear = q0.shape[-1] - pairing.free_pairs
    first, second = pairing.form.gradient(*(x[..., :collinear] for x in (q0, q1, g0, g1, cos, sin)))
    if pairing.free_pairs:
        g0, g1, c, s = (x[..., collinear:] for x in (g0, g1, cos, sin))
        first = torch.cat((first, torch.addcmul(g0 * c, g1, s)), dim=-1)
        second = torch.cat((second, torch.addcmul(g1 * c, g0, s, value=-1)), dim=-1)
    return join_pairs(first, second, pairing.interleaved, pairing.span).to(query.dtype)


def _effective_query(query: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    """Q' by the kernel where there is one."""
    if pairing.form.kernel is not None and kernels.supports(query):
        return kernels.maps.query_map(query, cos, sin, pairing)
    return _query(query, cos, sin, pairing, {})


def _effective_key(coefficients: Tensor, cos: Tensor, sin: Tensor, free_pairs: int) -> Tensor:
    """K' by the kernel where there is one."""
    if kernels.supports(coefficients):
        return kernels.maps.key_map(coefficients, cos, sin, free_pairs)
    wide = coefficients.to(cos.dtype)
    tables = torch.stack((cos, sin), dim=-2)
    effective = wide[..., : cos.shape[-1]].unsqueeze(-2) * tables
    if free_pairs:
        second = wide[..., cos.shape[-1] :]
        c = cos[..., -free_pairs:]
        s = sin[..., -free_pairs:]
        effective[..., -free_pairs:] += second.unsqueeze(-2) * torch.stack((-s, c), dim=-2)
    return effective.flatten(-2).to(coefficients.dtype)


class _QueryMap(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
        ctx.pairing = pairing
        ctx.save_for_backward(query, cos, sin)
        return _effective_query(query, cos, sin, pairing)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, cos, sin = ctx.saved_tensors
        kernel = ctx.pairing.form.kernel
        # Gradients are enabled here for second derivatives, which the kernels do not support.
        fused = kernel is not None and kernels.supports(query) and not torch.is_grad_enabled()
        gradient = kernels.maps.query_gradient if fused else _query_gradient
        return gradient(query, grads[0], cos, sin, ctx.pairing), None, None, None


class _KeyMap(Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, cos: Tensor, sin: Tensor, free_pairs: int) -> Tensor:
        ctx.free_pairs = free_pairs
        ctx.save_for_backward(cos, sin)
        return _effective_key(key, cos, sin, free_pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grad = grads[0]
        free_pairs = ctx.free_pairs
        if kernels.supports(grad) and not torch.is_grad_enabled():
            return kernels.maps.key_gradient(grad, cos, sin, free_pairs), None, None, None
        g0, g1 = grad.to(cos.dtype).chunk(2, dim=-1)
        gradient = torch.addcmul(g0 * cos, g1, sin)
        if free_pairs:
            f0, f1, c, s = (x[..., -free_pairs:] for x in (g0, g1, cos, sin))
            gradient = torch.cat((gradient, torch.addcmul(f1 * c, f0, s, value=-1)), dim=-1)
        return gradient.to(grad.dtype), None, None, None
