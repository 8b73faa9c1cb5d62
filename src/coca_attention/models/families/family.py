"""The record of a family: the Transformers classes that it builds on, and its CoCA classes."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from coca_attention.models.decoder import CollinearForCausalLM, CollinearModel
from coca_attention.models.projections import AttentionLayout


@dataclass(frozen=True)
class Family:
    """A family of decoders.

    Attributes:
        vanilla: Transformers' causal language model.
        vanilla_body: Its decoder.
        causal_lm: The CoCA class of the language model.
    """

    vanilla: type[PreTrainedModel]
    vanilla_body: type[PreTrainedModel]
    causal_lm: type[CollinearForCausalLM]

    @property
    def body(self) -> type[CollinearModel]:
        """The CoCA class of the decoder."""
        return self.causal_lm.body_class

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
