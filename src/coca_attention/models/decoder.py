"""A family's decoder and language model with collinear attention: mixed in before its classes.

A CoCA model is the family's own model whose attention modules were exchanged in place, whether it
is built from a configuration, loaded, or converted.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coca_attention.models.attention import (
    CoCARotary,
    CollinearAttention,
    FoldedLinear,
    Initialisation,
)
from coca_attention.models.configuration import check_cache_kind
from coca_attention.models.half_cache import KeyPositions


def become(model: Any, cls: type[PreTrainedModel], config: Any) -> None:
    """Change the class of a model in place."""
    # Transformers notes some things about a class when an instance is made: make a bare one.
    PreTrainedModel.__init__(cls.__new__(cls), config)
    model.__class__ = cls


def exchange_attention(
    body: Any,
    cls: type,
    initialisation: Initialisation = "fold",
    inputs: Sequence[Tensor | None] = (),
    advance: Callable[[], Any] = lambda: None,
) -> None:
    """Turn a family's decoder into its CoCA class in place; its configuration must say so already.

    Args:
        body: The decoder, for example a `LlamaModel`.
        cls: A `CollinearModel`.
        initialisation: How the T projections begin, see `convert`.
        inputs: For ``calibrated``, what every layer's attention reads of the calibration texts.
        advance: Called after each layer.
    """
    become(body, cls, body.config)
    inputs = inputs or [None] * len(body.layers)
    for layer, read in zip(body.layers, inputs, strict=True):
        body.attention_class.adopt(getattr(layer, body.attention_name), initialisation, read)
        advance()
    body.rotary_emb = CoCARotary(body.config)


class CollinearPreTrained:
    """What decoder and language model share."""

    def _init_weights(self: Any, module: nn.Module) -> None:
        if isinstance(module, FoldedLinear):
            module.init_folded(self.config.initializer_range)
        else:
            super()._init_weights(module)  # pyright: ignore[reportAttributeAccessIssue]


class CollinearModel(CollinearPreTrained):
    """A decoder with collinear attention that knows every token's true position.

    The slack form answers to true positions, so padding must not shift them: where a caller gives
    a mask but no positions, they are counted from the mask.
    """

    config_class: Any
    attention_class: type[CollinearAttention]
    attention_name = "self_attn"

    def __init__(self: Any, config: Any) -> None:
        super().__init__(config)  # pyright: ignore[reportCallIssue]
        exchange_attention(self, type(self))
        self.post_init()

    def forward(
        self: Any,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The decoder's forward pass; arguments as there."""
        check_cache_kind(self.config.kv_cache)
        tokens = input_ids if input_ids is not None else inputs_embeds
        mask = attention_mask if isinstance(attention_mask, Tensor) else None
        mask = mask.long() if mask is not None and mask.dim() == 2 else None
        if position_ids is None and tokens is not None and mask is not None:
            position_ids = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        if self.config.kv_cache == "half" and past_key_values is not None and tokens is not None:
            if position_ids is None:
                past = past_key_values.get_seq_length()
                steps = torch.arange(tokens.shape[1], device=tokens.device) + past
                position_ids = steps.unsqueeze(0)
            kwargs["key_positions"] = KeyPositions(self, past_key_values, position_ids, mask)
        forward = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        return forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )


class CollinearForCausalLM(CollinearPreTrained):
    """A causal language model around a `CollinearModel`."""

    body_class: type[CollinearModel]

    def __init__(self: Any, config: Any) -> None:
        super().__init__(config)  # pyright: ignore[reportCallIssue]
        exchange_attention(self.base_model, self.body_class)
        self.base_model.post_init()
        self.post_init()

    def _get_static_cache_init_shape(self: Any) -> Any:
        # Transformers would make keys as wide as values; the first update makes them as they are.
        if self.config.kv_cache == "half":
            return None
        return super()._get_static_cache_init_shape()  # pyright: ignore[reportAttributeAccessIssue]

    def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Transformers' continuous batching, whose pages hold keys as wide as values.

        Raises:
            ValueError: If the model keeps half keys.
        """
        if self.config.kv_cache == "half":
            raise ValueError(
                "continuous batching keeps keys and values in one pool, so it cannot hold keys of "
                'half their width: set config.kv_cache = "full"'
            )
        return super().init_continuous_batching(*args, **kwargs)  # pyright: ignore
