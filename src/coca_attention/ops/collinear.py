"""Collinear Constrained Attention (CoCA): every key is collinear with the query, k = q * t.

Legend: B batch, T query length, S key length, H query heads, G key/value heads, D head width.

The paper writes the scores with one key for every (query, key) pair. They are ordinary dot products
of an effective query and an effective key (`maps`), so any kernel for softmax(Q K^T) V computes
CoCA exactly, in memory linear in S. Scores of shift-invariant forms depend only on m - n. Scores of
the slack form depend on both positions, so it needs true positions.
"""

import torch
from torch import Tensor

from coca_attention.ops.attention import attend
from coca_attention.ops.checks import check_operands, check_positions
from coca_attention.ops.distances import attend_by_distance, far_query_map
from coca_attention.ops.forms import ScoreForm, check_shift_invariant, get_form
from coca_attention.ops.maps import key_map, query_map, score_scale
from coca_attention.ops.positions import Rotation, rotation_of


def coca_attention(
    query: Tensor,
    key_coefficients: Tensor,
    value: Tensor,
    *,
    form: str | ScoreForm = "slack",
    rotation: Rotation | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    interleaved: bool = False,
    parameters: dict[str, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    is_causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Collinear Constrained Attention (arXiv 2309.08646).

    Args:
        query: q before rotation, (B, H, T, D), D even. When T < S the queries are the last T
            positions.
        key_coefficients: t, already non-negative (the paper's ReLU applied), (B, G, S, D/2);
            G divides H. With F free pairs (B, G, S, D/2 + F), see `coca_attention.ops.maps`; at
            full width D all pairs are free, which is rotary attention with these keys. Values are
            not checked, since that would wait for the GPU: a negative t reverses the sign of its
            pair's score.
        value: (B, G, S, Dv); Dv may differ from D.
        form: Score form or its name: ``slack`` (Eq. 10, what the authors trained), ``strict``
            (Eq. 9 = Eq. 17, shift-invariant) or ``magnitude`` (cf. PoPE, arXiv 2509.10534,
            shift-invariant: |q_j| instead of |q_j|^2).
        rotation: Rotation of the pairs; default `Rotation(D)`. A smaller width is partial rotary.
        query_positions: (T,) or (B, T); default: the last T of 0 … S - 1.
        key_positions: (S,) or (B, S); default 0 … S - 1. Pass the true positions of padded or
            packed batches, because the slack form is not shift-invariant.
        interleaved: Pair layout of the query: False for pairs (j, j + D/2), True for (2j, 2j + 1).
        parameters: The form's learned parameters, each (H, ...); default: their initial
            values. The built-in forms have none.
        attention_mask: Boolean (True = may attend) or additive, broadcastable to (B, H, T, S);
            applied in addition to causality.
        is_causal: Whether to apply a causal mask by index, not by position: query i sees keys
            0 … S - T + i.
        window: Keys that a query sees in causal attention, its own included, by index like
            causality; time and memory are then linear in T.
        scale: Multiplies the scores; default 1/sqrt(D).

    Returns:
        (B, H, T, Dv) in the dtype of the query.

    Raises:
        ValueError: If a shape or a parameter's name does not match; the message says which, and
            what was expected.
        TypeError: If query, key coefficients and value differ in dtype.
    """
    form = get_form(form)
    check_operands(query, key_coefficients, value)
    queries, width = query.shape[-2:]
    keys = key_coefficients.shape[-2]
    free_pairs = key_coefficients.shape[-1] - width // 2
    rotation = rotation_of(rotation, width)
    distance_map = rotation.distance_map
    if distance_map is not None and free_pairs < width // 2:
        check_shift_invariant(form, "a distance map")
    if distance_map is not None and (window is not None or not is_causal):
        raise ValueError("a distance map requires causal attention without a window")
    if rotation.temperature is not None and not is_causal:
        raise ValueError("a temperature counts the keys before a query: it requires is_causal=True")
    given = query_positions is not None or key_positions is not None
    key_at = key_positions
    if key_at is None:
        key_at = torch.arange(keys, device=query.device)
    check_positions("key_positions", key_at, len(query), keys)
    query_at = query_positions
    if query_at is None:
        if queries > keys:
            raise ValueError(
                f"{queries} queries and {keys} keys: without query_positions the queries are the "
                "last positions of the keys, so there must be at least as many keys. Tensors are "
                f"(batch, heads, length, width); got query {tuple(query.shape)}"
            )
        query_at = key_at[..., keys - queries :]
    check_positions("query_positions", query_at, len(query), queries)
    wide = torch.promote_types(query.dtype, torch.float32)
    divisor = score_scale(query.dtype)
    factor = rotation.query_factor(query_at, wide, window)

    def map_query(cos: Tensor, sin: Tensor) -> Tensor:
        return query_map(
            query,
            cos,
            sin,
            factor=factor,
            form=form,
            scale=(width**-0.5 if scale is None else scale) / divisor,
            interleaved=interleaved,
            free_pairs=free_pairs,
            parameters=parameters,
        )

    cos, sin = rotation.tables(key_at, wide)
    k = key_map(key_coefficients, cos, sin, free_pairs=free_pairs)
    if query_positions is None:  # the last ones of the keys
        q = map_query(cos[..., keys - queries :, :], sin[..., keys - queries :, :])
    else:
        q = map_query(*rotation.tables(query_at, wide))
    if distance_map is not None and (given or keys > distance_map.unchanged):
        far_q = map_query(*rotation.far_tables(query_at, wide))
        if distance_map.is_limit:
            far_q = far_query_map(far_q, free_pairs)
            far_k = key_coefficients
        elif distance_map.shares_keys:
            far_k = k
        else:
            cos, sin = rotation.tables(key_at, wide, of="far")
            far_k = key_map(key_coefficients, cos, sin, free_pairs=free_pairs)
        return attend_by_distance(
            q,
            k,
            far_q,
            far_k,
            value,
            query_positions=query_at,
            key_positions=key_at,
            near=distance_map.near,
            consecutive=None if given else True,
            attention_mask=attention_mask,
            scale=divisor,
        )
    return attend(
        q,
        k,
        value,
        attention_mask=attention_mask,
        is_causal=is_causal,
        window=window,
        scale=divisor,
        bias=rotation.bias,
        positions=(query_at, key_at),
    )
