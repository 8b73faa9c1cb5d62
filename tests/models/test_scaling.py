"""Rotary scaling of loaded models, CoCA and vanilla."""

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, GPTNeoXConfig, LlamaConfig

from coca_attention.models import set_rotary_scaling, training_length
from conftest import VOCABULARY, tiny_model

IDS = torch.randint(1, VOCABULARY, (1, 48), generator=torch.Generator().manual_seed(2))
ROTARY = ["slack", "strict", "llama-slack", "rope", "llama-rope"]


@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize("scaling", ["linear", "ntk", "dynamic", "yarn"])
def test_scaling_changes_logits_and_none_restores_them(kind, scaling):
    model = tiny_model(kind)
    plain = model(IDS).logits
    set_rotary_scaling(model, scaling, factor=4.0)
    assert not torch.allclose(model(IDS).logits, plain, atol=1e-2)
    set_rotary_scaling(model, "none")
    assert torch.allclose(model(IDS).logits, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["rope", "llama-rope"])
@pytest.mark.parametrize("scaling", ["linear", "dynamic"])
def test_vanilla_models_scale_as_transformers_scales_them(kind, scaling):
    model = tiny_model(kind)
    config = model.config.to_dict()
    config["rope_parameters"] = {**config["rope_parameters"], "rope_type": scaling, "factor": 4.0}
    theirs = AutoModelForCausalLM.from_config(type(model.config)(**config)).eval()
    theirs.load_state_dict(model.state_dict())
    set_rotary_scaling(model, scaling, factor=4.0)
    assert torch.allclose(model(IDS).logits, theirs(IDS).logits, rtol=0, atol=2e-4)


def test_partial_rotary_is_scaled_over_its_own_width():
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        rotary_pct=0.5,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    plain = model(IDS).logits
    set_rotary_scaling(model, "ntk", factor=1.0, length=16)
    assert torch.allclose(model(IDS).logits, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ROTARY)
def test_ntk_at_a_length_is_dynamic_for_an_input_of_that_length(kind):
    model = tiny_model(kind)
    set_rotary_scaling(model, "dynamic", factor=4.0)
    dynamic = model(IDS).logits
    set_rotary_scaling(model, "ntk", factor=4.0, length=48)
    assert torch.allclose(model(IDS).logits, dynamic, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize("scaling", ["ntk", "dynamic"])
def test_a_long_input_does_not_change_a_later_short_one(kind, scaling):
    model = tiny_model(kind)
    set_rotary_scaling(model, scaling, factor=4.0)
    before = model(IDS[:, :10]).logits
    model(IDS.repeat(1, 4))
    assert torch.equal(model(IDS[:, :10]).logits, before)


@pytest.mark.parametrize("kind", ["slack", "llama-slack"])
def test_the_saved_configuration_keeps_the_scaling(kind, tmp_path):
    model = tiny_model(kind)
    set_rotary_scaling(model, "ntk", factor=4.0, length=128)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert training_length(loaded.config) == 32


def test_models_that_cannot_be_scaled_are_refused_and_left_alone():
    alibi = tiny_model("alibi")
    with pytest.raises(ValueError, match="no rotary embedding to scale"):
        set_rotary_scaling(alibi, "ntk", factor=4.0)

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    interleaved = AutoModelForCausalLM.from_config(CohereConfig(**sizes)).eval()
    before = interleaved(IDS).logits
    with pytest.raises(ValueError, match="of a kind whose scaling is not supported"):
        set_rotary_scaling(interleaved, "ntk", factor=4.0)
    assert torch.equal(interleaved(IDS).logits, before)

    llama3 = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    scaled = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, rope_parameters=llama3))
    with pytest.raises(ValueError, match="already scaled"):
        set_rotary_scaling(scaled, "linear", factor=2.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "linear", "factor": 0.0}, "at least 1"),
        ({"kind": "ntk", "factor": -1.0}, "at least 1"),
        ({"kind": "ntk", "factor": 2.0, "length": 31}, "shorter than the training length"),
        ({"kind": "cubic"}, "unknown rotary scaling"),
    ],
)
def test_bad_scalings_are_refused_and_change_nothing(arguments, message):
    model = tiny_model("slack")
    before = dict(model.config.rope_parameters)
    with pytest.raises(ValueError, match=message):
        set_rotary_scaling(model, **arguments)
    assert model.config.rope_parameters == before
