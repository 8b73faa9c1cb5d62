"""The projections of attention modules, and replacing the key projection with a T projection.

Legend: B batch, T length, H query heads, G key/value heads, D head width, P = D/2 rotary pairs, F
free pairs.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from coca_attention.errors import UserError
from coca_attention.models.configuration import free_pairs, rotation, score_form
from coca_attention.ops import fold


@dataclass(frozen=True)
class AttentionLayout:
    """Names and layout of the projections and norms in a family's attention modules."""

    module_name: str = "self_attn"
    output_name: str = "o_proj"
    interleaved: bool = False
    """Pair layout, see `split_pairs`."""
    norm_spans_heads: bool = False
    """Whether q and k norms normalise all heads together, not each separately."""
    norm_offset: float = 0.0
    """Number that a q or k norm adds to its weight."""
    fused_name: str | None = None
    """Name of the fused projection to queries, keys and values, if there is one."""
    split_fused: Callable[[nn.Module, Tensor], Sequence[Tensor]] | None = None
    """From attention module and output (..., out) of the fused projection to queries, keys and
    values, with heads concatenated along the last dimension."""

    def modules(self, body: Any) -> list[Any]:
        """The attention modules of a decoder, in the order of its layers."""
        return [getattr(layer, self.module_name) for layer in body.layers]


class FoldedLinear(nn.Linear):
    """The T projection, initialised like the mean of two rows of an unfolded projection."""

    kv_heads = 1
    free_pairs = 0

    def init_folded(self, std: float) -> None:
        """Initialise the weights with std/√2 (std for free pairs) and the bias with zero."""
        init.normal_(self.weight, mean=0.0, std=std / 2**0.5)
        # Transformers marks loaded weights with an attribute that views do not have.
        if self.free_pairs and not getattr(self.weight, "_is_hf_initialized", False):
            rows = self.weight.detach().unflatten(0, (self.kv_heads, -1))
            init.normal_(rows[:, -2 * self.free_pairs :], mean=0.0, std=std)
        if self.bias is not None:
            init.zeros_(self.bias)


def fold_heads(attention: Any, x: Tensor) -> Tensor:
    """Apply `fold` to every head along the last dimension: (..., G * D) to (..., G * (P + F))."""
    heads = x.unflatten(-1, (-1, attention.head_dim))
    span = rotation(attention.config, getattr(attention, "layer_type", None)).width
    return fold(heads, attention.layout.interleaved, span, attention.free_pairs).flatten(-2)


def head_norm(
    attention: nn.Module, name: str, layout: AttentionLayout
) -> Callable[[Tensor], Tensor] | None:
    """An attention module's norm as a function on (..., heads, width), or None."""
    norm = getattr(attention, name, None)
    if norm is None or not layout.norm_spans_heads:
        return norm
    return lambda x: norm(x.flatten(-2)).view(x.shape)


def replace_key_projection(attention: Any) -> None:
    """Replace the key projection (and norm) of a CoCA module by their pair means, in place."""
    if any(hasattr(parameter, "ds_id") for parameter in attention.parameters()):
        raise UserError(
            "DeepSpeed ZeRO-3 has split the key projections, from which T projections are made: "
            "use ZeRO-2, or FSDP2"
        )
    layout = attention.layout
    attention.free_pairs = free_pairs(attention.config, getattr(attention, "layer_type", None))
    if layout.split_fused is not None:
        fused = getattr(attention, str(layout.fused_name))
        split = layout.split_fused
        attention.q_proj, attention.k_proj, attention.v_proj = (
            _from_rows(fused, lambda x, i=i: split(attention, x)[i]) for i in range(3)
        )
        delattr(attention, str(layout.fused_name))
    attention.t_proj = _from_rows(
        attention.k_proj, lambda x: fold_heads(attention, x), FoldedLinear
    )
    attention.t_proj.free_pairs = attention.free_pairs
    attention.t_proj.kv_heads = attention.k_proj.out_features // attention.head_dim
    del attention.k_proj
    if getattr(attention, "k_norm", None) is not None:
        # If the two members are independent, pair means of normalised keys are 1/√2 as large as
        # the keys, but the T norm scales them to 1: divide its weight by √2.
        # Free pairs keep theirs: a small weight would not survive + 1 - 1.
        old = attention.k_norm.weight
        offset = layout.norm_offset
        weight = fold_heads(attention, old.detach().double())
        pairs, free = attention.head_dim // 2, attention.free_pairs
        turning = weight.unflatten(-1, (-1, pairs + free))[..., : pairs - free]
        turning.add_(offset).div_(2**0.5).sub_(offset)
        attention.t_norm = copy.deepcopy(attention.k_norm)
        attention.t_norm.weight = nn.Parameter(weight.to(old.dtype), old.requires_grad)
        del attention.k_norm
    learned = initial_form_parameters(attention)
    if learned:
        like = attention.t_proj.weight
        attention.form_parameters = nn.ParameterDict({n: x.to(like) for n, x in learned.items()})


def initial_form_parameters(attention: Any) -> dict[str, Tensor]:
    """Initial values of the learned parameters of an attention module's score form."""
    config = attention.config
    collinear = attention.head_dim // 2 - attention.free_pairs
    return score_form(config).initial_parameters(config.num_attention_heads, collinear)


def _from_rows(
    projection: nn.Linear, rows: Callable[[Tensor], Tensor], kind: type[nn.Linear] = nn.Linear
) -> Any:
    """A projection whose outputs are ``rows`` of another one's, without shared storage."""
    new = kind.__new__(kind)
    nn.Module.__init__(new)  # that of Linear draws weights
    for name in ("weight", "bias"):
        parameter = getattr(projection, name)
        if parameter is not None:
            value = rows(parameter.detach().t()).t().clone(memory_format=torch.contiguous_format)
            parameter = nn.Parameter(value, requires_grad=parameter.requires_grad)
        new.register_parameter(name, parameter)
    new.in_features = projection.in_features
    new.out_features = len(new.weight)
    return new
