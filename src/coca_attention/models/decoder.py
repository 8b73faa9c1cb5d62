"""Decoder and language model with collinear attention: mixins placed before a family's classes.

A CoCA model is the family's own model with its attention modules replaced in place, whether it is
built from a configuration, loaded, or converted.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel, initialization
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
    counts_distances,
    has_own_roles,
    keeps_coefficients,
    rotation,
    score_form,
)
from coca_attention.models.key_positions import KeyPositions, Reading
from coca_attention.models.layer_pass import Band, Mask, Pass
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


def change_class(
    model: PreTrainedModel, cls: type[PreTrainedModel], config: PreTrainedConfig
) -> None:
    """Change the class of a model in place."""
    # Transformers sets up class attributes when an instance is created, so create an empty one.
    PreTrainedModel.__init__(cls.__new__(cls), config)
    model.__class__ = cls
    # Names of the files that it was loaded from, by which Transformers would save it: those of
    # another class, and in files of a related format (EXAONE) of another family.
    vars(model).pop("_weight_conversions", None)


def check_mixing(config: PreTrainedConfig, where: str) -> None:
    """Raise ValueError if a model cannot read several texts in one row, as `where` does."""
    scaled = rotation(config)
    if scaled.follows_length:
        unsupported = f"{scaled.rule.kind} scaling: use ntk, or set a target length"
    elif config.coca_linear:
        unsupported = "linear attention: use generate() with a batch"
    elif counts_distances(config):
        unsupported = "a decay or a distance map: use generate() with a batch"
    else:
        return
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

    config: PreTrainedConfig

    def _init_weights(self, module: nn.Module) -> None:
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

    attention_class: type[CollinearAttention]
    dtype: torch.dtype
    rotary_emb: CoCARotary
    post_init: Callable[[], None]

    # vLLM checks arguments by these annotations with isinstance(), the first one by that of self.
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)  # pyright: ignore[reportCallIssue]
        if self.config._attn_implementation in ENGINES:
            check_mixing(self.config, self.config._attn_implementation)
        replace_attention(self, type(self))
        self.post_init()

    def forward(
        self,
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
        cache = kwargs.pop(CACHE, past_key_values)
        if tokens is None:
            return forward(**kwargs)  # which says what is missing
        layers = self.config.num_hidden_layers
        reading = Reading(tokens, attention_mask, position_ids, cache, layers)
        decoder_pass = self._pass(reading, kwargs.get("use_cache"))
        if decoder_pass.has_masks:
            # A mask of four dimensions is prepared, for Transformers. This one hides nothing: what
            # is hidden, layers learn from the pass.
            attention_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
        elif isinstance(attention_mask, dict) and len(attention_mask) == 1:
            # Families without layer types take no dictionary.
            attention_mask = next(iter(attention_mask.values()))
        output = forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=reading.position_ids,
            inputs_embeds=inputs_embeds,
            decoder_pass=decoder_pass,
            **{CACHE: cache},
            **kwargs,
        )
        if decoder_pass.positions is not None:
            if cache is None:  # then Transformers may have made one
                parts = output if isinstance(output, tuple) else output.to_tuple()
                cache = next((part for part in parts if isinstance(part, Cache)), None)
            decoder_pass.positions.keep_in(cache)
        return output

    def _pass(self, reading: Reading, use_cache: bool | None) -> Pass:
        """What this pass hands to all layers; the configuration has the default."""
        if self.config.coca_linear:
            return Pass(linear=self._linear(reading))
        if use_cache is None:
            use_cache = getattr(self.config, "use_cache", False)  # encoders do not have the field
        caches = use_cache or reading.cache is not None
        band = self._band(reading, caches)
        roles = self._roles(reading, band, caches) if has_own_roles(self.config) else None
        positions = None
        counts = counts_distances(self.config)
        if counts and not getattr(self.config, "is_causal", True):
            raise ValueError(
                "a decay and distance_map are for causal models: leave them out of rope_parameters"
            )
        if counts or self.config.kv_cache == "half":
            # Scores depend on positions, or the cache has no effective keys. Without a mask
            # segments are documents, found by their positions.
            documents = band is not None and band.segments is not None and reading.mask is None
            in_order = documents or (not reading.is_placed and reading.cache is None)
            wide = torch.promote_types(self.dtype, torch.float32)
            positions = KeyPositions(self.config, wide, reading, in_order)
        return Pass(positions, band, roles)

    def _band(self, reading: Reading, caches: bool) -> Band | None:
        """What layers hide by themselves under SDPA; None leaves the masks to Transformers."""
        if self.config._attn_implementation != "sdpa" or not reading.ends or reading.length == 1:
            return None
        if not self.attention_class.layout.modules(self)[0].is_causal:
            return None
        mask = reading.mask
        # In graphs Transformers makes a mask even of nothing.
        nothing = Band() if has_own_roles(self.config) or compiling() else None
        # Transformers looks for documents where there is neither a mask nor a cache.
        if mask is None and (caches or not reading.is_placed):
            return nothing
        if torch.compiler.is_exporting():
            return None
        if mask is None:
            segments = find_packed_sequence_indices(reading.position_ids.expand(reading.batch, -1))
            return nothing if segments is None else Band(segments)
        if reading.padding is None or mask.shape != (reading.batch, reading.slots):
            return None
        return nothing if not compiling() and mask.all() else Band(mask.bool().long())

    def _linear(self, reading: Reading) -> tuple[Turns, Tensor | None]:
        """Positions of linear attention, and which of the tokens of this pass are real."""
        mask = reading.mask
        positions = reading.position_ids
        # Elsewhere Transformers looks for no documents.
        looks = reading.is_placed and mask is None and reading.cache is None
        if looks and (compiling() or find_packed_sequence_indices(positions) is not None):
            raise UserError(
                "linear attention does not keep documents of a row apart, and torch.compile cannot "
                "see whether there are several: give every document a row of its own, and leave "
                "out position_ids where positions are 0, 1, 2, ..."
            )
        if isinstance(mask, dict):  # that Transformers made for a static cache
            mask = mask.get("linear_attention")
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dim() != 2:
                raise UserError(
                    "linear attention hides a token from all others or from none: pass an "
                    f"attention_mask (batch, tokens); got shape {tuple(mask.shape)}"
                )
            mask = mask[:, -reading.length :]
        dtype = torch.promote_types(self.dtype, torch.float32)
        form = score_form(self.config)
        return linear_turns(form, rotation(self.config), positions, dtype, mask), mask

    def _roles(
        self, reading: Reading, band: Band | None, caches: bool
    ) -> dict[str, tuple[Mask, Angles]]:
        """Mask, unless layers form it, and angles of local and of global layers."""
        cache = reading.cache
        if cache is None and caches:  # one that will be made: then gaps begin no documents
            cache = DynamicCache()
        positions = reading.position_ids
        like = torch.empty(
            reading.batch, reading.length, 0, dtype=self.dtype, device=positions.device
        )
        found = {}
        for kind, make in MASKS.items():
            if kind not in self.config.layer_types:
                continue
            made = None
            if isinstance(reading.mask, dict):  # that Transformers made per layer type
                made = reading.mask[kind]
            elif band is None:
                made = make(self.config, like, reading.mask, cache, positions)
            found[kind] = made, self.rotary_emb(like, positions, kind)
        return found


class CollinearHead(CollinearPreTrained):
    """A model for a task, with a `CollinearModel` as its body."""

    body_class: type[CollinearModel]
    base_model: PreTrainedModel
    post_init: Callable[[], None]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)  # pyright: ignore[reportCallIssue]
        # Transformers' generic heads ask AutoModel for the body.
        if not isinstance(self.base_model, CollinearModel):
            replace_attention(self.base_model, self.body_class)
            self.base_model.post_init()
        self.post_init()


class CollinearForCausalLM(CollinearHead):
    """A causal language model with a `CollinearModel` as its decoder."""

    def _get_static_cache_init_shape(self) -> object:
        # Transformers assumes keys as wide as values; without a shape, the first update decides.
        if keeps_coefficients(self.config):
            return None
        return super()._get_static_cache_init_shape()  # pyright: ignore[reportAttributeAccessIssue]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Transformers' continuous batching; ValueError if cache or rotation rule it out."""
        if self.config.kv_cache == "half":  # in one pool with values
            raise ValueError(
                "continuous batching keeps keys and values in one pool, so it does not support "
                'keys of half the width: set config.kv_cache = "full"'
            )
        check_mixing(self.config, "continuous batching")
        return super().init_continuous_batching(*args, **kwargs)  # pyright: ignore
