"""What the attention of a model works with: queries and keys before rotation, and its weights.

Legend: B batch, T length, H query heads, G key/value heads, M sampled queries, D head width.

Queries and keys come from forward hooks, which apply the attention module's own projections and
norms to the hidden states that enter it. Weights come from the arguments of Transformers' attention
function, with whatever a model adds to masks; and of the function that takes its place for a decay,
a window or limited distances. The model is not changed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coca_attention.errors import UserError
from coca_attention.models.attention import CollinearAttention
from coca_attention.models.configuration import rotation
from coca_attention.models.families import Family, family_of, supported_families
from coca_attention.models.fields import attention_of, free_pairs, head_width, window_of
from coca_attention.models.layer_pass import COLLINEAR
from coca_attention.models.projections import project_rotary
from coca_attention.models.rotary import CoCARotary
from coca_attention.models.scaling import rotary_restored
from coca_attention.ops import Rotation, attend_clipped, hidden_by
from coca_attention.ops.positions import join_pairs

VANILLA = "vanilla"
SDPA = "sdpa"


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
    def rotary_width(self) -> int:
        """Rotary width R."""
        return self.rotation.width

    @property
    def free_pairs(self) -> int:
        """Number of free pairs F, which score by ordinary rotary attention; 0 in vanilla models."""
        return 0 if self.form == VANILLA else self.key.shape[-1] - self.query.shape[-1] // 2

    @property
    def theta(self) -> Tensor:
        """Angle per token of the rotated pairs that are not free, float64."""
        return self.rotation.frequencies()[: self.query.shape[-1] // 2 - self.free_pairs]


@dataclass(frozen=True)
class LayerAttention:
    """Attention weights of some queries of one layer."""

    layer: int
    """Index of the layer."""
    attention: str
    """What scores: a score form, ``rotary``, ``alibi``, ``dot product`` (no pair turns), or
    ``unknown``; a form and ``rotary``, if some pairs are free."""
    window: int | None
    """Sliding window in tokens, including the query's own; None for all."""
    weights: Tensor
    """(H, M, T), float32 or wider; 0 for keys that a query does not see."""
    visible: Tensor
    """Number of keys that each query sees, (H, M)."""


def form_of(model: PreTrainedModel) -> str:
    """``vanilla``, or the name of a model's score form; UserError if its family is unknown."""
    config: Any = model.config
    collinear = isinstance(model, _family(model).causal_lm) and attention_of(config) != "rope"
    return config.coca_form if collinear else VANILLA


def _family(model: PreTrainedModel) -> Family:
    family = family_of(model)
    if family is None:
        raise UserError(
            f"{type(model).__name__} is not supported; supported are the causal language models, "
            f"vanilla or CoCA, of {supported_families(model)}"
        )
    return family


def _run(model: PreTrainedModel, input_ids: Tensor, **kwargs: Any) -> Any:
    if model.training:
        raise UserError("the model is in training mode, with dropout: call model.eval()")
    # Transformers' own dynamic scaling would keep the frequencies of this text for the next.
    with rotary_restored(model), torch.no_grad():
        return model(input_ids=input_ids.to(model.device), use_cache=False, **kwargs)


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
    family = _family(model)
    body: Any = model.base_model

    def hook(index: int, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        visit(_captured(index, family, body, attention, args, kwargs))

    hooks = [
        attention.register_forward_pre_hook(partial(hook, index), with_kwargs=True)
        for index, attention in enumerate(family.layout.modules(body))
    ]
    try:
        return _run(model, input_ids, **kwargs)
    finally:
        for each in hooks:
            each.remove()


def collect_layers(model: PreTrainedModel, input_ids: Tensor) -> list[LayerHeads]:
    """Queries and keys of all layers at once; arguments and errors as in `visit_layers`."""
    layers: list[LayerHeads] = []
    visit_layers(model, input_ids, layers.append)
    return layers


def _captured(
    index: int,
    family: Family,
    body: Any,
    attention: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> LayerHeads:
    """Project the hidden states that enter an attention module."""
    hidden = args[0] if args else kwargs["hidden_states"]
    interleaved, scale = family.layout.interleaved, float(attention.scaling)
    kind = getattr(attention, "layer_type", None)
    found = _rotation(body, kind, hidden.shape[1])
    form = VANILLA
    if not isinstance(attention, CollinearAttention):
        query, key = project_rotary(attention, hidden, family.layout)
    else:
        query, key, _ = attention.project(hidden)
        if key.shape[-1] == query.shape[-1]:  # all pairs are free
            first, second = key.chunk(2, dim=-1)
            key = join_pairs(first, second, interleaved, found.width)
        else:
            form = body.config.coca_form
    query, key = query.cpu(), key.cpu()
    if not (query.isfinite().all() and key.isfinite().all()):
        raise UserError(
            f"layer {index}: queries or keys are not finite; the model's weights are damaged, or "
            "its dtype overflows (try float32)"
        )
    roles = kwargs.get("roles")
    tables = kwargs.get("position_embeddings") if roles is None else roles[kind][1]
    if tables is not None:
        _check_tables(index, tables[:2], found)
    learned = getattr(attention, "form_parameters", None)
    return LayerHeads(
        layer=index,
        form=form,
        query=query,
        key=key,
        rotation=found,
        parameters=learned and {name: x.detach().cpu() for name, x in learned.items()},
        interleaved=interleaved,
        window=getattr(attention, "sliding_window", window_of(body.config)),
        scale=scale,
        kind=kind,
    )


def _rotation(body: Any, kind: str | None, length: int) -> Rotation:
    """The rotation for a text of ``length`` tokens."""
    try:
        found = rotation(body.config, kind)
    except ValueError as error:
        raise UserError(f"the model's rotary embedding is not supported: {error}") from error
    # Transformers always selects the longrope factors by the length of the text.
    if found.follows_length or not isinstance(body.rotary_emb, CoCARotary):
        return found.for_length(length)
    return found


def _check_tables(index: int, tables: Any, found: Rotation) -> None:
    """Raise UserError unless cos and sin at position 1 match the rotation.

    Depending on the family, tables contain the R/2 values once, twice, or each value twice.
    """
    cos, sin = (table[0, 1].cpu().double() for table in tables)
    info = torch.finfo(tables[0].dtype)
    # Relative, because the sines of slow pairs are small; for subnormal numbers, their spacing.
    rtol, atol = max(2 * info.eps, 1e-5), info.smallest_normal * info.eps
    expected = found.tables(torch.ones(1), torch.float64)
    for layout in (slice(0, found.width // 2), slice(0, None, 2)):
        if all(
            table[layout].shape == wanted[0].shape
            and torch.allclose(wanted[0], table[layout], rtol=rtol, atol=atol)
            for table, wanted in zip((cos, sin), expected, strict=True)
        ):
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


def attention_rows(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float | None,
    rows: Tensor,
    bias: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention weights of some queries, from the arguments of an attention function.

    Args:
        query: (1, H, T, D).
        key: (1, G, T, D).
        mask: Boolean (True: visible) or additive, broadcastable to (1, H, T, T); None for causal.
        scale: Multiplies the scores; None for D^-1/2.
        rows: Indices of queries, (M,).
        bias: Added to the scores of these queries, broadcastable to (1, H, M, T).
        window: Keys that a query sees if there is no mask; default: all before it.

    Returns:
        The weights (H, M, T), float32 or wider, and the number of visible keys (H, M).
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    key = key[0].to(wide).repeat_interleave(query.shape[1] // key.shape[1], dim=0)
    mask = _mask_of_rows(query, mask, rows, window)[0]
    query = query[0, :, rows].to(wide)
    scores = query @ key.transpose(-2, -1) * (scale or query.shape[-1] ** -0.5)
    if bias is not None:
        scores = scores + bias[0]
    visible = mask
    if mask.dtype != torch.bool:
        visible, scores = ~hidden_by(mask), scores + mask
    return scores.masked_fill(~visible, float("-inf")).softmax(-1), visible.sum(-1)


def _mask_of_rows(query: Tensor, mask: Tensor | None, rows: Tensor, window: int | None) -> Tensor:
    """The mask of some queries, (1, H, M, T)."""
    heads, length = query.shape[1:3]
    if mask is None:
        return visible_keys(rows, length, window).expand(1, heads, -1, -1)
    return mask.expand(1, heads, length, -1)[..., rows, :]


def _clipped_rows(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, far: Any, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """`attention_rows` from the arguments of `collinear_attention` with limited distances."""
    queries, keys = options["positions"]
    mask = _mask_of_rows(query, options["attention_mask"], rows, options["window"])
    wide = torch.promote_types(query.dtype, torch.float32)
    changes = {
        "positions": (queries[..., rows], keys),
        "consecutive": False,
        "attention_mask": mask,
        "is_causal": False,
        "with_weights": True,
    }
    query, far_query = query[..., rows, :], far[0][..., rows, :]
    _, weights = attend_clipped(query, key, far_query, far[1], value.to(wide), **options | changes)
    assert weights is not None
    visible = mask if mask.dtype == torch.bool else ~hidden_by(mask)
    return weights[0], visible[0].sum(-1)


def _rows_of_call(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, far: Any = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """`attention_rows` from the arguments of any attention function."""
    if far is not None:
        return _clipped_rows(query, key, value, rows, far, options)
    bias = options.get("bias")
    if bias is not None:  # a function of positions, which a CoCA model passes to `attend`
        queries, keys = options["positions"]
        bias = bias(queries[:, rows], keys, torch.float32).unsqueeze(1)
    scale = options.get("scaling", options.get("scale"))
    # A window instead of a mask.
    mask, window = options["attention_mask"], options.get("window")
    return attention_rows(query, key, mask, scale, rows, bias, window)


def visit_attention(
    model: PreTrainedModel,
    input_ids: Tensor,
    rows: Tensor,
    visit: Callable[[LayerAttention], Any],
    **kwargs: Any,
) -> Any:
    """Run one forward pass and pass every layer's attention weights of some queries to a function.

    Only these rows of the score matrix are computed.

    Args:
        model: A causal language model in evaluation mode.
        input_ids: (1, T), without padding.
        rows: Indices of queries, (M,).
        visit: Called once per layer, in order.
        **kwargs: Passed to the model.

    Returns:
        The model's output.

    Raises:
        UserError: If the model is in training mode, its attention does not pass through
            Transformers' attention interface, or its scores are not finite.
    """
    rows = rows.to(model.device)
    config: Any = model.config.get_text_config()
    layers = 0

    def look(module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> None:
        nonlocal layers
        layers += 1
        weights, visible = _rows_of_call(query, key, value, rows, **options)
        if not weights.isfinite().all():
            raise UserError(
                f"layer {module.layer_idx}: attention is not finite; the model's weights are "
                "damaged, or its dtype overflows (try float32)"
            )
        window = options.get("sliding_window", options.get("window"))
        window = window or getattr(module, "sliding_window", None)
        scored_by = _scored_by(config, getattr(module, "layer_type", None))
        visit(LayerAttention(module.layer_idx, scored_by, window, weights.cpu(), visible.cpu()))

    with _watched(model, look):
        output = _run(model, input_ids, **kwargs)
    if not layers:
        raise UserError(
            f"{type(model).__name__} does not use Transformers' attention interface, so its "
            "attention cannot be read"
        )
    return output


@contextmanager
def _watched(model: Any, look: Callable[..., None]) -> Iterator[None]:
    """Show ``look`` the arguments of every call of the attention functions."""
    implementation = model.config._attn_implementation
    functions = {name: ALL_ATTENTION_FUNCTIONS[name] for name in (SDPA, COLLINEAR)}

    def watch(name: str, module: Any, *tensors: Any, **options: Any) -> Any:
        query, key, value, mask = tensors
        look(module, query, key, value, attention_mask=mask, **options)
        return functions[name](module, *tensors, **options)

    for name in functions:
        ALL_ATTENTION_FUNCTIONS[name] = partial(watch, name)  # pyright: ignore
    try:
        # Other implementations have masks of their own format, or none to look at.
        if implementation != SDPA:
            model.set_attn_implementation(SDPA)
        yield
    finally:
        for name, function in functions.items():
            ALL_ATTENTION_FUNCTIONS[name] = function
        if implementation != SDPA:
            model.set_attn_implementation(implementation)


def _scored_by(config: Any, kind: str | None) -> str:
    """What scores in layers of a type."""
    if not hasattr(config, "coca_form"):
        found = attention_of(config) or "unknown"
        return "rotary" if found == "rope" else found
    pairs, free = head_width(config) // 2, free_pairs(config, kind)
    if free < pairs:
        return f"{config.coca_form} and rotary" if free else config.coca_form
    return "rotary" if rotation(config, kind).frequencies().any() else "dot product"
