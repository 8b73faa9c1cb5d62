"""The queries and keys of a model's attention, before rotation.

Legend: B batch, T length, H query heads, G key/value heads, M sampled queries, D head width.

Forward hooks apply the attention module's own projections and norms to the hidden states that enter
it. The model is not changed.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coca_attention.errors import UserError
from coca_attention.models.attention import CollinearAttention
from coca_attention.models.configuration import attention_of, rotation, window_of
from coca_attention.models.families import family_of
from coca_attention.models.methods import applied
from coca_attention.models.projections import AttentionLayout, head_norm
from coca_attention.models.rotary import CoCARotary
from coca_attention.ops import Rotation
from coca_attention.ops.positions import join_pairs

VANILLA = "vanilla"


@dataclass(frozen=True)
class LayerHeads:
    """Queries and keys of one attention layer for a text, on the CPU."""

    layer: int
    """Index of the layer."""
    form: str
    """``vanilla`` for rotary attention, also where all pairs are free, or the name of the form."""
    query: Tensor
    """q before rotation, (B, H, T, D), in the model's dtype."""
    key: Tensor
    """k before rotation, (B, G, T, D); in a CoCA model the coefficients, (B, G, T, D/2 + F)."""
    rotation: Rotation
    """Rotation of the pairs."""
    parameters: dict[str, Tensor] | None
    """Learned parameters of the score form."""
    interleaved: bool
    """Pair layout of q and k, see `split_pairs`."""
    window: int | None
    """Sliding window in tokens, including the query's own; None for all."""
    scale: float
    """Scale of the scores before the softmax."""
    kind: str | None
    """Layer type, such as ``sliding_attention``, if the family has several."""

    @property
    def free_pairs(self) -> int:
        """Number of free pairs F, which score by ordinary rotary attention; 0 in vanilla models."""
        return 0 if self.form == VANILLA else self.key.shape[-1] - self.query.shape[-1] // 2

    @property
    def theta(self) -> Tensor:
        """Angle per token of the rotated pairs that are not free, float64."""
        return self.rotation.frequencies()[: self.query.shape[-1] // 2 - self.free_pairs]


def form_of(model: PreTrainedModel) -> str:
    """``vanilla``, or the name of a model's score form; UserError if its family is unknown."""
    config: Any = model.config
    collinear = isinstance(model, family_of(model).causal_lm) and attention_of(config) != "rope"
    return config.coca_form if collinear else VANILLA


def visit_layers(
    model: PreTrainedModel, input_ids: Tensor, visit: Callable[[LayerHeads], Any], **kwargs: Any
) -> Any:
    """Run one forward pass and pass every layer's queries and keys to a function.

    The queries and keys of only one layer are in memory at a time.

    Args:
        model: A causal language model of a supported family, in evaluation mode.
        input_ids: (B, T), without padding, T at least 2; positions start at 0.
        visit: Called once per layer, in order.
        **kwargs: Passed to the model.

    Returns:
        The model's output.

    Raises:
        UserError: If the model's family is not supported, the model is in training mode, queries or
            keys are not finite, or the model's rotary angles differ from its configuration.
    """
    layout = family_of(model).layout
    if model.training:
        raise UserError("the model is in training mode, with dropout: call model.eval()")

    def hook(index: int, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        visit(_captured(index, layout, model.base_model, attention, args, kwargs))

    with ExitStack() as hooks:
        for index, attention in enumerate(layout.modules(model.base_model)):
            each = attention.register_forward_pre_hook(partial(hook, index), with_kwargs=True)
            hooks.enter_context(each)
        return read_text(model, input_ids, **kwargs)


def read_text(model: PreTrainedModel, input_ids: Tensor, **kwargs: Any) -> Any:
    """The output of one forward pass, which does not change what later passes compute."""
    # Transformers' own dynamic scaling would keep the frequencies of this text for the next.
    with applied(model, "none"), torch.no_grad():
        return model(input_ids=input_ids.to(model.device), use_cache=False, **kwargs)


def collect_layers(model: PreTrainedModel, input_ids: Tensor) -> list[LayerHeads]:
    """Queries and keys of all layers at once; arguments and errors as in `visit_layers`."""
    layers: list[LayerHeads] = []
    visit_layers(model, input_ids, layers.append)
    return layers


def _captured(
    index: int, layout: AttentionLayout, body: Any, attention: Any, args: Any, kwargs: Any
) -> LayerHeads:
    """Project the hidden states that enter an attention module."""
    hidden = args[0] if args else kwargs["hidden_states"]
    kind, scale = getattr(attention, "layer_type", None), float(attention.scaling)
    turns = _rotation(body, kind, hidden.shape[1])
    form = VANILLA
    if not isinstance(attention, CollinearAttention):
        query, key = _project_rotary(attention, hidden, layout)
    else:
        query, key, _ = attention.project(hidden)
        if key.shape[-1] == query.shape[-1]:  # all pairs are free
            first, second = key.chunk(2, dim=-1)
            key = join_pairs(first, second, layout.interleaved, turns.width)
        else:
            form = body.config.coca_form
    query, key = query.cpu(), key.cpu()
    if not (query.isfinite().all() and key.isfinite().all()):
        raise UserError(
            f"layer {index}: queries or keys are not finite; the model's weights are damaged, or "
            "its dtype overflows (try float32)"
        )
    roles = getattr(kwargs.get("decoder_pass"), "roles", None)
    tables = kwargs.get("position_embeddings") if roles is None else roles[kind][1]
    if tables is not None:
        _check_tables(index, tables[:2], turns)
    learned = getattr(attention, "form_parameters", None)
    return LayerHeads(
        layer=index,
        form=form,
        query=query,
        key=key,
        rotation=turns,
        parameters=learned and {name: x.detach().cpu() for name, x in learned.items()},
        interleaved=layout.interleaved,
        window=getattr(attention, "sliding_window", window_of(body.config)),
        scale=scale,
        kind=kind,
    )


def _project_rotary(
    attention: Any, hidden: Tensor, layout: AttentionLayout
) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D) and k (B, G, T, D) of a family's original attention, before rotation."""
    if layout.split_fused is None:
        query, key = attention.q_proj(hidden), attention.k_proj(hidden)
    else:
        fused = getattr(attention, str(layout.fused_name))(hidden)
        query, key, _ = layout.split_fused(attention, fused)
    width = getattr(attention, "head_dim", None) or attention.head_size

    def heads(x: Tensor, name: str) -> Tensor:
        x, norm = x.unflatten(-1, (-1, width)), head_norm(attention, name, layout)
        return (x if norm is None else norm(x)).transpose(1, 2)

    return heads(query, "q_norm"), heads(key, "k_norm")


def _rotation(body: Any, kind: str | None, length: int) -> Rotation:
    """The rotation for a text of ``length`` tokens."""
    try:
        turns = rotation(body.config, kind)
    except ValueError as error:
        raise UserError(f"the model's rotary embedding is not supported: {error}") from error
    # Transformers always selects the longrope factors by the length of the text.
    if turns.follows_length or not isinstance(body.rotary_emb, CoCARotary):
        return turns.for_length(length)
    return turns


def _check_tables(index: int, tables: Any, turns: Rotation) -> None:
    """Raise UserError unless cos and sin at position 1 match the rotation."""
    found = torch.stack([table[0, 1].cpu().double() for table in tables])
    info = torch.finfo(tables[0].dtype)
    # Relative, because the sines of slow pairs are small; for subnormal numbers, their spacing.
    rtol, atol = max(2 * info.eps, 1e-5), info.smallest_normal * info.eps
    expected = torch.cat(turns.tables(torch.ones(1), torch.float64))
    # Depending on the family, tables contain the R/2 values once, twice, or each value twice.
    for values in (found[:, : turns.width // 2], found[:, ::2]):
        if values.shape == expected.shape and torch.allclose(expected, values, rtol, atol):
            return
    raise UserError(
        f"layer {index}: the rotary angles differ from the configuration's rope_parameters, for "
        "example with rope_type dynamic after a longer text, or with a custom rotary module: set "
        "the scaling again (set_rotary_scaling), or reload the model"
    )


def visible_keys(queries: Tensor, length: int, window: int | None = None) -> Tensor:
    """Mask of the keys visible to queries of a causal layer, (M,) to (M, T), boolean."""
    distance = queries.unsqueeze(-1) - torch.arange(length, device=queries.device)
    return (distance >= 0) & (distance < (window or length))
