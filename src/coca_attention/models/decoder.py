"""Decoder and language model with collinear attention: mixins placed before a family's classes.

A CoCA model is the family's own model with its attention modules replaced in place, whether it is
built from a configuration, loaded, or converted.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization
from transformers.masking_utils import (
    create_causal_mask,
    create_sliding_window_causal_mask,
    find_packed_sequence_indices,
)

from coca_attention.errors import UserError
from coca_attention.models.attention import CACHE, CollinearAttention
from coca_attention.models.configuration import (
    GLOBAL,
    LOCAL,
    has_own_roles,
    rope_parameters,
    rotation,
)
from coca_attention.models.layer_pass import Band, KeyPositions, PagedPositions, Pass
from coca_attention.models.projections import (
    FoldedLinear,
    initial_form_parameters,
    replace_key_projection,
)
from coca_attention.models.rotary import Angles, CoCARotary
from coca_attention.ops.linear import Turns, linear_turns
from coca_attention.ops.opaque import compiling

ENGINES = ("vllm", "sglang")
"""Names of the attention of serving engines, which keep the keys of every text themselves."""
MASKS = {GLOBAL: create_causal_mask, LOCAL: create_sliding_window_causal_mask}


def change_class(model: Any, cls: type[PreTrainedModel], config: Any) -> None:
    """Change the class of a model in place."""
    # Transformers sets up class attributes when an instance is created, so create an empty one.
    PreTrainedModel.__init__(cls.__new__(cls), config)
    model.__class__ = cls
    # Names of the files that it was loaded from, by which Transformers would save it: those of
    # another class, and in files of a related format (EXAONE) of another family.
    vars(model).pop("_weight_conversions", None)


def check_mixing(config: Any, where: str, *, distances: bool) -> None:
    """Raise ValueError if a model cannot read several texts in one row, as `where` does.

    Args:
        config: The configuration of the model.
        where: What mixes the texts.
        distances: Whether its attention adds a bias to the scores and has keys by their distance.
    """
    scaled, unsupported = rotation(config), None
    if scaled.follows_length:
        unsupported = f"{scaled.rule.kind} scaling: use ntk, or set a target length"
    elif config.coca_linear:
        unsupported = "linear attention: use generate() with a batch"
    elif (scaled.decay or scaled.max_distance) is not None and not distances:
        unsupported = "a decay or max_distance"
    if unsupported:
        raise ValueError(
            f"{where} mixes the tokens of several texts: it does not support {unsupported}"
        )


def replace_attention(body: Any, cls: type) -> None:
    """Turn a family's decoder, which already has its CoCA configuration, into its CoCA class."""
    change_class(body, cls, body.config)
    own_roles = has_own_roles(body.config)
    if own_roles and hasattr(body, "has_sliding_layers"):
        body.has_sliding_layers = True  # families with layer types look at them once
    for index, attention in enumerate(body.attention_class.layout.modules(body)):
        if own_roles:
            kind = body.config.layer_types[index]
            attention.layer_type = kind
            attention.sliding_window = body.config.sliding_window if kind == LOCAL else None
        attention.__class__ = body.attention_class
        replace_key_projection(attention)
    body.rotary_emb = CoCARotary(body.config)


class CollinearPreTrained:
    """What decoder and language model share: initialization of weights."""

    def _init_weights(self: Any, module: nn.Module) -> None:
        if isinstance(module, FoldedLinear):
            module.init_folded(self.config.initializer_range)
            return
        if not isinstance(module, CollinearAttention):
            super()._init_weights(module)  # pyright: ignore[reportAttributeAccessIssue]
            return
        # Its projections are modules of their own, whatever they are called in the family.
        for name, initial in initial_form_parameters(module).items():
            initialization.copy_(getattr(module.form_parameters, name), initial)


class CollinearModel(CollinearPreTrained):
    """A decoder with collinear attention that derives the true position of every token."""

    config_class: Any
    attention_class: type[CollinearAttention]

    # vLLM checks arguments by these annotations with isinstance(), the first one by that of self.
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)  # pyright: ignore[reportCallIssue]
        model: Any = self
        if model.config._attn_implementation in ENGINES:
            check_mixing(model.config, model.config._attn_implementation, distances=False)
        replace_attention(model, type(self))
        model.post_init()

    def forward(
        self: Any,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The forward pass of the family's decoder, with the same arguments."""
        forward = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        tokens = input_ids if input_ids is not None else inputs_embeds
        given = kwargs.pop(CACHE, past_key_values)
        # Continuous batching places the tokens of its paged cache and makes the masks.
        cache = given if hasattr(given, "get_seq_length") else None
        if tokens is None:
            return forward(**kwargs)  # which says what is missing
        mask = attention_mask if isinstance(attention_mask, Tensor) else None
        mask = mask.long() if mask is not None and mask.dim() == 2 else None
        if position_ids is None and mask is not None:  # scores of slack depend on true positions
            position_ids = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        own, linear = has_own_roles(self.config), self.config.coca_linear
        if linear and attention_mask is None and cache is None and position_ids is not None:
            _check_one_document(position_ids)  # elsewhere Transformers looks for no documents
        half = self.config.kv_cache == "half" and cache is not None
        placed, caches = self._counts_distances() or half, kwargs.get("use_cache")
        band = None if linear else self._band(tokens, attention_mask, position_ids, cache, caches)
        if position_ids is None and (placed or own or linear):
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = (torch.arange(tokens.shape[1], device=tokens.device) + past)[None]
        places: Any = position_ids
        positions = None
        if placed and cache is given:
            positions = KeyPositions(self, cache, places, mask)
        elif placed:
            positions = PagedPositions(
                self, places, kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
            )
        decoder_pass = Pass(
            positions,
            band,
            self._roles(tokens, attention_mask, places, given, band) if own else None,
            self._linear(tokens, attention_mask, places) if linear else None,
        )
        if band is not None or own or linear:
            # Transformers makes no mask where it gets one.
            attention_mask = torch.empty(1, 1, 1, 0, device=tokens.device)
        elif isinstance(attention_mask, dict) and len(attention_mask) == 1:
            # Families without layer types take no dictionary.
            attention_mask = next(iter(attention_mask.values()))
        return forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            decoder_pass=decoder_pass,
            **{CACHE: given},
            **kwargs,
        )

    def _counts_distances(self: Any) -> bool:
        """Whether scores depend on distances beside the angles: a decay, or limited distances."""
        rope = rope_parameters(self.config)
        counts = bool(rope.get("decay")) or rope.get("max_distance") is not None
        if counts and not getattr(self.config, "is_causal", True):
            raise ValueError(
                "a decay and max_distance are for causal models: leave them out of rope_parameters"
            )
        return counts

    def _band(
        self: Any, tokens: Tensor, mask: Any, position_ids: Any, cache: Any, use_cache: bool | None
    ) -> Band | None:
        """What layers hide by themselves under SDPA; None leaves the masks to Transformers."""
        (batch, length), past = tokens.shape[:2], 0
        causal = self.attention_class.layout.modules(self)[0].is_causal
        if self.config._attn_implementation != "sdpa" or not causal or length == 1:
            return None
        if cache is not None:
            past, slots = cache.get_seq_length(), range(len(self.layers))
            # The keys of a static cache continue after the last query; its length is a tensor.
            if not isinstance(past, int) or any(
                sum(cache.get_mask_sizes(length, index)) != past + length for index in slots
            ):
                return None
        has_roles = has_own_roles(self.config)
        # In graphs Transformers makes a mask even of nothing.
        plain = Band() if has_roles or compiling() else None
        if mask is not None:
            fits = isinstance(mask, Tensor) and mask.shape == (batch, past + length)
            if not fits or torch.compiler.is_exporting():
                return None
            return plain if not compiling() and mask.all() else Band(mask.bool().long())
        caches = self.config.use_cache if use_cache is None else use_cache
        if position_ids is None or cache is not None or (caches and not has_roles):
            return plain  # Transformers looks for documents where there is no cache
        if torch.compiler.is_exporting():
            return None
        segments = find_packed_sequence_indices(position_ids.expand(batch, -1))
        return plain if segments is None else Band(segments)

    def _linear(
        self: Any, tokens: Tensor, mask: Any, position_ids: Tensor
    ) -> tuple[Turns, Tensor | None]:
        """Positions of linear attention, and which of the tokens of this pass are real."""
        if isinstance(mask, dict):  # that Transformers made for a static cache
            mask = mask.get("linear_attention")
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dim() != 2:
                raise UserError(
                    "linear attention hides a token from all others or from none: pass an "
                    f"attention_mask (batch, tokens); got shape {tuple(mask.shape)}"
                )
            mask = mask[:, -tokens.shape[1] :]
        dtype = torch.promote_types(self.dtype, torch.float32)
        settings = self.config.coca_form, rotation(self.config)
        return linear_turns(*settings, position_ids, dtype, mask), mask

    def _roles(
        self: Any, tokens: Tensor, mask: Any, position_ids: Tensor, cache: Any, band: Band | None
    ) -> dict[str, tuple[Any, Angles]]:
        """Mask, unless layers form it, and angles of local and of global layers."""
        like = torch.empty(*tokens.shape[:2], 0, dtype=self.dtype, device=tokens.device)
        found = {}
        for kind, make in MASKS.items():
            if kind not in self.config.layer_types:
                continue
            made = None
            if isinstance(mask, dict):  # that Transformers made per layer type
                made = mask[kind]
            elif band is None:
                made = make(self.config, like, mask, cache, position_ids)
            found[kind] = made, self.rotary_emb(like, position_ids, kind)
        return found


def _check_one_document(position_ids: Tensor) -> None:
    """Raise UserError if a row has several documents, or is in a graph, which cannot tell."""
    if compiling() or find_packed_sequence_indices(position_ids) is not None:
        raise UserError(
            "linear attention does not keep documents of a row apart, and torch.compile cannot see "
            "whether there are several: give every document a row of its own, and leave out "
            "position_ids where positions are 0, 1, 2, ..."
        )


class CollinearHead(CollinearPreTrained):
    """A model for a task, with a `CollinearModel` as its body."""

    body_class: type[CollinearModel]

    def __init__(self: Any, config: Any) -> None:
        super().__init__(config)  # pyright: ignore[reportCallIssue]
        # Transformers' generic heads ask AutoModel for the body.
        if not isinstance(self.base_model, CollinearModel):
            replace_attention(self.base_model, self.body_class)
            self.base_model.post_init()
        self.post_init()


class CollinearForCausalLM(CollinearHead):
    """A causal language model with a `CollinearModel` as its decoder."""

    def _get_static_cache_init_shape(self: Any) -> Any:
        # Transformers assumes keys as wide as values; without a shape, the first update decides.
        if self.config.kv_cache == "half" or rotation(self.config).max_distance is not None:
            return None
        return super()._get_static_cache_init_shape()  # pyright: ignore[reportAttributeAccessIssue]

    def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Transformers' continuous batching; ValueError if cache or rotation rule it out."""
        if self.config.kv_cache == "half":  # in one pool with values
            raise ValueError(
                "continuous batching keeps keys and values in one pool, so it does not support "
                'keys of half the width: set config.kv_cache = "full"'
            )
        # Older ones keep the keys inside of attention functions.
        where, distances = "continuous batching", CACHE == "cache"
        where += "" if distances else " before Transformers 5.24"
        check_mixing(self.config, where, distances=distances)
        return super().init_continuous_batching(*args, **kwargs)  # pyright: ignore
