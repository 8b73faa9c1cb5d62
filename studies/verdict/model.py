"""A Llama whose attention layers have score functions chosen by name, to compare scores fairly.

Legend: B batch, T tokens, H query heads, G key/value heads, Dv value width.

Everything but the attention is Transformers' own: RMSNorm, SwiGLU, initialisation, loss, saving. It
keeps no cache and takes no padding: it is for training and for scoring texts of equal length.
"""

from dataclasses import field
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from coca_attention.ops import Rotation, attend
from studies.verdict.collinear import Collinear
from studies.verdict.pope import PoPE
from studies.verdict.rotary import Rotary
from studies.verdict.score import Score

SCORES: dict[str, type[Score]] = {"rotary": Rotary, "collinear": Collinear, "pope": PoPE}
"""The scores by their names in configurations."""


@strict
class BaselineConfig(LlamaConfig):
    """Llama with a score function for every kind of layer.

    Args:
        layers: A letter per layer, repeated over all layers.
        scores: By letter, the options of the layer: ``score``, a name in `SCORES`; ``kv_heads``;
            ``window``, the tokens in sight, by default all; ``rotation``, the fields of the
            `Rotation`, of which ``width`` has no default; and the score's own.
    """

    model_type = "baseline_llama"

    layers: str = "g"
    scores: dict[str, Any] = field(
        default_factory=lambda: {"g": {"score": "rotary", "rotation": {"width": 128}}}
    )
    use_cache: bool = False


class BaselineAttention(nn.Module):
    """Attention under a score function, with float32 scores in linear memory.

    Args:
        config: The model's configuration.
        score: Name of the score.
        rotation: Fields of the `Rotation`.
        kv_heads: G; default H.
        window: Tokens in sight; default: all before.
        **options: The score's own.
    """

    def __init__(
        self,
        config: BaselineConfig,
        *,
        score: str,
        rotation: dict[str, Any],
        kv_heads: int | None = None,
        window: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        heads = config.num_attention_heads
        self.heads = heads
        self.kv_heads = kv_heads or heads
        self.window = window
        self.value_width = hidden // heads
        self.score = SCORES[score](heads, Rotation(**rotation), **options)
        self.q_proj = nn.Linear(hidden, heads * self.score.query_width, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.score.key_width, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.value_width, bias=False)
        self.o_proj = nn.Linear(heads * self.value_width, hidden, bias=False)

    @property
    def cache_numbers(self) -> int:
        """Numbers that a cache must hold for every token."""
        return self.kv_heads * (self.score.key_width + self.value_width)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        past_key_values: Any = None,
        cache: Any = None,  # as Transformers 5.24 calls it
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Causal attention over the whole text, (B, T, hidden)."""
        if any(each is not None for each in (attention_mask, past_key_values, cache)):
            raise ValueError(
                "a baseline takes texts of equal length without padding, packing or cache: leave "
                "out attention_mask and position_ids, and set use_cache=False"
            )
        batch, length = hidden_states.shape[:2]

        def project(projection: nn.Linear, heads: int) -> Tensor:
            return projection(hidden_states).view(batch, length, heads, -1).transpose(1, 2)

        query = project(self.q_proj, self.heads)
        key, value = (project(x, self.kv_heads) for x in (self.k_proj, self.v_proj))
        rotation = self.score.rotation
        positions = torch.arange(length, device=query.device)
        wide = torch.promote_types(query.dtype, torch.float32)
        query = query.to(wide)
        key = key.to(wide)
        value = value.to(wide)
        query, key = self.score(query, key, *rotation.tables(positions, wide))
        factor = rotation.query_factor(positions, wide)
        output = attend(
            query if factor is None else query * factor[:, None],
            key,
            value,
            window=self.window,
            scale=1.0,
            bias=None if rotation.decay is None else rotation.bias,
        )
        output = output.to(hidden_states.dtype).transpose(1, 2).flatten(2)
        return self.o_proj(output), None


class BaselineForCausalLM(LlamaForCausalLM):
    """Llama's language model with a `BaselineAttention` in every layer."""

    config: BaselineConfig

    def __init__(self, config: BaselineConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            letter = config.layers[index % len(config.layers)]
            layer.self_attn = BaselineAttention(config, **config.scores[letter])
        self.post_init()
