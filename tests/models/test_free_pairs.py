"""Pairs with ordinary rotary scores, pairs that do not turn, and the temperature, in models."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from coca_attention import convert
from coca_attention.models import set_rotary_scaling
from coca_attention.models.configuration import rotation
from coca_attention.testing import assert_consistent, difference, logits, some_tokens
from families import FAMILIES, vanilla

# Grouped heads; partial rotary and pairs (2j, 2j + 1); windows and key norms; fused projections.
VARIED = ["Llama", "GLM-4", "Gemma 3", "GPT-NeoX"]


@pytest.mark.parametrize("family", FAMILIES)
def test_with_all_pairs_free_a_converted_model_is_what_it_was(family):
    model = vanilla(family).double()
    ids = some_tokens(model)
    set_rotary_scaling(model, "none")  # cos and sin of float64 angles, not of float32 ones
    expected = logits(model, ids)
    convert(model, "strict", free_pairs=4)
    # Cohere's own attention rotates in float32.
    tolerance = 1e-5 if family == "Cohere" else 1e-12
    assert difference(logits(model, ids), expected) < tolerance * expected.abs().max()
    some = convert(vanilla(family).double(), "strict", free_pairs=3)
    assert difference(logits(some, ids), expected) > 1e-4


@pytest.mark.parametrize("family", VARIED)
@pytest.mark.parametrize("cache", ["full", "half"])
@pytest.mark.parametrize("form", ["slack", "magnitude"])
def test_every_way_of_reading_gives_the_same(family, cache, form):
    model = convert(vanilla(family), form, free_pairs=2, kv_cache=cache).double()
    for name in ("full_attention", None):
        rope = model.config.rope_parameters.get(name, model.config.rope_parameters)
        rope |= {"temperature": 16, "turning_pairs": 1}
    kind = "full_attention" if family == "Gemma 3" else None
    assert rotation(model.config, kind).frequencies()[1:].sum() == 0
    ids = some_tokens(model, length=40)
    plain = convert(vanilla(family), form, free_pairs=2).double()
    assert difference(logits(model, ids), logits(plain, ids)) > 1e-4
    assert_consistent(model, ids)


def test_they_are_saved_loaded_and_initialised(tmp_path):
    model = convert(vanilla("Llama"), "strict", free_pairs=3)
    model.config.rope_parameters |= {"temperature": 16, "turning_pairs": 1}
    ids = some_tokens(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, ids), logits(model, ids))
    drawn = AutoModelForCausalLM.from_config(model.config)
    rows = drawn.model.layers[0].self_attn.t_proj.weight.unflatten(0, (-1, 7))
    collinear, free = rows[:, :1], rows[:, 1:]
    ratio = collinear.std() / free.std()
    assert 0.5 < ratio < 0.95  # 1/√2 of the spread, of few numbers


def test_gradients_reach_all_coefficients():
    model = convert(vanilla("Llama"), "slack", free_pairs=2).train()
    ids = some_tokens(model)
    model(ids, labels=ids).loss.backward()
    rows = model.model.layers[0].self_attn.t_proj.weight.grad.unflatten(0, (-1, 6))
    assert (rows.abs().amax((0, 2)) > 0).all()


@pytest.mark.parametrize("count", [-1, 5])
def test_impossible_numbers_are_refused(count):
    with pytest.raises(ValueError, match=rf"between 0 and 4.*; got {count}"):
        convert(vanilla("Llama"), free_pairs=count)
