"""The attention core shared by all CoCA models for Transformers.

Legend: B batch, T query length, S key length, H query heads, G key/value heads, D head width,
P = D/2 rotary pairs, F free pairs.

The core passes (Q', K', V) to Transformers' attention interface, so SDPA, FlashAttention,
FlexAttention and eager attention all compute CoCA. What they do not compute, or not as fast, does
`LayerPass`.

The cache stores K' after rotation, of the usual width D (``kv_cache="full"``), or the coefficients
before rotation, of width P + F (``"half"``). With a distance map whose slope is not 1 it has far
keys: see `Stored`.
"""

from inspect import signature
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, LlamaModel, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coca_attention.layer import attend_linear_cached, project_collinear
from coca_attention.models.configuration import score_form
from coca_attention.models.layer_pass import Mask, Pass
from coca_attention.models.projections import AttentionLayout, head_norm, replace_key_projection
from coca_attention.models.rotary import Angles
from coca_attention.ops import query_map, score_scale
from coca_attention.ops.sight import hidden_by

CACHE = "cache" if "cache" in signature(LlamaModel.forward).parameters else "past_key_values"
"""What Transformers' decoders and their layers call the cache: cache from 5.24 on."""


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """softmax(scaling * Q K^T + mask) V (B, T, H, D) without a fused kernel, and the weights."""
    repeats: int = module.num_key_value_groups  # pyright: ignore[reportAssignmentType]
    # As fused kernels do. The families' own function computes scores in the model's dtype, and
    # |q|^2 exceeds the range of float16.
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
    """A mixin placed before a family's attention class: T in place of the key projection."""

    layout: ClassVar[AttentionLayout] = AttentionLayout()
    # What Q' is divided by. Serving engines read it from the module before the first pass, so it is
    # the same in every dtype; as a power of two it changes no score.
    kernel_scale: ClassVar[float] = score_scale(torch.float16)
    num_key_value_groups = 1  # of families without grouped heads; the others set theirs

    config: PreTrainedConfig
    layer_idx: int
    head_dim: int
    free_pairs: int
    scaling: float

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # pyright: ignore[reportCallIssue]
        replace_key_projection(self)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, T, D) before rotation, coefficients (B, G, T, P + F) and V (B, G, T, D)."""
        return project_collinear(
            self,
            hidden_states,
            self.config.coca_linear,
            q_norm=head_norm(self, "q_norm", self.layout),
            t_norm=head_norm(self, "t_norm", self.layout),
        )

    def map_query(self, projected: Tensor, angles: Angles, cos: Tensor, sin: Tensor) -> Tensor:
        """Q' of q before rotation, both (B, H, T, D), with these tables and the angles' factor."""
        return query_map(
            projected,
            cos,
            sin,
            scale=self.scaling / self.kernel_scale,
            factor=angles.factor,
            free_pairs=self.free_pairs,
            **self._form(),
        )

    def _form(self) -> dict[str, Any]:
        """Settings of `query_map` that do not depend on the pass."""
        return {
            "form": score_form(self.config),
            "interleaved": self.layout.interleaved,
            "parameters": getattr(self, "form_parameters", None),
        }

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Mask = None,
        position_embeddings: Angles | None = None,
        past_key_values: Cache | None = None,
        layer_past: Cache | None = None,  # the cache, as GPT-NeoX names it
        decoder_pass: Pass = Pass(),  # noqa: B008 (it is immutable)
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, hidden), and the attention weights if the attention function returns them."""
        cache = kwargs.pop(CACHE, past_key_values)
        cache = layer_past if cache is None else cache
        projected, coefficients, value = self.project(hidden_states)
        if decoder_pass.linear is not None:
            turns, mask = decoder_pass.linear
            at = {"cache": cache, "layer_idx": self.layer_idx, "mask": mask}
            output = attend_linear_cached(
                projected, coefficients, value, turns, **at, **self._form()
            ).transpose(1, 2)
            return self._projected(output, hidden_states), None
        length = hidden_states.shape[1]
        layer = decoder_pass.layer(self, attention_mask, position_embeddings, cache, length)
        stored = layer.to_store(coefficients)
        if cache is not None:
            # A paged cache changes `kwargs`, the arguments of the attention function, in place.
            stored, value = cache.update(stored, value, self.layer_idx, kwargs=kwargs)
        layer = layer.within_near(stored.shape[-2])
        query = self.map_query(projected, layer.angles, layer.angles.cos, layer.angles.sin)
        attend = layer.own_attention(query, stored)
        if attend is not None:
            output, weights = attend(projected, query, stored, value)
        else:
            key = layer.keys(stored)
            mask = layer.mask_with_decay(query, key.shape[-2])
            # Here, because vLLM looks for the call and its scaling in the source of `forward`.
            attention = ALL_ATTENTION_FUNCTIONS.get_interface(layer.function, eager_attention)
            options = {"dropout": layer.dropout, "sliding_window": layer.window}
            output, weights = attention(
                self, query, key, value, mask, scaling=self.kernel_scale, **options, **kwargs
            )
        return self._projected(output, hidden_states), weights

    def _projected(self, output: Tensor, hidden_states: Tensor) -> Tensor:
        """(B, T, H, D), or (B * T, H * D) from a serving engine, to (B, T, hidden)."""
        output = output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        output = self.get_submodule(self.layout.output_name)(output)
        dropout = getattr(self, "residual_dropout", 0.0)  # of Starcoder 2 and Seed-OSS
        return F.dropout(output, dropout, self.training) if dropout else output
