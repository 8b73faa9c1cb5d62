"""CoCA on Phi-3."""

from collections.abc import Sequence
from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import Phi3Config, Phi3ForCausalLM, Phi3Model
from transformers.models.phi3.modeling_phi3 import Phi3Attention

from coca_attention.models.attention import CollinearAttention
from coca_attention.models.configuration import CoCAConfig, add_rope_types
from coca_attention.models.decoder import CollinearForCausalLM, CollinearModel
from coca_attention.models.families.family import Family
from coca_attention.models.projections import AttentionLayout


@strict
class CoCAPhi3Config(CoCAConfig, Phi3Config):
    """Phi-3 with CoCA attention; see `CoCAConfig`."""

    model_type = "coca_phi3"
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.t_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_up_proj": "colwise_gather_output",
        "layers.*.mlp.down_proj": "rowwise_split_input",
    }

    def convert_rope_params_to_dict(self, **kwargs: Any) -> Any:
        # Phi-3's own method treats yarn as an old name of longrope.
        given = (self.rope_parameters or {}).get("rope_type")
        kwargs = super().convert_rope_params_to_dict(**kwargs)
        if given == "yarn" and self.rope_parameters is not None:
            self.rope_parameters["rope_type"] = given
        return kwargs

    def validate_rope(self) -> None:
        # Phi-3's own check rejects every rule but longrope.
        add_rope_types()
        super(Phi3Config, self).validate_rope()


def _split_sections(attention: Any, fused: Tensor) -> Sequence[Tensor]:
    """Split a fused projection into all queries, all keys and all values."""
    keys = fused.shape[-1] // (attention.num_key_value_groups + 2)
    return fused.split((keys * attention.num_key_value_groups, keys, keys), dim=-1)


class CoCAPhi3Attention(CollinearAttention, Phi3Attention):
    """Phi-3's attention with a T projection instead of its key projection."""

    layout = AttentionLayout(fused_name="qkv_proj", split_fused=_split_sections)


class CoCAPhi3Model(CollinearModel, Phi3Model):
    """Phi-3's decoder with CoCA attention."""

    config: CoCAPhi3Config
    attention_class = CoCAPhi3Attention


class CoCAPhi3ForCausalLM(CollinearForCausalLM, Phi3ForCausalLM):
    """Phi-3 with CoCA attention and a language-model head."""

    config: CoCAPhi3Config
    body_class = CoCAPhi3Model


FAMILY = Family(Phi3ForCausalLM, Phi3Model, CoCAPhi3ForCausalLM)
