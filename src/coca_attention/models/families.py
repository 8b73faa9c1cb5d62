"""The supported families: a table of Transformers' classes, and their CoCA classes.

A CoCA model is the family's own Transformers model whose key projections were replaced, so a family
is a row of `FAMILIES`: `make_family` derives its classes. What a family has of its own stands above
the table. To add one, see docs/extending.md.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.glm4 import modeling_glm4 as glm4
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.modernbert import modeling_modernbert as modernbert
from transformers.models.olmo2 import modeling_olmo2 as olmo2
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from coca_attention.models.attention import CollinearAttention
from coca_attention.models.configuration import CoCAConfig, add_rope_types, rotation
from coca_attention.models.decoder import CollinearForCausalLM, CollinearHead, CollinearModel
from coca_attention.models.projections import AttentionLayout

HEADS: dict[Any, type] = {
    AutoModelForSequenceClassification: GenericForSequenceClassification,
    AutoModelForTokenClassification: GenericForTokenClassification,
    AutoModelForQuestionAnswering: GenericForQuestionAnswering,
}
"""Auto classes of the heads for tasks, and Transformers' head for families that have none."""


@dataclass(frozen=True)
class Family:
    """A family of decoders or encoders.

    Attributes:
        vanilla: Transformers' language model, causal or, in an encoder, masked.
        vanilla_body: Its decoder or encoder.
        causal_lm: The CoCA class of the language model.
        auto: Auto class of the language model.
    """

    vanilla: type[PreTrainedModel]
    vanilla_body: type[PreTrainedModel]
    causal_lm: type[CollinearHead]
    auto: Any = AutoModelForCausalLM

    @property
    def body(self) -> type[CollinearModel]:
        """The CoCA class of the decoder."""
        return self.causal_lm.body_class

    @property
    def is_causal(self) -> bool:
        """Whether the language model is a causal one."""
        return self.auto is AutoModelForCausalLM

    @property
    def config(self) -> Any:
        """The CoCA class of the configuration."""
        return self.body.config_class

    @property
    def layout(self) -> AttentionLayout:
        """Layout of the family's attention modules, converted or not."""
        return self.body.attention_class.layout

    @property
    def vanilla_type(self) -> str:
        """The ``model_type`` of the family's vanilla models."""
        return self.config.model_type.removeprefix("coca_")

    @cached_property
    def classes(self) -> list[tuple[Any, type[PreTrainedModel] | None, type[PreTrainedModel]]]:
        """All models of the family: Auto class, vanilla class if there is one, CoCA class."""
        return [
            (AutoModel, self.vanilla_body, self.body),
            (self.auto, self.vanilla, self.causal_lm),
            *(self._head(auto, generic) for auto, generic in HEADS.items()),
        ]

    def _head(self, auto: Any, generic: type) -> tuple[Any, type[PreTrainedModel] | None, Any]:
        """A head's Auto class, vanilla class and CoCA class."""
        vanilla = auto._model_mapping.get(self.vanilla_body.config_class, None)
        kinds = self.vanilla_body.__mro__
        own = next(kind for kind in kinds if PreTrainedModel in kind.__bases__)
        name = self.causal_lm.__name__.partition("For")[0]
        task = auto.__name__.partition("For")[2]
        made = _make_class(
            f"{name}For{task}",
            (CollinearHead, *((generic, own) if vanilla is None else (vanilla,))),
            f"{name} with a head for {task}.",
            config=self.config,
            body_class=self.body,
        )
        return auto, vanilla, made


def _make_class(
    name: str, bases: tuple[type, ...], doc: str, *, config: type | None = None, **attributes: Any
) -> Any:
    """A class of this module, where pickle looks for it.

    Args:
        name: Its name.
        bases: Its bases.
        doc: Its docstring.
        config: Class of a model's configuration, which Transformers reads from the annotations.
        **attributes: Of the class.
    """
    annotations = {} if config is None else {"__annotations__": {"config": config}}
    made = type(name, bases, {"__module__": __name__, "__doc__": doc, **annotations, **attributes})
    setattr(sys.modules[__name__], name, made)
    return made


def make_family(
    causal_lm: Any,
    body: Any,
    attention: type,
    *,
    layout: AttentionLayout | None = None,
    config_mixin: type = CoCAConfig,
    attention_mixin: type = CollinearAttention,
    auto: Any = AutoModelForCausalLM,
) -> Family:
    """The family of a Transformers language model, with its CoCA classes.

    Args:
        causal_lm: Transformers' language model, such as ``LlamaForCausalLM``.
        body: Its decoder or encoder, such as ``LlamaModel``.
        attention: Its attention module, such as ``LlamaAttention``.
        layout: What is different about the projections.
        config_mixin: `CoCAConfig`, or a subclass with what the configuration has of its own.
        attention_mixin: `CollinearAttention`, or a subclass with what the attention has of its own.
        auto: Auto class of the language model.
    """
    vanilla = body.config_class
    config = strict(
        _make_class(
            f"CoCA{vanilla.__name__}",
            (config_mixin, vanilla),
            f"{vanilla.__name__} with CoCA attention; see `CoCAConfig`.",
            model_type=f"coca_{vanilla.model_type}",
        )
    )
    ours = _make_class(
        f"CoCA{attention.__name__}",
        (attention_mixin, attention),
        f"{attention.__name__} with a T projection instead of its key projection.",
        layout=layout or AttentionLayout(),
    )
    decoder = _make_class(
        f"CoCA{body.__name__}",
        (CollinearModel, body),
        f"{body.__name__} with CoCA attention.",
        config=config,
        attention_class=ours,
    )
    head = CollinearForCausalLM if auto is AutoModelForCausalLM else CollinearHead
    model = _make_class(
        f"CoCA{causal_lm.__name__}",
        (head, causal_lm),
        f"{causal_lm.__name__} with CoCA attention.",
        config=config,
        body_class=decoder,
    )
    return Family(causal_lm, body, model, auto)


class GPTNeoXFields(CoCAConfig):
    """GPT-NeoX, which the paper trains from scratch; by default whole heads are rotated."""

    base_model_tp_plan = {
        "layers.*.attention.q_proj": "colwise",
        "layers.*.attention.t_proj": "colwise",
        "layers.*.attention.v_proj": "colwise",
        "layers.*.attention.dense": "rowwise",
        "layers.*.mlp.dense_h_to_4h": "colwise",
        "layers.*.mlp.dense_4h_to_h": "rowwise",
    }

    def convert_rope_params_to_dict(self, **kwargs: Any) -> Any:
        kwargs.setdefault("rotary_pct", 1.0)
        return super().convert_rope_params_to_dict(**kwargs)  # pyright: ignore


class GPTNeoXMixin(CollinearAttention):
    """Names of GPT-NeoX that differ from Llama's."""

    num_key_value_groups = 1

    @property
    def head_dim(self: Any) -> int:
        return self.head_size


def _split_heads(attention: Any, fused: Tensor) -> Sequence[Tensor]:
    """Split a fused projection that is ordered by head: query, key and value of each head."""
    heads = fused.unflatten(-1, (-1, 3, attention.head_size))
    return [x.flatten(-2) for x in heads.unbind(-2)]


class Phi3Fields(CoCAConfig):
    """Phi-3, whose own configuration knows no rule but longrope."""

    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.t_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_up_proj": "colwise_gather_output",
        "layers.*.mlp.down_proj": "rowwise_split_input",
    }

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
        super(phi3.Phi3Config, self).validate_rope()  # pyright: ignore


def _split_sections(attention: Any, fused: Tensor) -> Sequence[Tensor]:
    """Split a fused projection into all queries, all keys and all values."""
    keys = fused.shape[-1] // (attention.num_key_value_groups + 2)
    return fused.split((keys * attention.num_key_value_groups, keys, keys), dim=-1)


class ModernBertFields(CoCAConfig):
    """ModernBERT, an encoder: it has no cache, temperature or decay."""

    def validate_architecture(self: Any) -> None:
        super().validate_architecture()
        for kind in set(self.layer_types or ()):
            found = rotation(self, kind)
            if any(x is not None for x in (found.temperature, found.decay, found.max_distance)):
                raise ValueError(
                    "temperature, decay and max_distance count the tokens before a query, but in "
                    "an encoder a query sees those after it, too: leave them out"
                )


class ModernBertMixin(CollinearAttention):
    """Names of ModernBERT that differ from Llama's, and a dropout of the output."""

    num_key_value_groups = 1

    @property
    def layer_type(self: Any) -> str:
        return self.config.layer_types[self.layer_idx]

    @property
    def scaling(self: Any) -> float:
        return self.head_dim**-0.5

    def _projected(self: Any, output: Tensor, hidden_states: Tensor) -> Tensor:
        return self.out_drop(super()._projected(output, hidden_states))


LLAMA = make_family(llama.LlamaForCausalLM, llama.LlamaModel, llama.LlamaAttention)
GPT_NEOX = make_family(
    gpt_neox.GPTNeoXForCausalLM,
    gpt_neox.GPTNeoXModel,
    gpt_neox.GPTNeoXAttention,
    layout=AttentionLayout(
        module_name="attention",
        output_name="dense",
        fused_name="query_key_value",
        split_fused=_split_heads,
    ),
    config_mixin=GPTNeoXFields,
    attention_mixin=GPTNeoXMixin,
)

FAMILIES: list[Family] = [
    LLAMA,
    make_family(mistral.MistralForCausalLM, mistral.MistralModel, mistral.MistralAttention),
    make_family(qwen2.Qwen2ForCausalLM, qwen2.Qwen2Model, qwen2.Qwen2Attention),
    make_family(qwen3.Qwen3ForCausalLM, qwen3.Qwen3Model, qwen3.Qwen3Attention),
    make_family(
        gemma3.Gemma3ForCausalLM,
        gemma3.Gemma3TextModel,
        gemma3.Gemma3Attention,
        layout=AttentionLayout(norm_offset=1.0),
    ),
    make_family(
        phi3.Phi3ForCausalLM,
        phi3.Phi3Model,
        phi3.Phi3Attention,
        layout=AttentionLayout(fused_name="qkv_proj", split_fused=_split_sections),
        config_mixin=Phi3Fields,
    ),
    make_family(
        olmo2.Olmo2ForCausalLM,
        olmo2.Olmo2Model,
        olmo2.Olmo2Attention,
        layout=AttentionLayout(norm_spans_heads=True),
    ),
    GPT_NEOX,
    make_family(
        cohere.CohereForCausalLM,
        cohere.CohereModel,
        cohere.CohereAttention,
        layout=AttentionLayout(interleaved=True),
    ),
    make_family(
        glm4.Glm4ForCausalLM,
        glm4.Glm4Model,
        glm4.Glm4Attention,
        layout=AttentionLayout(interleaved=True),
    ),
    make_family(
        modernbert.ModernBertForMaskedLM,
        modernbert.ModernBertModel,
        modernbert.ModernBertAttention,
        layout=AttentionLayout(
            module_name="attn",
            output_name="Wo",
            fused_name="Wqkv",
            split_fused=lambda attention, fused: fused.chunk(3, dim=-1),
        ),
        config_mixin=ModernBertFields,
        attention_mixin=ModernBertMixin,
        auto=AutoModelForMaskedLM,
    ),
]

CLASSES: dict[str, type] = {}
"""Registered classes by name."""


def family_of(model: Any) -> Family | None:
    """The family of a causal language model, vanilla or CoCA, or None."""
    for family in FAMILIES:
        # Only the exact vanilla class: a subclass may have a different attention.
        same = isinstance(model, family.causal_lm) or type(model) is family.vanilla
        if same and family.is_causal:
            return family
    return None


def supported_families(model: Any) -> str:
    """Names of the families, for error messages about an unsupported model."""
    names = ", ".join(family.vanilla_type for family in FAMILIES)
    adapted = hasattr(model, "merge_and_unload")
    hint = "; merge the adapters first (merge_and_unload)" if adapted else ""
    return f"the families {names}{hint}"


def register(config: Any, classes: Iterable[tuple[Any, type]]) -> None:
    """Register classes with Transformers' Auto classes, and in `CLASSES`.

    Args:
        config: The configuration.
        classes: Pairs of an Auto class and a model class.
    """
    AutoConfig.register(config.model_type, config, exist_ok=True)
    CLASSES[config.__name__] = config
    for auto, made in classes:
        auto.register(config, made, exist_ok=True)
        CLASSES[made.__name__] = made


def register_family(family: Family) -> None:
    """Register the CoCA classes of a family."""
    register(family.config, [(auto, made) for auto, _, made in family.classes])
