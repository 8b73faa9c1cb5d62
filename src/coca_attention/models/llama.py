"""CoCA on the Llama body."""

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaPreTrainedModel

from coca_attention.models.attention import (
    CoCARotary,
    CollinearAttention,
    FoldedLinear,
    TruePositions,
)
from coca_attention.models.configuration import CoCAConfigMixin


@strict
class CoCALlamaConfig(CoCAConfigMixin, LlamaConfig):
    """Llama with CoCA attention.

    Args:
        coca_form: ``slack`` (the paper's Eq. 10) or ``strict`` (Eq. 9).
        max_position_embeddings: The training length in tokens.
        rope_parameters: Rotary base and scaling, see `CoCAConfigMixin`.
    """

    model_type = "coca_llama"
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.t_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    coca_form: str = "slack"


class CoCALlamaAttention(CollinearAttention):
    def __init__(self, config: CoCALlamaConfig, layer_idx: int) -> None:
        super().__init__(
            config,
            layer_idx,
            num_key_value_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
            bias=config.attention_bias,
        )


class CoCALlamaPreTrainedModel(LlamaPreTrainedModel):
    config: CoCALlamaConfig
    _can_record_outputs = {"hidden_states": LlamaDecoderLayer, "attentions": CoCALlamaAttention}

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, FoldedLinear):
            module.init_folded(self.config.initializer_range)
        else:
            super()._init_weights(module)


class CoCALlamaModel(TruePositions, CoCALlamaPreTrainedModel, LlamaModel):
    def __init__(self, config: CoCALlamaConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = CoCALlamaAttention(config, index)
        self.rotary_emb = CoCARotary(config)
        self.post_init()


class CoCALlamaForCausalLM(CoCALlamaPreTrainedModel, LlamaForCausalLM):
    """Llama with CoCA attention and a language-model head."""

    def __init__(self, config: CoCALlamaConfig) -> None:
        # Past LlamaForCausalLM's own, which would build a vanilla body first.
        LlamaPreTrainedModel.__init__(self, config)
        self.model = CoCALlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
