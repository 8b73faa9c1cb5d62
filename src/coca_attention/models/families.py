"""The supported families: a table of Transformers' classes, and their CoCA classes.

A CoCA model is the family's own Transformers model whose key projections were replaced, so a family
is a row of `FAMILIES`, from which its classes are derived. Above the table is what a family has of
its own. To add one, see docs/extending.md.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import transformers
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from coca_attention.errors import UserError
from coca_attention.models.attention import CollinearAttention
from coca_attention.models.configuration import (
    CoCAConfig,
    add_rope_types,
    rope_parameters,
)
from coca_attention.models.decoder import CollinearForCausalLM, CollinearHead, CollinearModel
from coca_attention.models.projections import AttentionLayout

HEAD_CLASSES: dict[type, type] = {
    AutoModelForSequenceClassification: GenericForSequenceClassification,
    AutoModelForTokenClassification: GenericForTokenClassification,
    AutoModelForQuestionAnswering: GenericForQuestionAnswering,
}
"""Auto classes of the heads for tasks, and Transformers' head for families that have none."""


@dataclass(frozen=True)
class Family:
    """A family of decoders or encoders: Transformers' classes, and the CoCA classes of them."""

    vanilla: Any
    """Transformers' language model, causal or masked, such as ``LlamaForCausalLM``. The decoder is
    that of AutoModel, and the attention the class ``LlamaAttention`` beside it."""
    layout: AttentionLayout = field(default_factory=AttentionLayout)
    """What is different about the projections of the attention modules, converted or not."""
    config_mixin: type = CoCAConfig
    """`CoCAConfig`, or a subclass with what the configuration has of its own."""
    attention_mixin: type = CollinearAttention
    """`CollinearAttention`, or a subclass with what the attention has of its own."""

    @property
    def vanilla_body(self) -> Any:
        """Transformers' decoder or encoder."""
        return AutoModel._model_mapping[self.vanilla.config_class]

    @property
    def rotary(self) -> type:
        """Transformers' class of the rotary embedding."""
        return _beside(self.vanilla, "RotaryEmbedding")

    @cached_property
    def is_plain_decoder(self) -> bool:
        """Whether it is a decoder with one set of rotary parameters for all layers."""
        # Some families' default tokens lie outside of their default vocabulary, which is warned of.
        tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
        config = self.vanilla.config_class(**tokens)
        one_set = rope_parameters(config) is config.rope_parameters
        return one_set and issubclass(self.causal_lm, CollinearForCausalLM)

    @cached_property
    def config(self) -> type[PreTrainedConfig]:
        """The CoCA class of the configuration."""
        theirs = self.vanilla.config_class
        # Transformers' plan for tensor parallelism, with T in place of the key projection.
        plan = {
            name.replace(".k_proj", ".t_proj").replace(".k_norm", ".t_norm"): how
            for name, how in (theirs.base_model_tp_plan or {}).items()
        }
        prefix = f"layers.*.{self.layout.module_name}"
        if plan.pop(f"{prefix}.{self.layout.fused_name}", None) is not None:
            plan |= {f"{prefix}.{name}": "colwise" for name in ("q_proj", "t_proj", "v_proj")}
            plan[f"{prefix}.{self.layout.output_name}"] = "rowwise"
        made = _make_class(
            theirs.__name__,
            (self.config_mixin, theirs),
            model_type=f"coca_{theirs.model_type}",
            base_model_tp_plan=plan,
        )
        return strict(made)

    @cached_property
    def body(self) -> type[CollinearModel]:
        """The CoCA class of the decoder."""
        attention = _beside(self.vanilla, "Attention")
        bases = (self.attention_mixin, attention)
        ours = _make_class(attention.__name__, bases, layout=self.layout)
        bases = (CollinearModel, self.vanilla_body)
        return self._model(self.vanilla_body.__name__, bases, attention_class=ours)

    @cached_property
    def causal_lm(self) -> type[CollinearHead]:
        """The CoCA class of the language model."""
        causal = _auto_class(self.vanilla) is AutoModelForCausalLM
        mixin = CollinearForCausalLM if causal else CollinearHead
        return self._model(self.vanilla.__name__, (mixin, self.vanilla), body_class=self.body)

    @cached_property
    def classes(self) -> list[tuple[type, type[PreTrainedModel] | None, type]]:
        """All models of the family: Auto class, vanilla class if there is one, CoCA class."""
        return [
            (AutoModel, self.vanilla_body, self.body),
            (_auto_class(self.vanilla), self.vanilla, self.causal_lm),
            *(self._head(auto, generic) for auto, generic in HEAD_CLASSES.items()),
        ]

    def _model(self, name: str, bases: tuple[type, ...], **attributes: Any) -> Any:
        return _make_class(name, bases, __annotations__={"config": self.config}, **attributes)

    def _head(self, auto: Any, generic: type) -> tuple[type, type[PreTrainedModel] | None, type]:
        """A row of `classes` for a task, for which Transformers may have no class."""
        vanilla = auto._model_mapping.get(self.vanilla.config_class, None)
        own = next(x for x in self.vanilla_body.__mro__ if PreTrainedModel in x.__bases__)
        bases = (CollinearHead, *((generic, own) if vanilla is None else (vanilla,)))
        name = self.vanilla.__name__.partition("For")[0]
        task = auto.__name__.partition("For")[2]
        return auto, vanilla, self._model(f"{name}For{task}", bases, body_class=self.body)


def _auto_class(model: type) -> type:
    """The Auto class of a language model."""
    return getattr(transformers, f"AutoModelFor{model.__name__.partition('For')[2]}")


def _beside(model: type, part: str) -> type:
    """The class of a part of a family, such as ``LlamaAttention``, from the module of a model."""
    prefix = model.__name__.partition("For")[0]
    return getattr(sys.modules[model.__module__], f"{prefix}{part}")


def _make_class(name: str, bases: tuple[type, ...], **attributes: Any) -> Any:
    """The CoCA class of one of Transformers', of this module, where pickle looks for it."""
    attributes |= {"__module__": __name__, "__doc__": f"{name} with CoCA attention."}
    made = type(f"CoCA{name}", bases, attributes)
    setattr(sys.modules[__name__], made.__name__, made)
    return made


class GPTNeoXFields(CoCAConfig):
    """GPT-NeoX, which the paper trains from scratch; by default whole heads are rotated."""

    def convert_rope_params_to_dict(self, **kwargs: object) -> dict[str, object]:
        kwargs.setdefault("rotary_pct", 1.0)
        return super().convert_rope_params_to_dict(**kwargs)  # pyright: ignore


class GPTNeoXMixin(CollinearAttention):
    """Names of GPT-NeoX that differ from Llama's."""

    head_size: int

    @property
    def head_dim(self) -> int:
        return self.head_size


def _split_heads(attention: Any, fused: Tensor) -> Sequence[Tensor]:
    """Split a fused projection that is ordered by head: query, key and value of each head."""
    heads = fused.unflatten(-1, (-1, 3, attention.head_size))
    return [x.flatten(-2) for x in heads.unbind(-2)]


class Phi3Fields(CoCAConfig):
    """Phi-3, whose own configuration knows no rule but longrope."""

    def convert_rope_params_to_dict(self: Any, **kwargs: Any) -> Any:
        # Phi-3's own method treats yarn as an old name of longrope.
        given = (self.rope_parameters or {}).get("rope_type")
        kwargs = super().convert_rope_params_to_dict(**kwargs)  # pyright: ignore
        if given == "yarn" and self.rope_parameters is not None:
            self.rope_parameters["rope_type"] = given
        return kwargs

    def validate_rope(self: Any) -> None:
        # Phi-3's own check rejects every rule but longrope.
        add_rope_types()
        super(Phi3Config, self).validate_rope()  # pyright: ignore


def _split_sections(attention: Any, fused: Tensor) -> Sequence[Tensor]:
    """Split a fused projection into all queries, all keys and all values."""
    keys = fused.shape[-1] // (attention.num_key_value_groups + 2)
    return fused.split((keys * attention.num_key_value_groups, keys, keys), dim=-1)


class ModernBertFields(CoCAConfig):
    """ModernBERT, an encoder: it has no cache, temperature or decay."""

    @property
    def _sees_both_directions(self) -> bool:
        return True


class ModernBertMixin(CollinearAttention):
    """Names of ModernBERT that differ from Llama's, and a dropout of the output."""

    out_drop: nn.Module

    @property
    def layer_type(self) -> str:
        return self.config.layer_types[self.layer_idx]

    @property
    def scaling(self) -> float:
        return self.head_dim**-0.5

    def _projected(self, output: Tensor, hidden_states: Tensor) -> Tensor:
        return self.out_drop(super()._projected(output, hidden_states))


LLAMA = Family(transformers.LlamaForCausalLM)
GPT_NEOX = Family(
    transformers.GPTNeoXForCausalLM,
    layout=AttentionLayout(
        module_name="attention",
        output_name="dense",
        fused_name="query_key_value",
        split_fused=_split_heads,
    ),
    config_mixin=GPTNeoXFields,
    attention_mixin=GPTNeoXMixin,
)
SPANNING = AttentionLayout(norm_spans_heads=True)
INTERLEAVED = AttentionLayout(interleaved=True)
FAMILIES: list[Family] = [
    LLAMA,
    Family(transformers.MistralForCausalLM),
    Family(transformers.MixtralForCausalLM),
    Family(transformers.Qwen2ForCausalLM),
    Family(transformers.Qwen2MoeForCausalLM),
    Family(transformers.Qwen3ForCausalLM),
    Family(transformers.Qwen3MoeForCausalLM),
    Family(transformers.GemmaForCausalLM),
    Family(transformers.Gemma3ForCausalLM, layout=AttentionLayout(norm_offset=1.0)),
    Family(transformers.PhiForCausalLM, layout=AttentionLayout(output_name="dense")),
    Family(
        transformers.Phi3ForCausalLM,
        layout=AttentionLayout(fused_name="qkv_proj", split_fused=_split_sections),
        config_mixin=Phi3Fields,
    ),
    Family(transformers.GraniteForCausalLM),
    Family(transformers.GraniteMoeForCausalLM),
    Family(transformers.OlmoForCausalLM),
    Family(transformers.Olmo2ForCausalLM, layout=SPANNING),
    Family(transformers.Olmo3ForCausalLM, layout=SPANNING),
    Family(transformers.OlmoeForCausalLM, layout=SPANNING),
    GPT_NEOX,
    Family(transformers.CohereForCausalLM, layout=INTERLEAVED),
    Family(transformers.GlmForCausalLM, layout=INTERLEAVED),
    Family(transformers.Glm4ForCausalLM, layout=INTERLEAVED),
    Family(transformers.HeliumForCausalLM, layout=INTERLEAVED),
    Family(transformers.Ernie4_5ForCausalLM, layout=INTERLEAVED),
    Family(transformers.ApertusForCausalLM),
    Family(transformers.ArceeForCausalLM),
    Family(transformers.SeedOssForCausalLM),
    Family(transformers.Starcoder2ForCausalLM),
    Family(
        transformers.ModernBertForMaskedLM,
        layout=AttentionLayout(
            module_name="attn",
            output_name="Wo",
            fused_name="Wqkv",
            split_fused=_split_sections,
        ),
        config_mixin=ModernBertFields,
        attention_mixin=ModernBertMixin,
    ),
]


def family_of(model: object) -> Family:
    """The family of a causal language model, vanilla or CoCA; UserError if it has none."""
    for family in FAMILIES:
        # Only the exact vanilla class: a subclass may have a different attention.
        same = isinstance(model, family.causal_lm) or type(model) is family.vanilla
        if same and issubclass(family.causal_lm, CollinearForCausalLM):
            return family
    raise UserError(
        f"{type(model).__name__} is not supported; supported are the causal language models, "
        f"vanilla or CoCA, of {supported_families(model)}"
    )


def decoders() -> dict[str, Family]:
    """The decoders with one set of rotary parameters for all layers, by their ``model_type``."""
    return {
        family.vanilla.config_class.model_type: family
        for family in FAMILIES
        if family.is_plain_decoder
    }


def supported_families(model: object) -> str:
    """Names of the families, for error messages about an unsupported model."""
    names = ", ".join(family.vanilla.config_class.model_type for family in FAMILIES)
    adapted = hasattr(model, "merge_and_unload")
    hint = "; merge the adapters first (merge_and_unload)" if adapted else ""
    return f"the families {names}{hint}"


def register(config: type[PreTrainedConfig], classes: Sequence[tuple[Any, type]]) -> list[type]:
    """Register a configuration and its models, by Auto class, with Transformers; all classes."""
    AutoConfig.register(config.model_type, config, exist_ok=True)
    for auto, made in classes:
        auto.register(config, made, exist_ok=True)
    return [config, *(made for _, made in classes)]


def register_family(family: Family) -> list[type]:
    """Make a family known to `convert`, and its CoCA classes to Transformers; all classes."""
    if family not in FAMILIES:
        FAMILIES.append(family)
    # On disk, tensors of some families (with experts) have other names than in their classes.
    names = get_checkpoint_conversion_mapping(family.vanilla.config_class.model_type)
    if names is not None:
        register_checkpoint_conversion_mapping(family.config.model_type, names, overwrite=True)
    return register(family.config, [(auto, made) for auto, _, made in family.classes])
