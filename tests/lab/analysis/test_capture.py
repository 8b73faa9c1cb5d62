"""Captured queries and keys are those that attention uses, in every family."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coca_attention import convert
from coca_attention.errors import UserError
from coca_attention.models import set_rotary_scaling
from coca_lab.analysis import collect_layers
from coca_lab.analysis.angles import rotary_scores
from coca_lab.analysis.capture import visible_keys
from coca_lab.analysis.scores import TokenPairs, score_rows, seen_keys
from conftest import tiny_model
from covering import mostly_slow
from families import FAMILIES, VARIED, collinear, vanilla

LENGTH = 24
FORMS = ["vanilla", "slack", "strict", "magnitude"]


def some_ids(length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(seed))


# Every family's projections, and those of its CoCA models in one of the forms.
PAIRS = [(family, "vanilla") for family in FAMILIES]
PAIRS += [(family, FORMS[1 + i % 3]) for i, family in enumerate(FAMILIES)]
DEFAULT = [pair for pair in PAIRS if pair[1] == "vanilla" or pair[0] in VARIED]


@pytest.mark.parametrize(("family", "form"), mostly_slow(PAIRS, DEFAULT))
def test_captured_scores_match_attention_and_the_keys_seen_give_them(family, form, monkeypatch):
    model = (vanilla(family) if form == "vanilla" else collinear(family, form)).double()
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    computed = []

    def spy(module, query, key, value, mask, scaling=None, **kwargs):
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        computed.append((query @ keys.transpose(-2, -1) * scaling)[0])
        return sdpa(module, query, key, value, mask, scaling=scaling, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", spy)
    layers = collect_layers(model, some_ids())
    assert len(layers) == len(computed) == 2
    queries, keys = torch.tensor([5, 9, 23, 23]), torch.tensor([4, 0, 1, 20])
    for index, (heads, scores) in enumerate(zip(layers, computed, strict=True)):
        assert (heads.layer, heads.form) == (index, form)
        found = score_rows(heads, torch.arange(LENGTH))
        # Transformers' own cos and sin are of float32.
        torch.testing.assert_close(found, scores, rtol=1e-4, atol=1e-4 * scores.abs().max().item())
        seen = seen_keys(heads, TokenPairs(queries, keys))
        rotated = rotary_scores(seen.query * seen.effective.conj(), queries - keys, heads.theta)
        # What is not rotated scores the same at any position: leave it out on the other side.
        blind = replace(heads, query=heads.query.clone())
        blind.query[..., heads.rotation.width :] = 0
        expected = score_rows(blind, queries)[:, torch.arange(4), keys] / heads.scale
        torch.testing.assert_close(rotated, expected)


def test_windows_and_layer_types_are_captured():
    for family, expected in (
        ("Gemma 3", [("sliding_attention", 8), ("full_attention", None)]),
        ("Mistral", [(None, 8)] * 2),
        ("Llama", [(None, None)] * 2),
    ):
        layers = collect_layers(vanilla(family), some_ids())
        assert [(heads.kind, heads.window) for heads in layers] == expected


def test_scores_with_a_decay_and_a_window_give_the_weights():
    model = vanilla("GPT-NeoX", layer_types=["sliding_attention", "full_attention"])
    model.config.sliding_window = 6
    model.config.rope_parameters |= {"turning_pairs": 0, "temperature": 16, "decay": 1.5}
    free_pairs = {"sliding_attention": 0, "full_attention": 4}
    model = convert(model, "strict", free_pairs=free_pairs).double().eval()
    layers, rows = collect_layers(model, some_ids()), torch.tensor([4, 11, 23])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(some_ids(), output_attentions=True).attentions
    for heads, weights in zip(layers, expected, strict=True):
        hidden = ~visible_keys(rows, LENGTH, heads.window)
        found = score_rows(heads, rows).masked_fill(hidden, float("-inf")).softmax(-1)
        torch.testing.assert_close(found, weights[0][:, rows].double(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn", "dynamic"])
def test_scaled_angles_are_captured(kind):
    model = vanilla("Llama")
    plain = collect_layers(model, some_ids(100))[0]
    set_rotary_scaling(model, kind, factor=4.0)
    scaled = collect_layers(model, some_ids(100))[0]
    assert scaled.theta[-1] < plain.theta[-1]
    assert (scaled.rotation.rule.magnitude > 1) is (kind == "yarn")


def test_longrope_depends_on_the_text_only_in_transformers():
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 2,
        "long_factor": [3.0] * 2,
        "original_max_position_embeddings": 16,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    }
    model = vanilla("Phi-3", rope_parameters=rope, original_max_position_embeddings=16)
    short, long = (collect_layers(model, some_ids(length))[0].theta for length in (10, 40))
    torch.testing.assert_close(short, 3 * long)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_tables_match_the_rotation(dtype):
    # Of base 10^6 the slowest sines are below float16's normal numbers.
    rope = {"rope_type": "default", "rope_theta": 1e6}
    model = vanilla("Llama", head_dim=16, rope_parameters=rope).to(dtype)
    assert len(collect_layers(model, some_ids())[0].theta) == 8


def test_unsupported_models_are_refused():
    class Changed(LlamaForCausalLM):
        pass

    llama = vanilla("Llama")
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=97, n_embd=8, n_head=2)).eval()
    for model in (gpt2, tiny_model("alibi"), Changed(llama.config).eval(), llama.model):
        with pytest.raises(UserError, match=rf"{type(model).__name__} is not supported.*llama"):
            collect_layers(model, some_ids())
    with pytest.raises(UserError, match=r"model\.eval"):
        collect_layers(llama.train(), some_ids())


def test_damaged_weights_are_refused():
    model = vanilla("Llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="layer 1: queries or keys are not finite"):
        collect_layers(model, some_ids())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", ["Llama", "Cohere", "GLM-4"])
def test_angles_that_differ_from_the_configuration_are_refused(family):
    model = vanilla(family)
    assert collect_layers(model, some_ids())
    with torch.no_grad():
        model.model.rotary_emb.inv_freq[-1] *= 1.01
    with pytest.raises(UserError, match="rotary angles differ from"):
        collect_layers(model, some_ids())
