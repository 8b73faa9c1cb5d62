"""The attention core shared by all CoCA models for Transformers.

Legend: B batch, T query length, S key length, H query heads, G key/value heads, D head width,
P = D/2 rotary pairs, F free pairs.

The core passes (Q', K', V) to Transformers' attention interface, so SDPA, FlashAttention,
FlexAttention and eager attention all compute CoCA. A decay, limited distances and one token over a
half cache have functions of their own, in place of SDPA.

The cache stores K' after rotation, of the usual width D (``kv_cache="full"``), or the coefficients
before rotation, of width P + F (``"half"``, and with limited distances).
"""

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coca_attention.layers.coca import project_collinear
from coca_attention.models.key_positions import KeyPositions, compiling
from coca_attention.models.projections import (
    AttentionLayout,
    head_norm,
    replace_key_projection,
)
from coca_attention.models.rotary import Far
from coca_attention.ops import (
    attend,
    attend_clipped,
    attend_half,
    attend_half_at,
    far_query_map,
    key_map,
    query_map,
    score_scale,
    tile_length,
    with_bias,
)

if TYPE_CHECKING:
    from coca_attention.models.context_parallel import Split


def _check_limits(implementation: str, *, beyond: bool) -> None:
    """Raise ValueError if an attention function cannot attend with a largest distance.

    Args:
        implementation: Its name.
        beyond: Whether there are keys beyond the distance. Within it any function can attend as
            usual that gets all keys, in training for example; serving engines keep keys themselves.
    """
    can = implementation in ("sdpa", "eager")
    if not beyond:
        known = ("flex_attention", "flash_attention_2", "flash_attention_3")
        from_hub = "/" in implementation and not implementation.startswith("paged|")
        can = can or implementation in known or from_hub
    if not can:
        raise ValueError(
            "a model with max_distance has two scores for a query and a key, which needs the "
            f"attention function sdpa or eager; got {implementation}"
        )


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
        attention_mask: Additive, broadcastable to (B, H, T, S).
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
        # Masks use the lowest number of their dtype, which is not low enough for float16 masks.
        masked = attention_mask <= torch.finfo(attention_mask.dtype).min / 2
        scores = (scores + attention_mask).masked_fill(masked, torch.finfo(wide).min)
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
        split: "Split | None" = None,
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
                tokens in the cache and of this pass, from `CollinearModel`; with ``split``, of the
                whole sequence.
            roles: Where one set of rotary parameters serves local and global layers, the mask and
                the position embeddings of each layer type, from `CollinearModel`.
            split: How the sequence is split over processes, from `split_sequences`; T are the
                tokens of this process.
            **kwargs: Passed to the attention implementation.

        Returns:
            (B, T, hidden), and the attention weights if the implementation returns them.
        """
        if roles is not None:
            attention_mask, position_embeddings = roles[self.layer_type]
        assert position_embeddings is not None  # always passed by the decoder
        length = hidden_states.shape[1]
        cos, sin, factor, bias, far = position_embeddings
        config = self.config
        projected, coefficients, value = self.project(hidden_states)
        mapped = partial(
            query_map,
            projected,
            form=config.coca_form,
            scale=self.scaling / self.kernel_scale,
            factor=factor,
            interleaved=self.layout.interleaved,
            free_pairs=self.free_pairs,
            parameters=getattr(self, "form_parameters", None),
        )
        query = mapped(cos, sin)
        if split is not None:
            assert key_positions is not None  # always passed by the decoder
            if far is not None and split.length <= far.max_distance:
                far = bias = None  # both begin farther away
            queries = [query] if far is None else [query, mapped(*far.tables)]
            limit = 0 if far is None else far.max_distance
            output = self._attend_split(
                split, queries, coefficients, value, key_positions, bias, limit
            )
            return self._projected(output.transpose(1, 2), hidden_states), None
        cache: Any = past_key_values if past_key_values is not None else layer_past
        half = cache is not None and (config.kv_cache == "half" or far is not None)
        kind, first = getattr(self, "layer_type", None), 0
        if cache is not None and key_positions is not None:
            _, first = cache.get_mask_sizes(length, self.layer_idx)
        if half and cache is not None:
            check_cache_width(cache, self.layer_idx, coefficients.shape[-1])
            coefficients, value = cache.update(coefficients, value, self.layer_idx)
        keys = coefficients.shape[-2]
        apart = key_positions is not None and key_positions.apart
        if far is not None:
            beyond = not apart and keys > far.max_distance
            _check_limits(config._attn_implementation, beyond=beyond)
            if not beyond:
                far = bias = None  # both begin farther away
        if half:
            # Without key_positions Transformers has created the cache, which was empty before.
            if key_positions is not None and not far and self._decodes(query, attention_mask):
                mask = attention_mask
                if bias is not None:
                    places = key_positions.places(kind, first, keys)
                    mask = with_bias(mask, bias(*places, cos.dtype).unsqueeze(1))
                output = self._attend_half(query, coefficients, value, key_positions, first, mask)
                if output is not None:
                    return self._projected(output.transpose(1, 2), hidden_states), None
            if key_positions is not None and (keys != length or apart):
                query = key_positions.turned(query, kind)
                cos, sin = key_positions.rotary(kind, first, keys)
        if far is not None:
            assert key_positions is not None  # always passed by the decoder
            output, weights = self._attend_far(
                (query, mapped(*far.tables)),
                coefficients,
                value,
                (cos, sin),
                far.max_distance,
                key_positions,
                first,
                attention_mask,
                bias,
            )
            return self._projected(output.transpose(1, 2), hidden_states), weights
        key = key_map(coefficients, cos, sin, free_pairs=self.free_pairs)
        if cache is not None and not half:
            check_cache_width(cache, self.layer_idx, key.shape[-1])
            key, value = cache.update(key, value, self.layer_idx)
        window = getattr(self, "sliding_window", getattr(config, "sliding_window", None))
        dropout = self.attention_dropout if self.training else 0.0
        no_mask = roles is not None and attention_mask is None
        sdpa = config._attn_implementation == "sdpa"
        if sdpa and no_mask and window and window < key.shape[-2]:
            # `CollinearModel` leaves out a mask that is nothing but the window.
            output = attend(
                query, key, value, window=window, scale=self.kernel_scale, dropout=dropout
            )
            return self._projected(output.transpose(1, 2), hidden_states), None
        if bias is not None:
            assert key_positions is not None  # always passed by the decoder
            places = key_positions.places(kind, first, key.shape[-2])
            if sdpa:
                output = self._attend_biased(query, key, value, attention_mask, bias, places)
                return self._projected(output.transpose(1, 2), hidden_states), None
            shape = attention_mask.shape if isinstance(attention_mask, Tensor) else ()
            dense = len(shape) == 4 and shape[-1] == key.shape[-2]
            if not dense and config._attn_implementation != "eager":
                raise ValueError(
                    "a model with a decay needs an attention function that adds a bias to the "
                    f"scores, sdpa or eager; got {config._attn_implementation}"
                )
            added = bias(*places, cos.dtype).unsqueeze(1).to(query.dtype)
            attention_mask = with_bias(attention_mask, added)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            config._attn_implementation, eager_attention
        )
        output, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.kernel_scale,
            dropout=dropout,
            sliding_window=window,
            **kwargs,
        )
        return self._projected(output, hidden_states), weights

    def _projected(self: Any, output: Tensor, hidden_states: Tensor) -> Tensor:
        """(B, T, H, D), or (B * T, H * D) from a serving engine, to (B, T, hidden)."""
        output = output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return self.get_submodule(self.layout.output_name)(output)

    def _decodes(self: Any, query: Tensor, mask: Any) -> bool:
        """Whether to use `_attend_half` instead of the configured attention function.

        It is exact too, and replaces `scaled_dot_product_attention` when one token is decoded.
        """
        return (
            query.shape[-2] == 1
            and self.config._attn_implementation == "sdpa"
            and (mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1))
            and not (self.training or torch.is_grad_enabled())
        )

    def _attend_biased(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        bias: Any,
        places: tuple[Tensor, Tensor],
    ) -> Tensor:
        """`attend` with a bias, which never has all T * S elements at once.

        Args:
            query: Q', (B, H, T, D).
            key: K', (B, G, S, D).
            value: (B, G, S, D).
            mask: None or a dense mask.
            bias: `Rotation.bias`.
            places: Positions of the queries and of the keys, (1 or B, T) and (1 or B, S).
        """
        length = query.shape[-2]
        if mask is None and length > 1:
            # The first queries of an empty cache, which may have more slots.
            key, value = key[..., :length, :], value[..., :length, :]
            places = places[0], places[1][:, :length]
        return attend(
            query,
            key,
            value,
            attention_mask=mask,
            is_causal=mask is None,
            scale=self.kernel_scale,
            dropout=self.attention_dropout if self.training else 0.0,
            bias=bias,
            positions=places,
        )

    def _attend_far(
        self: Any,
        queries: tuple[Tensor, Tensor],
        coefficients: Tensor,
        value: Tensor,
        tables: tuple[Tensor, Tensor],
        max_distance: int,
        key_positions: KeyPositions,
        first: int,
        mask: Any,
        bias: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`attend_clipped` for Q' at the positions of the tokens and at the largest distance.

        Args:
            queries: Two of (B, H, T, D).
            coefficients: All keys before rotation, (B, G, S, P + F).
            value: (B, G, S, D).
            tables: cos and sin of the keys, (1 or B, S, R/2).
            max_distance: W.
            key_positions: Of this pass.
            first: First slot of the keys.
            mask: None or a dense mask.
            bias: `Rotation.bias` or None.
        """
        length = queries[0].shape[-2]
        kind, consecutive = getattr(self, "layer_type", None), key_positions.consecutive
        if mask is None and not consecutive and length > 1:
            # The first queries of an empty cache with more slots.
            coefficients, value = coefficients[..., :length, :], value[..., :length, :]
            consecutive = True
        keys = coefficients.shape[-2]
        near = max(0, keys - length - max_distance + 1) if consecutive else 0
        cos, sin = (x[:, near:keys] for x in tables)
        query, far_query = queries
        return attend_clipped(
            query,
            key_map(coefficients[..., near:, :], cos, sin, free_pairs=self.free_pairs),
            far_query_map(far_query, self.free_pairs),
            coefficients,
            value,
            max_distance=max_distance,
            positions=key_positions.places(kind, first, keys),
            consecutive=consecutive,
            attention_mask=mask,
            is_causal=mask is None,
            scale=self.kernel_scale,
            dropout=self.attention_dropout if self.training else 0.0,
            bias=bias,
            with_weights=self.config._attn_implementation == "eager",
        )

    def _attend_split(
        self: Any,
        split: "Split",
        queries: list[Tensor],
        coefficients: Tensor,
        value: Tensor,
        key_positions: KeyPositions,
        bias: Any,
        max_distance: int,
    ) -> Tensor:
        """Attention of the tokens of this process to those of all processes.

        Args:
            split: How the sequence is split.
            queries: Q' at the positions of the tokens and, with a largest distance, there: each
                (B, H, T, D).
            coefficients: (B, G, T, P + F).
            value: (B, G, T, D).
            key_positions: Of the whole sequence.
            bias: `Rotation.bias` or None.
            max_distance: W, or 0 for no limit.

        Returns:
            (B, H, T, D).
        """
        free_pairs, steps = self.free_pairs, torch.arange(split.length, device=value.device)
        cos, sin = key_positions.rotary(getattr(self, "layer_type", None), 0, split.length)
        options: dict[str, Any] = {
            "scale": self.kernel_scale,
            "dropout": self.attention_dropout if self.training else 0.0,
            "bias": bias,
        }
        window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))

        def attended(coefficients: Tensor, value: Tensor, *queries: Tensor) -> Tensor:
            coefficients, value = split.gather(coefficients, value)
            key = key_map(coefficients, cos, sin, free_pairs=free_pairs)

            def chunk_of(chunk: slice, rows: Tensor) -> Tensor:
                seen = slice(chunk.stop)
                positions = (steps[chunk], steps[seen])
                keys, values = key[..., seen, :], value[..., seen, :]
                return attend(rows, keys, values, window=window, positions=positions, **options)

            def limited(chunk: slice, rows: Tensor, far_rows: Tensor) -> Tensor:
                seen, near = slice(chunk.stop), max(0, chunk.start - max_distance + 1)
                return attend_clipped(
                    rows,
                    key[..., near : chunk.stop, :],
                    far_query_map(far_rows, free_pairs),
                    coefficients[..., seen, :],
                    value[..., seen, :],
                    max_distance=max_distance,
                    positions=(steps[chunk], steps[seen]),
                    **options,
                )[0]

            return split.by_chunk(limited if max_distance else chunk_of, *queries)

        return split.run(attended, coefficients, value, *queries)

    def _attend_half(
        self: Any,
        query: Tensor,
        coefficients: Tensor,
        value: Tensor,
        key_positions: KeyPositions,
        first: int,
        mask: Tensor | None,
    ) -> Tensor | None:
        """Attend with one token to a half cache whose slots start at ``first``, without keys.

        Returns None if the tokens are not at consecutive positions, unless compiled.
        """
        keys = coefficients.shape[-2]
        kind = getattr(self, "layer_type", None)
        scale = self.kernel_scale
        if compiling():
            cos, sin = key_positions.rotary(kind, first, keys)
            return attend_half_at(
                query, coefficients, value, cos, sin, attention_mask=mask, scale=scale
            )
        if key_positions.first_position is None:
            return None
        tile = tile_length(coefficients, query.shape[1])
        frames = key_positions.frames(kind, first, keys, self.head_dim // 2, tile)
        if frames is None:
            return None
        return attend_half(query, coefficients, value, frames, attention_mask=mask, scale=scale)


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
