"""The attention core that every CoCA model of the Transformers kind shares.

Legend: B batch, T query length, S key length, H query heads, G key/value heads, D head width,
P = D/2 rotary pairs.

The core hands (Q', K', V) to Transformers' own attention interface, so that SDPA, FlashAttention,
FlexAttention and eager attention all compute CoCA. The cache holds K' after rotation at the usual
width D (``kv_cache="full"``) or the coefficients t before it at width P (``"half"``).
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coca_attention.layers.coca import project_collinear
from coca_attention.models.calibration import fit_t_projection
from coca_attention.models.configuration import rotary_scaling, rotary_width
from coca_attention.models.half_cache import KeyPositions, compiling
from coca_attention.ops import (
    attend_half,
    attend_half_at,
    fold,
    key_map,
    query_map,
    rotary_cos_sin,
    score_scale,
    tile_length,
)

Initialisation = Literal["fold", "calibrated", "random"]


class CoCARotary(nn.Module):
    """cos and sin, half as wide as the rotated part of a head, in float32 or wider.

    Computed from the configuration at every call. It has no buffers: a long input never changes a
    later short one, and there is nothing to go stale when a model is loaded or its
    ``rope_parameters`` are changed.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    @torch.no_grad()
    def forward(
        self, hidden_states: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """cos and sin, each (B, T, R/2) for a rotary width R, at position_ids (B, T)."""
        base, scaling = rotary_scaling(self.config, layer_type)
        return rotary_cos_sin(
            position_ids,
            rotary_width(self.config, layer_type),
            base=base,
            scaling=scaling,
            dtype=torch.promote_types(hidden_states.dtype, torch.float32),
        )


class FoldedLinear(nn.Linear):
    """The T projection, stored folded: one output per rotary pair in place of two.

    A class of its own so that it is initialised as the mean of two rows of an unfolded projection.
    """

    def init_folded(self, std: float) -> None:
        """Draw the weights with std/√2, the bias zero."""
        init.normal_(self.weight, mean=0.0, std=std / 2**0.5)
        if self.bias is not None:
            init.zeros_(self.bias)

    @classmethod
    def from_full_width(cls, projection: nn.Linear, folded: Callable[[Tensor], Tensor]) -> Any:
        """The pair means of a projection's rows.

        Args:
            projection: hidden to G * D.
            folded: (..., D) to (..., P).
        """
        weight = projection.weight.detach()
        rows = folded(weight.t()).t().contiguous()
        made = cls(weight.shape[1], rows.shape[0], bias=False, device="meta")
        made.weight = nn.Parameter(rows, requires_grad=projection.weight.requires_grad)
        if projection.bias is not None:
            made.bias = nn.Parameter(
                folded(projection.bias.detach()), requires_grad=projection.bias.requires_grad
            )
        return made


def separated(fused: nn.Linear, rows: Callable[[Tensor], Tensor]) -> nn.Linear:
    """A projection of its own from some rows of a fused one, its storage not shared.

    Args:
        fused: The projection to queries, keys and values.
        rows: From what it gives, on the last axis, what the new one is to give.
    """
    made = nn.Linear(fused.in_features, 1, bias=False, device="meta")
    for name in ("weight", "bias"):
        parameter = getattr(fused, name)
        if parameter is not None:
            own = rows(parameter.detach().t()).t().clone(memory_format=torch.contiguous_format)
            setattr(made, name, nn.Parameter(own, requires_grad=parameter.requires_grad))
    made.out_features = made.weight.shape[0]
    return made


def head_norm(attention: Any, name: str, spans_heads: bool) -> Callable[[Tensor], Tensor] | None:
    """An attention module's norm of that name on (…, heads, width); None where it has none.

    Args:
        attention: The module.
        name: Such as ``q_norm``.
        spans_heads: See `CollinearAttention`.
    """
    norm = getattr(attention, name, None)
    if norm is None or not spans_heads:
        return norm
    return lambda x: norm(x.flatten(-2)).view(x.shape)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """softmax(scaling * Q K^T + mask) V written out, scores in float32 or wider.

    The kernels form scores in float32; eager attention as families write it forms them in the
    model's dtype, where |q|^2 leaves the range of float16.

    Args:
        module: Knows `num_key_value_groups` and `training`.
        query: (B, H, T, D).
        key: (B, G, S, D).
        value: (B, G, S, D).
        attention_mask: Additive, broadcastable to (B, H, T, S).
        scaling: Multiplies the scores.
        dropout: Probability of dropping an attention weight.

    Returns:
        (B, T, H, D), and the weights (B, H, T, S).
    """
    groups: Any = module.num_key_value_groups
    wide = torch.promote_types(query.dtype, torch.float32)
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query.to(wide) @ key.to(wide).transpose(-2, -1) * scaling
    if attention_mask is not None:
        # Masked means the least number of the mask's dtype: in float16 that is not low enough.
        masked = attention_mask <= torch.finfo(attention_mask.dtype).min / 2
        scores = (scores + attention_mask).masked_fill(masked, torch.finfo(wide).min)
    weights = scores.softmax(-1).to(value.dtype)
    output = F.dropout(weights, p=dropout, training=module.training) @ value
    return output.transpose(1, 2).contiguous(), weights


class CollinearAttention(nn.Module):
    """Projections and scores of CoCA for a decoder layer: mixed in before a family's attention.

    An instance is the family's own attention module whose key projection was exchanged for a T
    projection, so that everything else is as it was: weights, scale, window, hooks.
    """

    output_name = "o_proj"
    """The output projection's name."""
    interleaved = False
    """Pair layout, see `split_pairs`."""
    norm_spans_heads = False
    """Whether q and k norms are over all heads at once, not over each."""
    norm_offset = 0.0
    """What a q or k norm adds to its weight."""
    fused_name: str | None = None
    """The projection to queries, keys and values at once, where a family has one."""

    def __init__(self: Any, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # pyright: ignore[reportCallIssue]
        self.exchange_key_projection("fold")

    @classmethod
    def adopt(
        cls, attention: Any, initialisation: Initialisation, hidden_states: Tensor | None = None
    ) -> None:
        """Turn the family's attention module into this class, in place.

        Args:
            attention: The module.
            initialisation: How its T projection begins, see `convert`.
            hidden_states: What it reads of the calibration texts, (B, T, hidden).
        """
        attention.__class__ = cls
        attention.exchange_key_projection(initialisation, hidden_states)

    @staticmethod
    def split_fused(attention: Any, fused: Tensor) -> Sequence[Tensor]:
        """What a fused projection gives, (…, out), as queries, keys and values.

        Args:
            attention: The family's module, converted or not.
            fused: Heads one after the other on the last axis, there as in the result.
        """
        raise NotImplementedError

    def separate_projections(self: Any) -> None:
        """Make q_proj, k_proj and v_proj of a fused projection, where there is one."""
        if self.fused_name is None:
            return
        fused = getattr(self, self.fused_name)
        self.q_proj, self.k_proj, self.v_proj = (
            separated(fused, lambda x, i=i: self.split_fused(self, x)[i]) for i in range(3)
        )
        delattr(self, self.fused_name)

    def exchange_key_projection(
        self: Any, initialisation: Initialisation, hidden_states: Tensor | None = None
    ) -> None:
        """Put a T projection (and norm) in the place of the key projection (and norm)."""
        self.separate_projections()
        self.t_proj = FoldedLinear.from_full_width(self.k_proj, self._folded)
        if initialisation == "random":
            self.t_proj.init_folded(self.config.initializer_range)
        if initialisation == "calibrated":
            assert hidden_states is not None  # `convert` checks
            weight, bias = fit_t_projection(self, hidden_states)
            self.t_proj.weight.data.copy_(weight)
            if bias is not None:
                self.t_proj.bias.data.copy_(bias)
        del self.k_proj
        if getattr(self, "k_norm", None) is not None:
            # Pair means of normalised keys are 1/√2 as large as the keys where the two members
            # are independent; normalising the means brings them to 1.
            weight = self._folded(self.k_norm.weight.detach() + self.norm_offset) / 2**0.5
            self.t_norm = copy.deepcopy(self.k_norm)
            self.t_norm.weight = nn.Parameter(
                weight - self.norm_offset, requires_grad=self.k_norm.weight.requires_grad
            )
            del self.k_norm

    def _folded(self: Any, x: Tensor) -> Tensor:
        """Pair means of the last axis, of every head where it holds several."""
        heads = x.unflatten(-1, (-1, self.head_dim))
        span = rotary_width(self.config, getattr(self, "layer_type", None))
        return fold(heads, self.interleaved, span).flatten(-2)

    def _norm(self: Any, name: str) -> Callable[[Tensor], Tensor] | None:
        return head_norm(self, name, self.norm_spans_heads)

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        key_positions: KeyPositions | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """One attention layer.

        Args:
            hidden_states: (B, T, hidden).
            attention_mask: What the attention implementation takes.
            position_embeddings: cos and sin from `CoCARotary`.
            past_key_values: Cache, by the name most families use.
            layer_past: Cache, by GPT-NeoX's name.
            key_positions: With a half cache, where its tokens stand, from `CollinearModel`.
            **kwargs: Passed on to the attention implementation.

        Returns:
            (B, T, hidden) and the attention weights where the implementation gives them.
        """
        assert position_embeddings is not None  # always passed by the decoder
        length = hidden_states.shape[1]
        cos, sin = position_embeddings
        form = self.config.coca_form
        query, coefficients, value = project_collinear(
            hidden_states,
            self.q_proj,
            self.t_proj,
            self.v_proj,
            head_dim=self.head_dim,
            q_norm=self._norm("q_norm"),
            t_norm=self._norm("t_norm"),
        )
        divisor = score_scale(query.dtype)
        factor = self.scaling / divisor
        query = query_map(query, cos, sin, form=form, scale=factor, interleaved=self.interleaved)
        cache: Any = past_key_values if past_key_values is not None else layer_past
        half = cache is not None and self.config.kv_cache == "half"
        if half and cache is not None:
            check_cache_width(cache, self.layer_idx, coefficients.shape[-1])
            _, first = cache.get_mask_sizes(length, self.layer_idx)
            coefficients, value = cache.update(coefficients, value, self.layer_idx)
            # A cache that Transformers itself makes is empty before this pass: no positions.
            if key_positions is not None and self._decodes(query, attention_mask):
                output = self._attend_half(
                    query, coefficients, value, key_positions, first, attention_mask
                )
                if output is not None:
                    return self._projected(output.transpose(1, 2)), None
            keys, kind = coefficients.shape[-2], getattr(self, "layer_type", None)
            if keys != length and key_positions is not None:
                cos, sin = key_positions.rotary(kind, first, keys)
        key = key_map(coefficients, cos, sin, form=form)
        if cache is not None and not half:
            check_cache_width(cache, self.layer_idx, key.shape[-1])
            key, value = cache.update(key, value, self.layer_idx)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention
        )
        window = getattr(self.config, "sliding_window", None)
        output, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=divisor,
            dropout=self.attention_dropout if self.training else 0.0,
            sliding_window=getattr(self, "sliding_window", window),
            **kwargs,
        )
        return self._projected(output), weights

    def _projected(self: Any, output: Tensor) -> Tensor:
        """(B, T, H, D) to (B, T, hidden)."""
        return self.get_submodule(self.output_name)(output.flatten(2).contiguous())

    def _decodes(self: Any, query: Tensor, mask: Any) -> bool:
        """Whether `_attend_half` may take the place of the attention that was chosen.

        It is exact too, so it stands in for `scaled_dot_product_attention` where one token is
        decoded.
        """
        return (
            query.shape[-2] == 1
            and self.config._attn_implementation == "sdpa"
            and (mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1))
            and not (self.training or torch.is_grad_enabled())
        )

    def _attend_half(
        self: Any,
        query: Tensor,
        coefficients: Tensor,
        value: Tensor,
        key_positions: KeyPositions,
        first: int,
        mask: Tensor | None,
    ) -> Tensor | None:
        """One new token over a half cache whose slots begin at ``first``, keys never written out.

        None where the tokens do not stand at consecutive positions, unless compiled.
        """
        keys, pairs = coefficients.shape[-2:]
        kind, form = getattr(self, "layer_type", None), self.config.coca_form
        scale = score_scale(query.dtype)
        if compiling():
            cos, sin = key_positions.rotary(kind, first, keys)
            return attend_half_at(
                query, coefficients, value, cos, sin, form=form, attention_mask=mask, scale=scale
            )
        if key_positions.first_position is None:
            return None
        tile = tile_length(coefficients, query.shape[1])
        frames = key_positions.frames(kind, first, keys, pairs, tile)
        if frames is None:
            return None
        return attend_half(query, coefficients, value, frames, attention_mask=mask, scale=scale)


def check_cache_width(cache: Any, layer_idx: int, width: int) -> None:
    """Raise ValueError if a cache holds keys of another width than the ones to be added."""
    layers = getattr(cache, "layers", None)
    if layers is None or layer_idx >= len(layers):
        return
    keys = getattr(layers[layer_idx], "keys", None)
    if isinstance(keys, Tensor) and keys.dim() == 4 and keys.shape[-1] != width:
        raise ValueError(
            f"the cache holds keys of width {keys.shape[-1]} and this model adds keys of width "
            f"{width}: ready-made keys (prefix tuning, a cache of another model or of another "
            'kv_cache) fit only the cache they were made for; set config.kv_cache = "full" for '
            "prefix tuning"
        )
