"""T projections fitted to a rotary model's own scores on calibration texts.

Legend: B batch, T length, H query heads, G key/value heads, D head width, P = D/2 rotary pairs,
m a query's position, n a key's.

The rotary score s_j(m, n) of a pair and its collinear score t_j(n) u_j(m, n) differ by more than a
factor, so no t_j(n) makes them equal. The best fit over the queries that attend to key n is

    t_j(n) = Σ_m a(m, n) s_j(m, n) u_j(m, n) / Σ_m a(m, n) u_j(m, n)²,

where a are the attention weights and u is the score at t = 1. Ridge regression of t_j(n) on the
hidden states gives the projection. Both sums over m reduce to matrix products of the size of
attention's, because s and u are each a sum of two products of a factor at m and a factor at n.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from coca_attention.errors import UserError
from coca_attention.models.configuration import rotation
from coca_attention.models.fields import training_length
from coca_attention.models.projections import AttentionLayout, project_rotary
from coca_attention.ops import key_map, query_map

LONGEST = 1024  # maximum tokens per text, because memory grows quadratically
RIDGE = 1e-2  # relative to the mean square of the hidden states
# Relative to the mean Σ a u² of a pair: limits the influence of keys with little attention.
FLOOR = 0.1


def calibration_texts(tokens: Tensor, config: Any) -> Tensor:
    """Cut token ids (N,) into texts of the training length, at most `LONGEST`: (texts, tokens)."""
    length = min(len(tokens), training_length(config) or LONGEST, LONGEST)
    return tokens[: len(tokens) // length * length].view(-1, length)


@torch.no_grad()
def attention_inputs(
    model: PreTrainedModel,
    modules: list[nn.Module],
    input_ids: Tensor,
    advance: Callable[[], Any] = lambda: None,
) -> list[Tensor]:
    """Hidden states that enter each attention module, (B, T, hidden), for token ids (B, T)."""
    kept: list[list[Any]] = [[] for _ in modules]
    training = model.training
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, rows=rows: rows.append((*args, kwargs.get("hidden_states"))[0]),
            with_kwargs=True,
        )
        for module, rows in zip(modules, kept, strict=True)
    ]
    try:
        model.eval()
        for row in input_ids.to(model.device).split(1):
            model(input_ids=row, use_cache=False)
            advance()
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return [torch.cat(rows) for rows in kept]


def calibration_share(
    model: PreTrainedModel, modules: list[Any], input_ids: Any, group: dist.ProcessGroup | None
) -> tuple[Tensor, dist.ProcessGroup | None]:
    """The texts that this process reads, none on the meta device; the group if they are shared.

    Raises:
        UserError: If T projections of these modules cannot be fitted on the token ids.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.shape[1] < 2:
        got = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else input_ids
        raise UserError(
            f"init calibrated needs calibration, token ids of shape (texts, tokens) with a few "
            f"thousand tokens; got {got}"
        )
    largest = model.config.get_text_config().vocab_size - 1
    if input_ids.min() < 0 or input_ids.max() > largest:
        raise UserError(f"calibration tokens must be between 0 and {largest}")
    if any(getattr(module, "k_norm", None) is not None for module in modules):
        raise UserError(
            "init calibrated does not support models that normalise their keys, because T is then "
            "normalised too: use init fold"
        )
    if model.device.type == "meta":
        return input_ids[:0], None
    if group is None or len(input_ids) < group.size():
        return input_ids, None
    return input_ids[group.rank() :: group.size()], group


@torch.no_grad()
def calibrate_t_projection(
    attention: Any, hidden_states: Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Fit a layer's T projection so that its collinear scores are closest to its rotary scores.

    Rows of free pairs are not changed.

    Args:
        attention: A CoCA attention module that still has its key projection.
        hidden_states: Input of the layer for B texts from position 0, (B, T, hidden).
        group: Processes that fit the same projection, each with texts of its own.
    """

    def over_all_texts(x: Tensor) -> Tensor:
        if group is not None:
            dist.all_reduce(x, group=group)
        return x

    sums = [_score_sums(attention, row) for row in hidden_states.split(1)]
    products, squares = (torch.cat(rows) for rows in zip(*sums, strict=True))  # (B * T, G * P)
    tokens = over_all_texts(squares.new_tensor(len(squares)))
    mean = over_all_texts(squares.sum(0)) / tokens
    targets = products / (squares + FLOOR * mean).clamp_min(1e-30)
    inputs = hidden_states.flatten(0, 1).double()
    if attention.k_proj.bias is not None:
        inputs = torch.cat((inputs, torch.ones_like(inputs[:, :1])), dim=-1)
    ridge = RIDGE * len(inputs) * inputs.square().mean()
    gram = inputs.T @ inputs
    gram.diagonal().add_(ridge)
    right = over_all_texts(inputs.T @ targets)
    rows = torch.linalg.solve(over_all_texts(gram), right).T
    pairs, collinear = attention.head_dim // 2, attention.head_dim // 2 - attention.free_pairs
    weight, bias = attention.t_proj.weight, attention.t_proj.bias
    fitted = [(weight, rows[:, : weight.shape[1]])]
    if bias is not None:
        fitted.append((bias, rows[:, -1]))
    for parameter, new in fitted:
        current = parameter.data.unflatten(0, (-1, pairs + attention.free_pairs))
        current[:, :collinear] = new.unflatten(0, (-1, pairs))[:, :collinear].to(current.dtype)


def _score_sums(attention: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_m a s u and Σ_m a u² for every token of a text, (T, G * P) each, in float64."""
    config, layout = attention.config, attention.layout
    length, pairs = hidden_states.shape[1], attention.head_dim // 2
    positions = torch.arange(length, device=hidden_states.device)
    found = rotation(config, getattr(attention, "layer_type", None))
    tables = found.tables(positions, torch.float64)
    query, key = (x.double() for x in project_rotary(attention, hidden_states, AttentionLayout()))
    settings: Any = {"form": config.coca_form, "interleaved": layout.interleaved}
    unit = query_map(query, *tables, **settings)
    ones = query.new_ones(*key.shape[:3], pairs)
    unit_key = key_map(ones, *tables)
    # With all pairs free, the map is the plain rotation, with output in the half-split layout.
    query, key = (query_map(x, *tables, free_pairs=pairs, **settings) for x in (query, key))

    kv_heads = key.shape[1]
    scores = query.unflatten(1, (kv_heads, -1)) @ key.unsqueeze(2).transpose(-2, -1)
    future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
    weights = (scores * attention.scaling).masked_fill(future, -torch.inf).softmax(-1)

    def summed(x: Tensor, at_key: Tensor) -> Tensor:
        """Σ_m a(m, n) u(m, n) (x · at_key)(m, n), also over the query heads of a key head."""
        total = torch.zeros_like(ones)
        for a, at_n in zip(x.chunk(2, -1), at_key.chunk(2, -1), strict=True):
            for b, unit_n in zip(unit.chunk(2, -1), unit_key.chunk(2, -1), strict=True):
                both = (a * b).unflatten(1, (kv_heads, -1))
                total += (weights.transpose(-2, -1) @ both).sum(2) * at_n * unit_n
        return total.squeeze(0).transpose(0, 1).flatten(1)

    return summed(query, key), summed(unit, unit_key)
