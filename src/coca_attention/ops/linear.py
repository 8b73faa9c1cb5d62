"""Linear attention (RoFormer, arXiv 2104.09864, Eq. 19) with collinear keys.

Scores are not exponentiated, so what earlier tokens contribute is a sum that one state holds:

    out_m = Σ_n (Q'_m · K'_n) v_n / Σ_n Σ_j w_mj t_nj,    n ≤ m

where w_mj = |Q'_mj| (|q_mj|² in the strict form, |q_mj| in magnitude) does not turn. Coefficients t
are non-negative, so the normaliser is positive and |out_m| ≤ max |v|; RoFormer's features need an
activation for that (elu + 1).

Legend: B batch, T length of this pass, H query heads, G key/value heads, D head width, Dv width of
values, P = D/2 rotary pairs, N chunks of C tokens.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coca_attention.ops.checks import check_operands
from coca_attention.ops.forms import ScoreForm, check_shift_invariant, get_form
from coca_attention.ops.maps import key_map, over_all_pairs, query_map
from coca_attention.ops.positions import Rotation, rotation_of

CHUNK = 64


class LinearState(NamedTuple):
    """What earlier tokens leave to later ones, whatever their number; float32 or wider.

    Positions are relative to the last of these tokens, so the state has no length.
    """

    products: Tensor
    """Σ K'_n ⊗ v_n, (B, G, D, Dv)."""
    coefficients: Tensor
    """Σ t_n, (B, G, P)."""

    def packed(self) -> Tensor:
        """All numbers of a key head in one dimension, (B, G, D * Dv + P), for a cache."""
        return torch.cat((self.products.flatten(2), self.coefficients), dim=-1)

    @classmethod
    def unpack(cls, packed: Tensor, width: int) -> "LinearState":
        """The state that was packed, for head width D."""
        products, coefficients = packed.tensor_split([packed.shape[-1] - width // 2], dim=-1)
        return cls(products.unflatten(-1, (width, -1)), coefficients)


class Turns(NamedTuple):
    """What the positions of a pass are to linear attention; all layers share them."""

    tables: tuple[Tensor, Tensor]
    """cos and sin of the angles from the last token of the state, (T, R/2) or (B, T, R/2)."""
    still: tuple[Tensor, Tensor]
    """cos and sin at angle 0, where scores are those of the normaliser, (1, R/2)."""
    back: tuple[Tensor, Tensor]
    """cos and sin of the angles of the whole pass, (1, R/2) or (B, 1, R/2)."""


def linear_turns(
    form: str | ScoreForm,
    rotation: Rotation,
    positions: Tensor,
    dtype: torch.dtype,
    mask: Tensor | None = None,
) -> Turns:
    """`Turns` of positions (T,) or (B, T), the first right after the last token of the state.

    With a mask (B, T), zero for tokens that nobody sees, first and last are among the others.
    """
    check_linear(get_form(form), rotation)
    if mask is None:
        places = positions - positions[..., :1] + 1
        last = places[..., -1:]
    else:
        real = mask.bool()
        positions = positions.expand(mask.shape)
        first = positions.gather(-1, real.long().argmax(-1, keepdim=True))
        places = (positions - first + 1) * real
        last = places.amax(-1, keepdim=True)
    back = rotation.angles(last).to(dtype)
    still = rotation.tables(places.new_zeros(1), dtype)
    return Turns(rotation.tables(places, dtype), still, (back.cos(), back.sin()))


def check_linear(form: ScoreForm, rotation: Rotation) -> None:
    """ValueError unless linear attention has this form and rotation.

    A state cannot hold scores that depend on more than m - n, nor what depends on the distance or
    on the length of the text in another way than a rotation.
    """
    check_shift_invariant(form, "linear attention")
    if rotation.distance_map is not None or rotation.bias is not None or rotation.follows_length:
        raise ValueError(
            "linear attention does not support a distance map, a decay, or a scaling that follows "
            "the length of the text: leave them out of the rotation"
        )


def coca_linear_attention(
    query: Tensor,
    key_coefficients: Tensor,
    value: Tensor,
    *,
    form: str | ScoreForm = "strict",
    rotation: Rotation | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    parameters: dict[str, Tensor] | None = None,
    state: LinearState | None = None,
) -> tuple[Tensor, LinearState]:
    """Causal linear attention with collinear keys, in time linear in T.

    Args:
        query: q before rotation, (B, H, T, D), D even.
        key_coefficients: t ≥ 0, (B, G, T, D/2); G divides H. Zero for tokens that nobody sees, such
            as padding. At least one t that a query sees has to be positive, which softplus
            ensures, but a ReLU does not; where all are 0, the output is 0.
        value: (B, G, T, Dv).
        form: A shift-invariant score form or its name: ``strict`` or ``magnitude``.
        rotation: Rotation of the pairs; default `Rotation(D)`. Its temperature cancels out.
        positions: (T,) or (B, T), the first right after the last token of the state; default:
            consecutive.
        interleaved: Pair layout of the query, see `split_pairs`.
        parameters: The form's learned parameters, each (H, ...); default: their initial values.
        state: That of earlier tokens, as a previous call returned it; default: none.

    Returns:
        The output (B, H, T, Dv) in the dtype of the query, and the state after these tokens.

    Raises:
        ValueError: If a shape does not match, the form is not shift-invariant, or the rotation
            depends on the length or limits or weighs distances.
        TypeError: If query, key coefficients and value differ in dtype.
    """
    check_operands(query, key_coefficients, value)
    length, width = query.shape[2:]
    shape = key_coefficients.shape
    if shape[2:] != (length, width // 2):
        raise ValueError(
            f"key_coefficients must be {(*shape[:2], length, width // 2)}, one for every query and "
            f"none for free pairs; got {tuple(shape)}"
        )
    rotation = rotation_of(rotation, width)
    if positions is None:
        positions = torch.arange(length, device=query.device)
    turns = linear_turns(form, rotation, positions, torch.promote_types(query.dtype, torch.float32))
    return attend_turned(
        query,
        key_coefficients,
        value,
        turns,
        state,
        form=form,
        interleaved=interleaved,
        parameters=parameters,
    )


def attend_turned(
    query: Tensor,
    key_coefficients: Tensor,
    value: Tensor,
    turns: Turns,
    state: LinearState | None,
    **settings: Any,
) -> tuple[Tensor, LinearState]:
    """`coca_linear_attention` at the positions of turns, with the settings of `query_map`."""
    dtype = turns.still[0].dtype
    width = query.shape[-1]
    wide, coefficients, value = (x.to(dtype) for x in (query, key_coefficients, value))
    if get_form(settings["form"]).homogeneous:  # |q|² may exceed the range of numbers
        size = wide.detach().abs().amax(-1, keepdim=True)
        wide = wide / size.clamp(min=torch.finfo(dtype).tiny)
    if state is None:
        shape = coefficients.shape[:2]
        state = LinearState(
            wide.new_zeros(*shape, width, value.shape[-1]), wide.new_zeros(*shape, width // 2)
        )
    if 0 in query.shape:
        return query.new_zeros(*query.shape[:-1], value.shape[-1]), state
    output, state = attend_linear(
        query_map(wide, *turns.tables, **settings),
        key_map(coefficients, *turns.tables),
        value,
        query_map(wide, *turns.still, **settings)[..., : width // 2],
        coefficients * over_all_pairs(*turns.still, width // 2, dtype)[0],
        state,
    )
    # Positions of the keys in Σ K' ⊗ v are reduced by the length of the pass.
    cos, sin = (x.mT for x in over_all_pairs(*turns.back, width // 2, dtype))
    first, second = state.products.chunk(2, dim=2)
    products = torch.cat((first * cos + second * sin, second * cos - first * sin), dim=2)
    return output.to(query.dtype), state._replace(products=products)


def attend_linear(
    query: Tensor, key: Tensor, value: Tensor, weights: Tensor, features: Tensor, state: LinearState
) -> tuple[Tensor, LinearState]:
    """Σ_n (Q_m · K_n) v_n / Σ_n (w_m · f_n) for n ≤ m, and the state after these tokens.

    Chunks see earlier chunks through the state and themselves through scores.

    Args:
        query: Q, (B, H, T, D).
        key: K, (B, G, T, D).
        value: (B, G, T, Dv).
        weights: w, (B, H, T, P), of the normaliser.
        features: f, (B, G, T, P), likewise.
        state: Σ K ⊗ v and Σ f of earlier tokens.
    """
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    size = min(CHUNK, length)
    rows = groups * size
    chunks = math.ceil(length / size)
    missing = chunks * size - length
    if missing:  # padding by nothing is a copy
        query, key, value = (F.pad(x, (0, 0, 0, missing)) for x in (query, key, value))
    # Query heads of a group are further rows of its chunks.
    q = query.view(batch, kv_heads, groups, chunks, size, width).transpose(2, 3)
    q = q.reshape(batch, kv_heads, chunks, rows, width)
    k = key.unflatten(2, (chunks, size))
    v = value.unflatten(2, (chunks, size))
    causal = torch.ones(size, size, dtype=q.dtype, device=q.device).tril().repeat(groups, 1)
    with torch.autocast(query.device.type, enabled=False):  # sums in the dtype of the tensors
        sums = torch.cat((state.products.unsqueeze(2), k.mT @ v), dim=2).cumsum(2)
        output = q @ sums[:, :, :-1] + (q @ k.mT * causal) @ v
    output = output.unflatten(3, (groups, size)).transpose(2, 3)
    output = output.reshape(batch, heads, chunks * size, -1)[:, :, :length]
    totals = features.cumsum(2) + state.coefficients.unsqueeze(2)
    normaliser = (weights.unflatten(1, (kv_heads, groups)) * totals.unsqueeze(2)).sum(-1)
    normaliser = normaliser.flatten(1, 2).unsqueeze(-1)
    # Where nothing is seen, division by infinity gives 0, and so do its gradients.
    output = output / normaliser.masked_fill(normaliser <= 0, math.inf)
    return output, LinearState(sums[:, :, -1], totals[:, :, -1])
