"""The record of a family: the Transformers classes that it builds on, and its CoCA classes."""

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
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

from coca_attention.models.decoder import CollinearHead, CollinearModel
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
        down_name: Name of the last projection of a feed-forward layer.
    """

    vanilla: type[PreTrainedModel]
    vanilla_body: type[PreTrainedModel]
    causal_lm: type[CollinearHead]
    auto: Any = AutoModelForCausalLM
    down_name: str = "down_proj"

    @property
    def body(self) -> type[CollinearModel]:
        """The CoCA class of the decoder."""
        return self.causal_lm.body_class

    @property
    def is_causal(self) -> bool:
        """Whether the language model is a causal one."""
        return self.auto is AutoModelForCausalLM

    @property
    def config(self) -> type:
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
        prefix, task = (
            self.causal_lm.__name__.partition("For")[0],
            auto.__name__.partition("For")[2],
        )
        module = self.causal_lm.__module__
        attributes = {
            "__module__": module,
            "__doc__": f"{prefix} with a head for {task}.",
            "__annotations__": {"config": self.config},
            "body_class": self.body,
        }
        parents = (generic, own) if vanilla is None else (vanilla,)
        made = type(f"{prefix}For{task}", (CollinearHead, *parents), attributes)
        setattr(sys.modules[module], made.__name__, made)  # where pickle looks for it
        return auto, vanilla, made
