"""CoCA on GPT-NeoX, which the paper uses for its models trained from scratch.

The paper's RoFormer baseline is Transformers' own GPT-NeoX with rotary embedding of whole heads.
"""

from collections.abc import Sequence
from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXModel
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention

from coca_attention.models.attention import CollinearAttention
from coca_attention.models.configuration import CoCAConfig
from coca_attention.models.decoder import CollinearForCausalLM, CollinearModel
from coca_attention.models.families.family import Family
from coca_attention.models.projections import AttentionLayout


@strict
class CoCAGPTNeoXConfig(CoCAConfig, GPTNeoXConfig):
    """GPT-NeoX with CoCA attention; by default whole heads are rotated.

    See `CoCAConfig`.
    """

    model_type = "coca_gpt_neox"
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
        return super().convert_rope_params_to_dict(**kwargs)


def _split_heads(attention: Any, fused: Tensor) -> Sequence[Tensor]:
    """Split a fused projection that is ordered by head: query, key and value of each head."""
    heads = fused.unflatten(-1, (-1, 3, attention.head_size))
    return [x.flatten(-2) for x in heads.unbind(-2)]


class CoCAGPTNeoXAttention(CollinearAttention, GPTNeoXAttention):
    """GPT-NeoX's attention with a T projection instead of its key projection."""

    layout = AttentionLayout(
        module_name="attention",
        output_name="dense",
        fused_name="query_key_value",
        split_fused=_split_heads,
    )
    num_key_value_groups = 1

    @property
    def head_dim(self) -> int:
        return self.head_size


class CoCAGPTNeoXModel(CollinearModel, GPTNeoXModel):
    """GPT-NeoX's decoder with CoCA attention."""

    config: CoCAGPTNeoXConfig
    attention_class = CoCAGPTNeoXAttention


class CoCAGPTNeoXForCausalLM(CollinearForCausalLM, GPTNeoXForCausalLM):
    """GPT-NeoX with CoCA attention and a language-model head."""

    config: CoCAGPTNeoXConfig
    body_class = CoCAGPTNeoXModel


FAMILY = Family(GPTNeoXForCausalLM, GPTNeoXModel, CoCAGPTNeoXForCausalLM, down_name="dense_4h_to_h")
