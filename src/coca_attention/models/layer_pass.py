"""Attention of one layer in one pass where Transformers' attention functions do not compute it.

A decay, limited distances, windows without a mask, and one token over a half cache. Every method is
exact.

Legend: B batch, T query length, S key length, H query heads, G key/value heads, D head width,
P = D/2 rotary pairs, F free pairs, R rotary width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coca_attention.models.fields import window_of
from coca_attention.models.key_positions import KeyPositions
from coca_attention.ops import (
    attend,
    attend_clipped,
    attend_half,
    attend_half_at,
    compiling,
    far_query_map,
    key_map,
    tile_length,
    with_bias,
)


class Limit(NamedTuple):
    """A largest distance W, and Q' there, (B, H, T, D)."""

    query: Tensor
    max_distance: int


class LayerPass(NamedTuple):
    """What a layer attends with in one pass, beside queries, keys and values.

    Outputs are (B, T, H, D), as those of Transformers' attention functions.

    Attributes:
        module: The attention module.
        mask: In the format of the attention implementation, or from `CollinearModel._segments`.
        bias: `Rotation.bias`, or None.
        positions: With a half cache, a decay or limited distances, where tokens are.
        first: First slot that the layer's cache returns.
    """

    module: Any
    mask: Any
    bias: Any
    positions: KeyPositions | None
    first: int

    @property
    def kind(self) -> str | None:
        """Type of the layer, where one set of rotary parameters serves local and global ones."""
        return getattr(self.module, "layer_type", None)

    @property
    def window(self) -> int | None:
        """Tokens in sight, the query's own included; None for all."""
        return getattr(self.module, "sliding_window", window_of(self.module.config))

    @property
    def masks_itself(self) -> bool:
        """Whether `CollinearModel` leaves causality and the window to the layer."""
        return isinstance(self.mask, Tensor) and self.mask.dtype == torch.int64

    def segments(self, keys: int) -> Tensor | None:
        """Those of the last keys, (B, keys), see `CollinearModel`, or None."""
        if not self.masks_itself or self.mask.shape[-1] == 0:
            return None
        return self.mask[:, 0, 0, self.mask.shape[-1] - keys :]

    @property
    def implementation(self) -> str:
        """Name of the attention function."""
        return self.module.config._attn_implementation

    @property
    def dropout(self) -> float:
        """Probability of dropping an attention weight."""
        return self.module.attention_dropout if self.module.training else 0.0

    @property
    def _options(self) -> dict[str, Any]:
        return {"scale": self.module.kernel_scale, "dropout": self.dropout, "bias": self.bias}

    @property
    def _at(self) -> KeyPositions:
        assert self.positions is not None  # passed by the decoder wherever it is asked for
        return self.positions

    def tables(self, keys: int) -> tuple[Tensor, Tensor]:
        """cos and sin of all keys, (1 or B, keys, R/2) each."""
        return self._at.rotary(self.kind, self.first, keys)

    def decodes(self, query: Tensor) -> bool:
        """Whether `attend_half` takes the place of ``scaled_dot_product_attention``."""
        mask = self.mask
        return (
            query.shape[-2] == 1
            and self.implementation == "sdpa"
            and (mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1))
            and not (self.module.training or torch.is_grad_enabled())
        )

    def attend_half(self, query: Tensor, coefficients: Tensor, value: Tensor) -> Tensor | None:
        """One token over a half cache, without keys.

        Args:
            query: Q', (B, H, 1, D).
            coefficients: (B, G, S, P + F).
            value: (B, G, S, D).

        Returns:
            None if the tokens are not at consecutive positions, unless compiled.
        """
        keys = coefficients.shape[-2]
        mask = self.mask if self.bias is None else self._biased_mask(query, keys)
        options: dict[str, Any] = {"attention_mask": mask, "scale": self.module.kernel_scale}
        if compiling():
            output = attend_half_at(query, coefficients, value, *self.tables(keys), **options)
            return output.transpose(1, 2)
        if self._at.first_position is None:
            return None
        tile, pairs = tile_length(coefficients, query.shape[1]), self.module.head_dim // 2
        frames = self._at.frames(self.kind, self.first, keys, pairs, tile)
        if frames is None:
            return None
        return attend_half(query, coefficients, value, frames, **options).transpose(1, 2)

    def attend_far(
        self,
        query: Tensor,
        limit: Limit,
        coefficients: Tensor,
        value: Tensor,
        tables: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """Limited distances, see `attend_clipped`.

        Args:
            query: Q' at the positions of the tokens, (B, H, T, D).
            limit: The largest distance, which some keys lie beyond.
            coefficients: All keys before rotation, (B, G, S, P + F).
            value: (B, G, S, D).
            tables: cos and sin of the keys, (1 or B, S, R/2).

        Returns:
            The output, and the attention weights of eager attention or None.
        """
        length, free_pairs = query.shape[2], self.module.free_pairs
        consecutive, mask = self._at.consecutive, None if self.masks_itself else self.mask
        if self.mask is None and not consecutive and length > 1:
            # The first queries of an empty cache with more slots.
            coefficients, value = coefficients[..., :length, :], value[..., :length, :]
            consecutive = True
        keys = coefficients.shape[-2]
        near = max(0, keys - length - limit.max_distance + 1) if consecutive else 0
        cos, sin = (x[:, near:keys] for x in tables)
        output, weights = attend_clipped(
            query,
            key_map(coefficients[..., near:, :], cos, sin, free_pairs=free_pairs),
            far_query_map(limit.query, free_pairs),
            coefficients,
            value,
            attention_mask=mask,
            is_causal=mask is None,
            max_distance=limit.max_distance,
            positions=self._at.places(self.first, keys),
            consecutive=consecutive,
            window=self.window if self.masks_itself else None,
            segments=self.segments(keys),
            with_weights=self.implementation == "eager",
            **self._options,
        )
        return output.transpose(1, 2), weights

    def attend_keys(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """Attention without a mask, or with a decay, in place of ``scaled_dot_product_attention``.

        Never has all T * S elements of a mask or bias at once.

        Args:
            query: Q', (B, H, T, D).
            key: K', (B, G, S, D).
            value: (B, G, S, D).

        Returns:
            None if the attention function computes it.
        """
        if self.implementation != "sdpa" or (self.bias is None and not self.masks_itself):
            return None
        keys, length, places = key.shape[-2], query.shape[-2], None
        if self.bias is not None:
            places = self._at.places(self.first, keys)
            if self.mask is None and length > 1:
                # The first queries of an empty cache, which may have more slots.
                key, value = key[..., :length, :], value[..., :length, :]
                places = places[0], places[1][:, :length]
        mask = None if self.masks_itself else self.mask
        output = attend(
            query,
            key,
            value,
            attention_mask=mask,
            is_causal=mask is None,
            window=self.window if self.masks_itself else None,
            positions=places,
            segments=self.segments(keys),
            **self._options,
        )
        return output.transpose(1, 2)

    def mask_for(self, query: Tensor, keys: int) -> Any:
        """The mask for the configured attention function, with the decay added.

        Args:
            query: Q', (B, H, T, D).
            keys: S.

        Raises:
            ValueError: If there is a decay and the attention function adds no bias to scores.
        """
        if self.bias is None:
            return self.mask
        shape = self.mask.shape if isinstance(self.mask, Tensor) else ()
        dense = len(shape) == 4 and shape[-1] == keys
        if not dense and self.implementation != "eager":
            raise ValueError(
                "a model with a decay needs an attention function that adds a bias to the "
                f"scores, sdpa or eager; got {self.implementation}"
            )
        return self._biased_mask(query, keys).to(query.dtype)

    def _biased_mask(self, query: Tensor, keys: int) -> Tensor:
        """The mask with the decay added, in float32 or wider."""
        wide = torch.promote_types(query.dtype, torch.float32)
        places = self._at.places(self.first, keys)
        return with_bias(self.mask, self.bias(*places, wide).unsqueeze(1))

    def check_limits(self, *, beyond: bool) -> None:
        """Raise ValueError if the attention function cannot attend with a largest distance.

        Args:
            beyond: Whether there are keys beyond the distance. Within it any function can attend
                as usual that gets all keys, in training for example; serving engines keep keys
                themselves.
        """
        can = self.implementation in ("sdpa", "eager")
        if not beyond:
            known = ("flex_attention", "flash_attention_2", "flash_attention_3")
            name = self.implementation
            can = can or name in known or ("/" in name and not name.startswith("paged|"))
        if not can:
            raise ValueError(
                "a model with max_distance has two scores for a query and a key, which needs the "
                f"attention function sdpa or eager; got {self.implementation}"
            )
