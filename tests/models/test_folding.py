"""A temperature for longer texts in the weights, for good or while a model is evaluated."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, Cohere2Config, LlamaConfig, LlamaForCausalLM

from coca_attention.errors import UserError
from coca_attention.models.folding import fold_temperature, global_queries
from coca_lab.evaluation.task import RotaryScaling

FIELDS = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 4,
}


def made(**fields):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Cohere2Config(**FIELDS, **fields)).eval()


def test_scores_of_global_layers_alone_grow_by_the_ratio_of_logarithms():
    model, before = made(), made().state_dict()
    factor = fold_temperature(model, 64)
    assert factor == pytest.approx(math.log(65) / math.log(9))
    for name, weight in model.state_dict().items():
        expected = factor if name == "model.layers.2.self_attn.q_proj.weight" else 1.0
        torch.testing.assert_close(weight, before[name] * expected)


def test_an_evaluation_folds_it_and_restores_every_bit():
    model, folded, ids = made(), made(), torch.arange(20)[None]
    fold_temperature(folded, 32)
    before = model(ids).logits
    with RotaryScaling("fold", 4.0).applied(model, 20):
        torch.testing.assert_close(model(ids).logits, folded(ids).logits)
        assert not torch.equal(model(ids).logits, before)
    assert torch.equal(model(ids).logits, before)


def test_a_model_without_roles_or_a_shorter_context_is_refused():
    plain = LlamaForCausalLM(LlamaConfig(**{**FIELDS, "layer_types": None, "sliding_window": None}))
    with pytest.raises(UserError, match="beside local ones"):
        global_queries(plain)
    with pytest.raises(UserError, match="at least the training length, 8"):
        fold_temperature(made(), 4)
