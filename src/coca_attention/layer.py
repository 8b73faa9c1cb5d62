"""CoCA as an `nn.Module` for any PyTorch model.

Legend: B batch, T query length, S key length, H query heads, G key/value heads, D head width,
P = D/2 rotary pairs, F free pairs.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coca_attention.errors import check_real, check_whole
from coca_attention.ops import (
    LinearState,
    Rotation,
    ScoreForm,
    activate,
    attend,
    get_form,
    key_map,
    query_map,
    score_scale,
)
from coca_attention.ops.checks import check_heads, check_positions, check_width
from coca_attention.ops.linear import Turns, attend_turned, check_linear, linear_turns
from coca_attention.ops.positions import rotation_of

__all__ = ["CoCAAttention"]

KEPT_POSITIONS = "coca_layer_positions"
"""Attribute of a cache: positions of the tokens of every layer with a decay."""


def project_collinear(
    attention: Any,
    hidden_states: Tensor,
    linear: bool,
    q_norm: Callable[[Tensor], Tensor] | None = None,
    t_norm: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, H, T, D), coefficients (B, G, T, P + F) and values (B, G, T, D) of a layer."""
    # t_proj is the folded T projection, before the ReLU (Eq. 5, 6); norms get (B, T, heads, …).
    width = attention.head_dim
    query = attention.q_proj(hidden_states).unflatten(-1, (-1, width))
    value = attention.v_proj(hidden_states).unflatten(-1, (-1, width))
    coefficients = attention.t_proj(hidden_states).unflatten(-1, (value.shape[2], -1))
    if q_norm is not None:
        query = q_norm(query)
    if t_norm is not None:
        coefficients = t_norm(coefficients)
    coefficients = coefficients.transpose(1, 2)
    # Under ReLU all coefficients of a head may be 0, and linear attention divides by their sum.
    coefficients = F.softplus(coefficients) if linear else activate(coefficients, width // 2)
    return query.transpose(1, 2), coefficients, value.transpose(1, 2)


def attend_linear_cached(
    query: Tensor,
    key_coefficients: Tensor,
    value: Tensor,
    turns: Turns,
    *,
    cache: Any,
    layer_idx: int | None,
    mask: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """`attend_turned` that continues from a cache's state of a layer, and updates it.

    ``mask`` is (B, T), zero for tokens that nobody sees.
    """
    state = None
    if cache is not None:
        layer: Any = None if layer_idx is None else next(iter(cache.layers[layer_idx:]), None)
        if not hasattr(layer, "recurrent_states"):
            raise ValueError(
                "linear attention keeps a state, not keys: pass DynamicCache(config=model.config), "
                "or for N layers of CoCAAttention DynamicCache(config=LlamaConfig("
                'num_hidden_layers=N, layer_types=["hybrid"] * N))'
            )
        packed = layer.recurrent_states[0]
        state = None if packed is None else LinearState.unpack(packed, query.shape[-1])
    if mask is not None:
        key_coefficients = key_coefficients * mask[:, None, :, None]
    output, state = attend_turned(query, key_coefficients, value, turns, state, **settings)
    if cache is not None:
        cache.update_recurrent_state(state.packed().detach(), layer_idx)
        # Keys and values of a byte each give the cache a length.
        counted = torch.zeros_like(value[:, :1, :, :1], dtype=torch.int8)
        cache.update(counted, counted, layer_idx)
    return output


class CoCAAttention(nn.Module):
    """Multi-head Collinear Constrained Attention (arXiv 2309.08646), with its projections.

    The key projection of ordinary attention is replaced by a projection to non-negative
    coefficients, one per rotary pair and key head. It is half as large, because the fold is linear
    and the projection is stored folded.

    Args:
        hidden_size: Width of the input and the output.
        num_heads: Query heads H.
        num_key_value_heads: Key/value heads G, a divisor of H; default H.
        form: Score form or its name: ``slack`` (Eq. 10), ``strict`` (Eq. 9) or ``magnitude`` (|q_j|
            instead of |q_j|^2).
        head_dim: Head width D, even; default hidden_size / num_heads.
        bias: Whether the projections have biases.
        dropout: Probability of dropping an attention weight in training.
        rotation: Rotation of the pairs; default `Rotation(head_dim)`.
        window: Keys that a token sees in causal attention, its own included; default: all.
        free_pairs: F; the last F pairs of every head are scored by ordinary rotary attention.
        linear: Whether attention is linear (see `coca_attention.ops.linear`): scores without a
            softmax, a state in place of a cache of keys, coefficients by softplus.
        layer_idx: Layer of the cache that this module writes to; required to use a cache.
        device: Device of the weights; default: PyTorch's.
        dtype: dtype of the weights; default: PyTorch's.

    Raises:
        ValueError: If the sizes do not divide, the head width is odd, a value is out of range, or
            the rotation is wider than a head or has a distance map.

    Example:
        >>> attention = CoCAAttention(64, num_heads=4, num_key_value_heads=2)
        >>> attention(torch.randn(1, 10, 64)).shape
        torch.Size([1, 10, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_key_value_heads: int | None = None,
        form: str | ScoreForm = "slack",
        *,
        head_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        rotation: Rotation | None = None,
        window: int | None = None,
        free_pairs: int = 0,
        linear: bool = False,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        check_whole("hidden_size", hidden_size)
        check_whole("num_heads", num_heads)
        check_whole("num_key_value_heads", kv_heads)
        check_heads(num_heads, kv_heads)
        if head_dim is None:
            if hidden_size % num_heads:
                raise ValueError(
                    f"hidden_size {hidden_size} is not a multiple of num_heads {num_heads}; set "
                    "head_dim"
                )
            head_dim = hidden_size // num_heads
        check_width(head_dim)
        check_whole("free_pairs", free_pairs, 0, head_dim // 2)
        check_real("dropout", dropout, highest=1)
        if window is not None:
            check_whole("window, a number of tokens,", window)
        self.form = get_form(form)
        self.rotation = rotation_of(rotation, head_dim)
        if self.rotation.distance_map is not None:
            raise ValueError(
                "CoCAAttention has no distance map: leave it out of the rotation, or use "
                "coca_attention(...)"
            )
        if linear:
            check_linear(self.form, self.rotation)
        if linear and (window is not None or free_pairs or dropout):
            raise ValueError("linear attention has no window, no free_pairs and no dropout")
        self.num_heads = num_heads
        self.num_key_value_heads = kv_heads
        self.head_dim = head_dim
        self.window = window
        self.free_pairs = free_pairs
        self.linear = linear
        self.dropout = dropout
        self.layer_idx = layer_idx

        def projection(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias, device, dtype)

        collinear = head_dim // 2 - free_pairs
        self.q_proj = projection(hidden_size, num_heads * head_dim)
        self.t_proj = projection(hidden_size, kv_heads * (head_dim // 2 + free_pairs))
        self.v_proj = projection(hidden_size, kv_heads * head_dim)
        self.o_proj = projection(num_heads * head_dim, hidden_size)
        learned = self.form.initial_parameters(num_heads, collinear)
        learned = {name: x.to(self.q_proj.weight) for name, x in learned.items()}
        self.form_parameters = nn.ParameterDict(learned)
        # The mean of two rows has 1/√2 of the standard deviation of a single row.
        with torch.no_grad():
            for parameter in self.t_proj.parameters():
                parameter.unflatten(0, (kv_heads, -1))[:, :collinear].mul_(2**-0.5)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        positions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        is_causal: bool = True,
        cache: Any = None,
    ) -> Tensor:
        """Attend.

        Args:
            hidden_states: (B, T, hidden_size).
            positions: True positions of these T tokens, (T,) or (B, T); default: the positions
                after the cached tokens.
            attention_mask: Boolean (True = may attend) or additive, broadcastable to
                (B, H, T, S), applied in addition to causality; with linear attention (B, T), False
                for tokens that nobody sees.
            is_causal: Whether a token sees only itself and earlier tokens.
            cache: Keys and values of earlier tokens, updated in place: Transformers'
                `DynamicCache()`, or an object that has its `get_seq_length` and `update`. For N
                layers with linear attention, which keep states,
                `DynamicCache(config=LlamaConfig(num_hidden_layers=N, layer_types=["hybrid"] * N))`.

        Returns:
            (B, T, hidden_size).

        Raises:
            ValueError: If the input, positions or mask has another shape, or a cache is given
                without layer_idx or does not return all keys.
            TypeError: If the input has another dtype than the weights, outside of autocast.
        """
        width = self.q_proj.in_features
        if hidden_states.dim() != 3 or hidden_states.shape[-1] != width:
            raise ValueError(
                f"expected hidden states of shape (B, T, {width}), got {tuple(hidden_states.shape)}"
            )
        dtype = self.q_proj.weight.dtype
        mixed = type(self.q_proj) is nn.Linear and hidden_states.dtype != dtype
        if mixed and not torch.is_autocast_enabled(hidden_states.device.type):
            raise TypeError(
                f"expected hidden states of the layer's dtype, {dtype}, got {hidden_states.dtype}: "
                "convert either by .to(dtype), or compute within torch.autocast"
            )
        if self.rotation.temperature is not None and not is_causal:
            raise ValueError(
                "a temperature counts the tokens before a query: it is for causal attention"
            )
        length = hidden_states.shape[1]
        past = 0
        if cache is not None:
            if self.layer_idx is None:
                raise ValueError(
                    "a cache has one entry per layer: set a different layer_idx for each "
                    "CoCAAttention"
                )
            past = int(cache.get_seq_length(self.layer_idx))
        if positions is None:
            positions = torch.arange(past, past + length, device=hidden_states.device)
        check_positions("positions", positions, len(hidden_states), length)
        query, coefficients, value = project_collinear(self, hidden_states, self.linear)
        wide = torch.promote_types(query.dtype, torch.float32)
        parameters = dict(self.form_parameters.items())
        if self.linear:
            if not is_causal or (attention_mask is not None and attention_mask.dim() != 2):
                raise ValueError("linear attention is causal, with an attention_mask of (B, T)")
            output = attend_linear_cached(
                query,
                coefficients,
                value,
                linear_turns(self.form, self.rotation, positions, wide, attention_mask),
                cache=cache,
                layer_idx=self.layer_idx,
                mask=attention_mask,
                form=self.form,
                parameters=parameters,
            )
            return self.o_proj(output.transpose(1, 2).flatten(-2))
        divisor = score_scale(query.dtype)
        cos, sin = self.rotation.tables(positions, wide)
        query = query_map(
            query,
            cos,
            sin,
            form=self.form,
            scale=self.head_dim**-0.5 / divisor,
            factor=self.rotation.query_factor(positions, wide, self.window),
            free_pairs=self.free_pairs,
            parameters=parameters,
        )
        key = key_map(coefficients, cos, sin, free_pairs=self.free_pairs)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
            if key.shape[-2] != past + length:
                raise ValueError(
                    f"expected all {past + length} keys from the cache, got {key.shape[-2]}; "
                    f"{type(cache).__name__} is static or sliding: use DynamicCache()"
                )
        bias = self.rotation.bias
        places = None
        if bias is not None:
            places = (positions, self._all_positions(positions, past, cache))
        output = attend(
            query,
            key,
            value,
            attention_mask=attention_mask,
            is_causal=is_causal,
            window=self.window,
            scale=divisor,
            dropout=self.dropout if self.training else 0.0,
            bias=bias,
            positions=places,
        )
        return self.o_proj(output.transpose(1, 2).flatten(-2))

    def _all_positions(self, positions: Tensor, past: int, cache: Any) -> Tensor:
        """Positions of all keys, (S,) or (B, S), which the cache keeps beside them."""
        if cache is None:
            return positions
        kept = vars(cache).setdefault(KEPT_POSITIONS, {})
        earlier = kept.get(self.layer_idx, positions[..., :0])[..., :past]
        if earlier.shape[-1] < past:
            # Something else has put them into the cache: right before these.
            earlier = positions[..., :1] - past + torch.arange(past, device=positions.device)
        if earlier.dim() < positions.dim():
            earlier = earlier.expand(len(positions), -1)
        if positions.dim() < earlier.dim():
            positions = positions.expand(len(earlier), -1)
        kept[self.layer_idx] = torch.cat((earlier, positions), dim=-1)
        return kept[self.layer_idx]
