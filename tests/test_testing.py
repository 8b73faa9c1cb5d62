"""The consistency checks find the errors that they are for."""

import pytest
import torch
from transformers import LlamaConfig

from coca_attention.models.attention import CACHE
from coca_attention.testing import CHECKS, assert_consistent, measure_consistency, some_tokens
from conftest import CONFIGS, SIZES, WHOLE_HEAD, tiny_model


def test_transformers_dynamic_scaling_is_detected(monkeypatch):
    """Its base depends on the longest text seen, and changes after keys were cached."""
    dynamic = {**WHOLE_HEAD, "rope_type": "dynamic", "factor": 4.0}
    monkeypatch.setitem(CONFIGS, "dynamic", lambda: LlamaConfig(**SIZES, rope_parameters=dynamic))
    model = tiny_model("dynamic")
    found = measure_consistency(model, some_tokens(model, length=48))
    assert found["decoding"] > 1e-2
    assert found["batch composition"] > 1e-2
    assert found["batch order"] < 1e-4
    with pytest.raises(AssertionError, match=r"LlamaForCausalLM is not consistent.*decoding 0\."):
        assert_consistent(model, some_tokens(model, length=48))


def broken(model, name):
    """Break the property that a check tests."""
    body = model.model
    forward = type(body).forward
    seen = {"length": 0}

    def wrong(input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        length = input_ids.shape[1]
        cache = kwargs.get(CACHE)
        if name == "left padding":
            position_ids = torch.arange(length).unsqueeze(0)
        elif name == "right padding" and attention_mask is not None and cache is None:
            # Counted from the end, as if all padding were on the left.
            pads = (1 - attention_mask).sum(-1, keepdim=True)
            position_ids = (torch.arange(length) - pads).clamp(min=0)
        elif name in ("decoding", "static decoding") and cache is not None:
            static = type(cache).__name__ == "StaticCache"
            if static == (name == "static decoding"):
                position_ids = torch.arange(length).unsqueeze(0)
        elif name == "long then short":
            seen["length"] = max(seen["length"], length)
            position_ids = (torch.arange(length) * (1 + seen["length"] // 50)).unsqueeze(0)
        elif name == "batch order":
            position_ids = torch.arange(length) + 7 * torch.arange(len(input_ids)).unsqueeze(1)
        elif name == "batch composition" and attention_mask is not None:
            position_ids = (torch.arange(length) * (length // 30)).unsqueeze(0)
        return forward(body, input_ids, attention_mask, position_ids, **kwargs)

    body.forward = wrong
    return model


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_finds_its_fault(name):
    model = broken(tiny_model("llama-slack"), name)
    ids = some_tokens(model, length=20)
    assert measure_consistency(model, ids, [name])[name] > 1e-2
    assert measure_consistency(tiny_model("llama-slack"), ids, [name])[name] < 1e-4


def test_invalid_arguments_are_refused():
    model = tiny_model("llama-rope")
    with pytest.raises(ValueError, match="at least 2 rows of 10 tokens"):
        measure_consistency(model, torch.ones(1, 20, dtype=torch.long))
    with pytest.raises(ValueError, match="no checks"):
        measure_consistency(model, None, [])
    with pytest.raises(ValueError, match=r"in torch\.bfloat16 rounding hides"):
        assert_consistent(model.bfloat16())
    model.float()
    found = measure_consistency(model, None, (name for name in ["batch order"]))
    assert list(found) == ["batch order"]
    with pytest.raises(ValueError, match=r"unknown checks \['speed'\]"):
        measure_consistency(model, None, ["speed"])


def test_tokens_avoid_padding_and_stay_in_the_vocabulary():
    model = tiny_model("llama-rope")
    model.config.pad_token_id = 7
    ids = some_tokens(model, batch=50, length=100)
    assert not (ids == 7).any()
    assert ids.min() == 0 and ids.max() == model.config.vocab_size - 1
