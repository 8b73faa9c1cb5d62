"""The attention core shared by all CoCA models for Transformers.

Legend: B batch, T query length, S key length, H query heads, G key/value heads, D head width,
P = D/2 rotary pairs, F free pairs.

The core passes (Q', K', V) to Transformers' attention interface, so SDPA, FlashAttention,
FlexAttention and eager attention all compute CoCA. What they do not compute, or not as fast, does
`LayerPass`.

The cache stores K' after rotation, of the usual width D (``kv_cache="full"``), or the coefficients
before rotation, of width P + F (``"half"``, and with limited distances).
"""

from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coca_attention.layer import project_collinear
from coca_attention.models.key_positions import KeyPositions
from coca_attention.models.layer_pass import LayerPass, Limit
from coca_attention.models.projections import (
    AttentionLayout,
    head_norm,
    replace_key_projection,
)
from coca_attention.models.rotary import Far
from coca_attention.ops import hidden_by, key_map, query_map, score_scale


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
    """softmax(scaling * Q K^T + mask) V without a fused kernel, with scores in float32 or wider.

    Fused kernels compute scores in float32. The families' own eager attention computes them in the
    model's dtype, and |q|^2 exceeds the range of float16.

    Args:
        module: The attention module; provides `num_key_value_groups` and `training`.
        query: (B, H, T, D).
        key: (B, G, S, D).
        value: (B, G, S, D).
        attention_mask: Boolean (True = may attend) or additive, broadcastable to (B, H, T, S).
        scaling: Multiplies the scores.
        dropout: Probability of dropping an attention weight.

    Returns:
        The output (B, T, H, D) and the attention weights (B, H, T, S).
    """
    repeats: Any = module.num_key_value_groups
    wide = torch.promote_types(query.dtype, torch.float32)
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = query.to(wide) @ key.to(wide).transpose(-2, -1) * scaling
    if attention_mask is not None:
        if attention_mask.dtype != torch.bool:
            scores = scores + attention_mask
        scores = scores.masked_fill(hidden_by(attention_mask), torch.finfo(wide).min)
    weights = scores.softmax(-1).to(value.dtype)
    output = F.dropout(weights, p=dropout, training=module.training) @ value
    return output.transpose(1, 2).contiguous(), weights


class CollinearAttention(nn.Module):
    """Collinear attention for a decoder layer: a mixin placed before a family's attention class.

    An instance is the family's own attention module with its key projection replaced by a T
    projection. Everything else is unchanged: other weights, scale, window, hooks.
    """

    layout: ClassVar[AttentionLayout] = AttentionLayout()
    # What Q' is divided by. Serving engines read it from the module before the first pass, so it is
    # the same in every dtype; as a power of two it changes no score.
    kernel_scale: ClassVar[float] = score_scale(torch.float16)

    def __init__(self: Any, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # pyright: ignore[reportCallIssue]
        replace_key_projection(self)

    def project(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, T, D) before rotation, coefficients (B, G, T, P + F) and V (B, G, T, D)."""
        return project_collinear(
            hidden_states,
            self.q_proj,
            self.t_proj,
            self.v_proj,
            head_dim=self.head_dim,
            q_norm=head_norm(self, "q_norm", self.layout),
            t_norm=head_norm(self, "t_norm", self.layout),
        )

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor, Tensor | None, Any, Far | None] | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        key_positions: KeyPositions | None = None,
        roles: dict[str, tuple[Any, Any]] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """One attention layer.

        Args:
            hidden_states: (B, T, hidden).
            attention_mask: In the format of the attention implementation.
            position_embeddings: From `CoCARotary`.
            past_key_values: Cache, as most families name it.
            layer_past: Cache, as GPT-NeoX names it.
            key_positions: With a half cache, a decay or limited distances, the positions of the
                tokens in the cache and of this pass, from `CollinearModel`.
            roles: Where one set of rotary parameters serves local and global layers, the mask and
                the position embeddings of each layer type, from `CollinearModel`.
            **kwargs: Passed to the attention implementation.

        Returns:
            (B, T, hidden), and the attention weights if the implementation returns them.
        """
        if roles is not None:
            attention_mask, position_embeddings = roles[self.layer_type]
        assert position_embeddings is not None  # always passed by the decoder
        cos, sin, factor, bias, far = position_embeddings
        config, length = self.config, hidden_states.shape[1]
        projected, coefficients, value = self.project(hidden_states)
        query_at = partial(
            query_map,
            projected,
            form=config.coca_form,
            scale=self.scaling / self.kernel_scale,
            factor=factor,
            interleaved=self.layout.interleaved,
            free_pairs=self.free_pairs,
            parameters=getattr(self, "form_parameters", None),
        )
        query = query_at(cos, sin)

        cache: Any = past_key_values if past_key_values is not None else layer_past
        half = cache is not None and (config.kv_cache == "half" or far is not None)
        first = 0
        if cache is not None and key_positions is not None:
            _, first = cache.get_mask_sizes(length, self.layer_idx)
        if half:
            coefficients, value = self._cached(cache, coefficients, value)
        keys = coefficients.shape[-2]
        layer = LayerPass(self, attention_mask, bias, key_positions, first)
        if far is not None:
            beyond = min(keys, layer.window or keys) > far.max_distance
            layer.check_limits(beyond=beyond)
            if not beyond:
                far, layer = None, layer._replace(bias=None)  # both begin farther away
        limit = None if far is None else Limit(query_at(*far.tables), far.max_distance)

        output, weights = None, None
        if half and key_positions is not None:
            # Without key_positions Transformers has created the cache, which was empty before.
            if limit is None and layer.decodes(query):
                output = layer.attend_half(query, coefficients, value)
            if output is None and keys != length:
                cos, sin = layer.tables(keys)
        if output is None and limit is not None:
            output, weights = layer.attend_far(query, limit, coefficients, value, (cos, sin))
        if output is not None:
            return self._projected(output, hidden_states), weights

        key = key_map(coefficients, cos, sin, free_pairs=self.free_pairs)
        if cache is not None and not half:
            key, value = self._cached(cache, key, value)
        output = layer.attend_keys(query, key, value)
        if output is None:
            attention = ALL_ATTENTION_FUNCTIONS.get_interface(
                config._attn_implementation, eager_attention
            )
            output, weights = attention(
                self,
                query,
                key,
                value,
                layer.mask_for(query, key.shape[-2]),
                scaling=self.kernel_scale,
                dropout=layer.dropout,
                sliding_window=layer.window,
                **kwargs,
            )
        return self._projected(output, hidden_states), weights

    def _projected(self: Any, output: Tensor, hidden_states: Tensor) -> Tensor:
        """(B, T, H, D), or (B * T, H * D) from a serving engine, to (B, T, hidden)."""
        output = output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return self.get_submodule(self.layout.output_name)(output)

    def _cached(self: Any, cache: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of this layer, those of this pass added."""
        check_cache_width(cache, self.layer_idx, key.shape[-1])
        return cache.update(key, value, self.layer_idx)


def check_cache_width(cache: Any, layer_idx: int, width: int) -> None:
    """Raise ValueError if the width of the cached keys differs from that of new keys."""
    layers = getattr(cache, "layers", None)
    if layers is None or layer_idx >= len(layers):
        return
    keys = getattr(layers[layer_idx], "keys", None)
    if isinstance(keys, Tensor) and keys.dim() == 4 and keys.shape[-1] != width:
        raise ValueError(
            f"the cache holds keys of width {keys.shape[-1]} but this model adds keys of width "
            f"{width}: precomputed keys (prefix tuning, the cache of another model or another "
            'kv_cache) must match the kind of cache; set config.kv_cache = "full" for prefix tuning'
        )
