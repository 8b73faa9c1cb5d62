"""Queries and keys of every layer of a model as it reads, before rotation.

Legend: B batch, T length, H query heads, G key/value heads, D head width, R rotary width.

Taken by forward hooks from the hidden states that reach each attention module, through the
module's own projections and norms. The model stays as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coca_attention.errors import UserError
from coca_attention.layers.coca import project_collinear
from coca_attention.models.attention import CoCARotary, CollinearAttention, head_norm
from coca_attention.models.configuration import rotary_scaling, rotary_width
from coca_attention.models.conversion import vanilla_type
from coca_attention.models.decoder import CollinearForCausalLM
from coca_attention.models.families import FAMILIES, family_of
from coca_attention.ops import inverse_frequencies

ScoreForm = Literal["vanilla", "slack", "strict", "linear"]


@dataclass(frozen=True)
class LayerHeads:
    """What one attention layer made of a text, on the CPU."""

    layer: int
    """Index of the layer."""
    form: ScoreForm
    """``vanilla`` for rotary attention, or the CoCA form."""
    query: Tensor
    """q before rotation, (B, H, T, D), in the model's dtype."""
    key: Tensor
    """k before rotation, (B, G, T, D); of a CoCA model t, (B, G, T, D/2), at least zero."""
    theta: Tensor
    """Angle per token of every rotated pair, (R/2,), float64."""
    magnitude: float
    """What the rotary rule multiplies cos and sin by: 1 but for yarn and longrope."""
    interleaved: bool
    """Pair layout of q and k, see `split_pairs`."""
    window: int | None
    """Tokens that the layer sees, the query's own included; None for all."""
    scale: float
    """What the layer multiplies scores by before the softmax."""
    kind: str | None
    """The layer's kind where the family has several, such as ``sliding_attention``."""

    @property
    def rotary_width(self) -> int:
        """R."""
        return 2 * len(self.theta)


def score_form(model: PreTrainedModel) -> ScoreForm:
    """How a model scores: ``vanilla``, ``slack``, ``strict`` or ``linear``.

    Raises:
        UserError: If the model is of no family whose queries and keys are known.
    """
    family = _family(model)
    return model.config.coca_form if isinstance(model, family) else "vanilla"


def _family(model: PreTrainedModel) -> type[CollinearForCausalLM]:
    family = family_of(model)
    if family is not None:
        return family
    known = ", ".join(vanilla_type(family) for family in FAMILIES)
    hint = ""
    if hasattr(model, "merge_and_unload"):
        hint = "; merge the adapters first (merge_and_unload)"
    raise UserError(
        f"the queries and keys of {type(model).__name__} are not known: supported are the causal "
        f"language models of the families {known}, and the CoCA models made of them{hint}"
    )


def visit_layers(
    model: PreTrainedModel, input_ids: Tensor, visit: Callable[[LayerHeads], Any], **kwargs: Any
) -> Any:
    """One forward pass; every layer's queries and keys are handed over as it runs.

    Nothing is kept here, so memory is that of one layer.

    Args:
        model: A causal language model of a supported family, in evaluation mode.
        input_ids: (B, T), without padding, T at least 2; positions begin at 0.
        visit: Called once a layer, in their order.
        **kwargs: Passed on to the model.

    Returns:
        What the model returns.

    Raises:
        UserError: If the model is of no supported family, is in training mode, answers NaN, or
            rotates by other angles than its configuration says.
    """
    form = score_form(model)
    if model.training:
        raise UserError("the model is in training mode, so that dropout would act: model.eval()")
    family = _family(model)
    body: Any = model.base_model
    taking = [
        getattr(layer, family.body_class.attention_name).register_forward_pre_hook(
            partial(_take, index, form, family, body, visit), with_kwargs=True
        )
        for index, layer in enumerate(body.layers)
    ]
    try:
        with torch.no_grad():
            return model(input_ids=input_ids.to(model.device), use_cache=False, **kwargs)
    finally:
        for hook in taking:
            hook.remove()


def collect_layers(model: PreTrainedModel, input_ids: Tensor) -> list[LayerHeads]:
    """Queries and keys of all layers at once; arguments and errors as of `visit_layers`."""
    layers: list[LayerHeads] = []
    visit_layers(model, input_ids, layers.append)
    return layers


def _take(
    index: int,
    form: ScoreForm,
    family: type[CollinearForCausalLM],
    body: Any,
    visit: Callable[[LayerHeads], Any],
    attention: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """The hook: project the hidden states that an attention module is about to read."""
    hidden = args[0] if args else kwargs["hidden_states"]
    if form == "vanilla":
        query, key = _project_vanilla(attention, hidden, family.body_class.attention_class)
    else:
        query, key, _ = project_collinear(
            hidden,
            attention.q_proj,
            attention.t_proj,
            attention.v_proj,
            head_dim=attention.head_dim,
            q_norm=attention._norm("q_norm"),
            t_norm=attention._norm("t_norm"),
        )
    query, key = query.cpu(), key.cpu()
    if not (query.isfinite().all() and key.isfinite().all()):
        raise UserError(
            f"layer {index}: queries or keys are not finite numbers; the model's weights are "
            "damaged, or its precision overflows (try float32)"
        )
    kind = getattr(attention, "layer_type", None)
    theta, magnitude = _frequencies(body, kind, hidden.shape[1])
    tables = kwargs.get("position_embeddings")
    if tables is not None:
        _check_tables(index, tables, theta, magnitude)
    window = getattr(body.config, "sliding_window", None)
    visit(
        LayerHeads(
            layer=index,
            form=form,
            query=query,
            key=key,
            theta=theta,
            magnitude=magnitude,
            interleaved=family.body_class.attention_class.interleaved,
            window=getattr(attention, "sliding_window", window),
            scale=float(attention.scaling),
            kind=kind,
        )
    )


def _project_vanilla(
    attention: Any, hidden: Tensor, kind: type[CollinearAttention]
) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D) and k (B, G, T, D) of a family's own attention module.

    Args:
        attention: The module.
        hidden: (B, T, hidden).
        kind: The family's CoCA attention, which knows its layout and norms.
    """
    if kind.fused_name is None:
        query, key = attention.q_proj(hidden), attention.k_proj(hidden)
    else:
        query, key, _ = kind.split_fused(attention, getattr(attention, kind.fused_name)(hidden))
    width = getattr(attention, "head_dim", None) or attention.head_size

    def heads(x: Tensor, name: str) -> Tensor:
        x, norm = x.unflatten(-1, (-1, width)), head_norm(attention, name, kind.norm_spans_heads)
        return (x if norm is None else norm(x)).transpose(1, 2)

    return heads(query, "q_norm"), heads(key, "k_norm")


def _frequencies(body: Any, kind: str | None, length: int) -> tuple[Tensor, float]:
    """θ_j (R/2,), float64, and the magnitude, as a text of ``length`` tokens is read."""
    config = body.config
    try:
        base, scaling = rotary_scaling(config, kind)
    except ValueError as error:
        raise UserError(f"the model's rotary embedding is not known: {error}") from error
    # Transformers chooses the longrope factors by the text's length, our own module does not.
    follows = scaling.kind == "longrope" and not isinstance(body.rotary_emb, CoCARotary)
    if scaling.kind == "dynamic" or follows:
        scaling = replace(scaling, length=length)
    return inverse_frequencies(rotary_width(config, kind), base, scaling), scaling.magnitude


def _check_tables(index: int, tables: Any, theta: Tensor, magnitude: float) -> None:
    """Raise UserError unless cos and sin at position 1 are those of θ.

    Families lay out the R/2 angles once, twice over, or each number twice.
    """
    cos, sin = (table[0, 1].cpu().double() for table in tables)
    info = torch.finfo(tables[0].dtype)
    # Relative, for the slowest pairs' sines are small; below the normal numbers, their spacing.
    rtol, atol = max(2 * info.eps, 1e-5), info.smallest_normal * info.eps
    expected = (theta.cos() * magnitude, theta.sin() * magnitude)
    for layout in (slice(0, len(theta)), slice(0, None, 2)):
        if all(
            found[layout].shape == wanted.shape
            and torch.allclose(wanted, found[layout], rtol=rtol, atol=atol)
            for found, wanted in zip((cos, sin), expected, strict=True)
        ):
            return
    raise UserError(
        f"layer {index} rotates by other angles than the configuration's rope_parameters say; "
        "with rope_type dynamic after a longer text, or with a rotary module of another kind, "
        "they cannot be known: set the scaling anew (set_rotary_scaling), or load the model again"
    )
