"""The query and key maps: CoCA's scores as plain dot products of an effective query and key.

Legend: B batch, T query length, S key length, H query heads, G key/value heads, D head width,
P = D/2 rotary pairs, m a query's position, n a key's.

    slack  (Eq. 10):      Q' = q * R_m q                          K' = R_n [t, t]
    strict (Eq. 9, 17):   Q'_j = |q_j|^2 (cos m θ_j, sin m θ_j)    K'_j = t_j (cos n θ_j, sin n θ_j)
    linear (our own):     Q'_j = |q_j|   (cos m θ_j, sin m θ_j)    K' as in strict

Both maps are read once and written once in each direction: a call costs less than the rotation of
queries and keys in ordinary rotary attention. For the backward pass only q is kept, in its own
dtype; the key map is linear and keeps nothing but cos and sin.
"""

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from coca_attention.ops import kernels
from coca_attention.ops.rotary import join_pairs, split_pairs

Form = Literal["slack", "strict", "linear"]
FORMS: tuple[str, ...] = get_args(Form)


def check_form(form: str) -> None:
    """Raise ValueError unless ``form`` names a CoCA form."""
    if form not in FORMS:
        raise ValueError(f"unknown CoCA form {form!r}; choose one of {', '.join(FORMS)}")


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
            width: D, or less under partial rotary, whose other pairs are not rotated. A constant:
            no gradient is formed for it.
        sin: Like cos.
        form: ``slack`` (Eq. 10), ``strict`` (Eq. 9) or ``linear``.
        scale: Folded into the result, so that attention runs with scale 1; see `score_scale`.
        interleaved: Pair layout of the query, see `split_pairs`.

    Returns:
        (B, H, T, D) in the dtype of the query, always in the half-split layout.

    Raises:
        ValueError: If the form is unknown, or cos or sin requires a gradient.
    """
    check_form(form)
    _check_constants(cos, sin)
    wide = torch.promote_types(query.dtype, torch.float32)
    span = 2 * cos.shape[-1]
    cos, sin = over_all_pairs(cos, sin, query.shape[-1] // 2, wide)
    return _call(_QueryMap, query, cos * scale, sin * scale, form, interleaved, span)


def key_map(key_coefficients: Tensor, cos: Tensor, sin: Tensor, *, form: Form) -> Tensor:
    """Effective key K'.

    Args:
        key_coefficients: t, non-negative, (B, G, S, P).
        cos: cos of the angles at the keys' positions, (S, R/2) or (B, S, R/2), see `query_map`.
        sin: Like cos.
        form: ``slack``, ``strict`` or ``linear``.

    Returns:
        (B, G, S, D) in the dtype of the coefficients, in the half-split layout.

    Raises:
        ValueError: If the form is unknown, or cos or sin requires a gradient.
    """
    check_form(form)
    _check_constants(cos, sin)
    wide = torch.promote_types(key_coefficients.dtype, torch.float32)
    cos, sin = over_all_pairs(cos, sin, key_coefficients.shape[-1], wide)
    return _call(_KeyMap, key_coefficients, *key_turn(cos, sin, form))


def key_turn(cos: Tensor, sin: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """What t is multiplied by for the two members of K's pairs: of [t, t] turned, or [t, 0]."""
    return (cos - sin, sin + cos) if form == "slack" else (cos, sin)


def _check_constants(cos: Tensor, sin: Tensor) -> None:
    if cos.requires_grad or sin.requires_grad:
        raise ValueError(
            "cos and sin are constants of the maps, and one of them requires a gradient: learned "
            "rotary frequencies are not supported; detach() them"
        )


def over_all_pairs(
    cos: Tensor, sin: Tensor, pairs: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin for every head and pair; pairs beyond the rotary width have angle zero."""
    missing = pairs - cos.shape[-1]
    if missing:
        cos, sin = F.pad(cos, (0, missing), value=1.0), F.pad(sin, (0, missing))
    return cos.to(dtype).unsqueeze(-3), sin.to(dtype).unsqueeze(-3)


def _both(first: Tensor, second: Tensor) -> Tensor:
    """(..., P) and (..., P) to (..., 2, P), which flattens to the half-split layout."""
    return torch.stack((first, second), dim=-2)


def _call(function: Any, *arguments: Any) -> Tensor:
    """A function's value; without gradients not through `apply`, which decoding would notice."""
    return (function.apply if torch.is_grad_enabled() else function.forward)(*arguments)


class _QueryMap(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        query: Tensor, cos: Tensor, sin: Tensor, form: Form, interleaved: bool, span: int
    ) -> Tensor:
        if kernels.serve(query):
            return kernels.maps.query_map(query, cos, sin, form, interleaved, span)
        q0, q1 = split_pairs(query.to(cos.dtype), interleaved, span)
        if form == "slack":
            made = q0.unsqueeze(-2) * _both(cos, sin)
            made.addcmul_(q1.unsqueeze(-2), _both(-sin, cos))
            made.select(-2, 0).mul_(q0)
            made.select(-2, 1).mul_(q1)
        else:
            magnitude = (q0 * q0).addcmul_(q1, q1)
            if form == "linear":
                magnitude.sqrt_()
            made = magnitude.unsqueeze(-2) * _both(cos, sin)
        return made.flatten(-2).to(query.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        query, cos, sin, *ctx.settings = inputs
        ctx.save_for_backward(query, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        query, cos, sin = ctx.saved_tensors
        # With a graph (for second derivatives) the gradient is made of PyTorch's own operations.
        fused = kernels.serve(query) and not torch.is_grad_enabled()
        gradient = kernels.maps.query_gradient if fused else _query_gradient
        return gradient(query, grads[0], cos, sin, *ctx.settings), *(None,) * 5


def _query_gradient(
    query: Tensor,
    grad: Tensor,
    cos: Tensor,
    sin: Tensor,
    form: Form,
    interleaved: bool,
    span: int,
) -> Tensor:
    """Gradient of q from that of Q' = (g0, g1), pair by pair.

    slack: 2 cos g_i q_i + sin (g1 - g0) q_(1-i); strict: 2 q_i (cos g0 + sin g1); linear:
    q_i / |q| (cos g0 + sin g1), and 0 where q is 0.
    """
    q0, q1 = split_pairs(query.to(cos.dtype), interleaved, span)
    g0, g1 = grad.to(cos.dtype).chunk(2, dim=-1)
    if form == "slack":
        turned, double = (g1 - g0) * sin, 2 * cos
        first = torch.addcmul(turned * q1, g0 * double, q0)
        second = torch.addcmul(turned * q0, g1 * double, q1)
    else:
        along = torch.addcmul(g0 * cos, g1, sin)
        if form == "strict":
            along = 2 * along
        else:
            square = torch.addcmul(q0 * q0, q1, q1)
            # Both branches of `where` must be finite, or the second derivative is not.
            along = torch.where(square > 0, along * square.where(square > 0, 1.0).rsqrt(), 0.0)
        first, second = along * q0, along * q1
    return join_pairs(first, second, interleaved, span).to(query.dtype)


class _KeyMap(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(coefficients: Tensor, first: Tensor, second: Tensor) -> Tensor:
        if kernels.serve(coefficients):
            return kernels.maps.key_map(coefficients, first, second)
        made = coefficients.to(first.dtype).unsqueeze(-2) * _both(first, second)
        return made.flatten(-2).to(coefficients.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        first, second = ctx.saved_tensors
        grad = grads[0]
        if kernels.serve(grad) and not torch.is_grad_enabled():
            return kernels.maps.key_gradient(grad, first, second), None, None
        g0, g1 = grad.to(first.dtype).chunk(2, dim=-1)
        return torch.addcmul(g0 * first, g1, second).to(grad.dtype), None, None
