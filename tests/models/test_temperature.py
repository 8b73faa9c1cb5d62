"""Method temperature: folded into the queries of layers without positions, in stock classes."""

import copy
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coca_attention import convert, extend_context
from coca_attention.errors import UserError
from coca_attention.models.configuration import GLOBAL, layer_types, without_positions
from coca_attention.models.methods import applied
from coca_attention.testing import difference, logits, some_tokens
from families import SIZES, far_from_uniform, vanilla
from natives import cohere, roles
from public_models import CASES, class_of, loaded, write_public

LOCAL_GLOBAL = ["sliding_attention", "sliding_attention", "full_attention"]
BESIDE = {"layer_types": LOCAL_GLOBAL, "sliding_window": 8}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "num_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
CLASSES = {
    "cohere2": {**BESIDE, "logit_scale": 0.5},
    "exaone4": {**BESIDE, "sliding_window_pattern": 3},
    "exaone_moe": {
        **BESIDE, **EXPERTS, "sliding_window_pattern": 3, "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "afmoe": {**BESIDE, **EXPERTS, "num_dense_layers": 1, "global_attn_every_n_layers": 3},
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "granite_swa": {**BESIDE, "layer_rope_theta": [1e4, 1e4, 0]},
}  # fmt: skip
"""By model type, the fields beside sizes that give it layers without positions."""


def made(kind, **changes):
    torch.manual_seed(0)
    fields = SIZES | {"num_hidden_layers": 3} | CLASSES[kind] | changes
    config = AutoConfig.for_model(kind, **fields)
    return far_from_uniform(AutoModelForCausalLM.from_config(config).eval())


def attention_reads_positions(model, ids):
    """Whether the attention of each layer returns something else if positions turn twice as far."""
    seen = {}

    def compare(module, args, kwargs, output):
        turned = dict(kwargs)
        if turned["position_embeddings"] is not None:
            cos, sin = turned["position_embeddings"]
            turned["position_embeddings"] = cos * cos - sin * sin, 2 * sin * cos
        handles.pop(module).remove()
        other = module(*args, **turned)
        seen[module.layer_idx] = not torch.allclose(output[0], other[0], atol=1e-6)

    handles = {
        layer.self_attn: layer.self_attn.register_forward_hook(compare, with_kwargs=True)
        for layer in model.model.layers
    }
    logits(model, ids)
    return [seen[index] for index in sorted(seen)]


@pytest.mark.parametrize("kind", CLASSES)
def test_layers_without_positions_are_found(kind):
    model = made(kind)
    reads = attention_reads_positions(model, some_tokens(model, length=20))
    assert without_positions(model.config) == [not each for each in reads] == [False, False, True]


@pytest.mark.parametrize(
    ("kind", "window", "free"), [("cohere2", 8, True), ("afmoe", 8, True), ("exaone4", None, False)]
)
def test_layers_that_all_see_the_whole_text_have_positions_or_not(kind, window, free):
    model = made(kind, layer_types=["full_attention"] * 3, sliding_window=window)
    reads = attention_reads_positions(model, some_tokens(model, length=20))
    assert without_positions(model.config) == [not each for each in reads] == [free] * 3


@pytest.mark.parametrize("kind", CLASSES)
def test_scores_of_layers_without_positions_grow_and_the_others_are_yarn(kind, tmp_path):
    model = made(kind)
    scaled = copy.deepcopy(model)
    factor = math.log(129) / math.log(65)
    if kind == "smollm3":  # the only one whose rotary layers see the whole text
        config = copy.deepcopy(model.config)
        config.rope_parameters |= {
            "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64,
        }  # fmt: skip
        scaled = AutoModelForCausalLM.from_config(config).eval()
        scaled.load_state_dict(model.state_dict())
    scaled.model.layers[2].self_attn.scaling *= factor
    ids = some_tokens(model, length=150)
    before = logits(model, ids)
    with applied(model, "temperature", to=128):
        within = logits(model, ids)
    assert torch.equal(logits(model, ids), before)
    theirs = type(model)
    assert extend_context(model, "temperature", to=128) is model
    assert torch.equal(logits(model, ids), within)
    assert difference(logits(model, ids), logits(scaled, ids)) < 1e-5
    assert difference(logits(model, ids), before) > 1e-3
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is theirs and again.config.max_position_embeddings == 128
    assert difference(logits(again, ids), logits(model, ids)) < 1e-6


@pytest.mark.parametrize(
    "name", ["HuggingFaceTB/SmolLM3-3B", "CohereForAI/c4ai-command-r7b-12-2024"]
)
def test_it_applies_to_public_models_of_which_no_other_method_does(name, tmp_path):
    write_public(CASES[name], tmp_path / "model")
    model = loaded(tmp_path / "model", class_of(CASES[name]))
    with pytest.raises(UserError, match="method temperature of extend_context is for them"):
        convert(model, "rope")
    ids = some_tokens(model, length=100)
    before = logits(model, ids)
    extend_context(model, "temperature")
    assert difference(logits(model, ids), before) > 1e-4
    kinds = zip(layer_types(model.config), without_positions(model.config), strict=True)
    rotary = any(kind == GLOBAL and not free for kind, free in kinds)
    assert (model.config.rope_parameters["rope_type"] == "yarn") is rotary


def test_models_with_roles_take_it_and_others_do_not():
    model = roles()
    ids = some_tokens(model, length=150)
    before = logits(model, ids)
    assert difference(logits(extend_context(model, "temperature"), ids), before) > 1e-4
    with pytest.raises(UserError, match="type 'gemma3_text' has none"):
        extend_context(vanilla("Gemma 3"), "temperature")


def test_rotary_layers_that_cannot_be_scaled_are_refused_and_nothing_changed(monkeypatch):
    model = made("smollm3")
    rotary = model.model.rotary_emb
    monkeypatch.delattr(type(rotary), "compute_default_rope_parameters")  # as in other families
    weights = [each.self_attn.q_proj.weight.clone() for each in model.model.layers]
    with pytest.raises(UserError, match=r"rotary layers of smollm3 .* cannot be scaled"):
        extend_context(model, "temperature")
    for layer, before in zip(model.model.layers, weights, strict=True):
        assert torch.equal(layer.self_attn.q_proj.weight, before)


def test_a_norm_whose_weight_is_an_offset_is_not_folded_into():
    model = made("exaone4")
    ids = some_tokens(model, length=20)
    norm = model.model.layers[2].self_attn.q_norm
    plain = type(norm).forward

    class Offset(type(norm)):
        def forward(self, hidden_states):
            return plain(self, hidden_states) * (1 + 1 / self.weight)

    norm.__class__ = Offset
    before = logits(model, ids)
    with pytest.raises(UserError, match="whose weights scale the scores"):
        extend_context(model, "temperature")
    assert torch.equal(logits(model, ids), before)


def test_a_model_with_a_temperature_of_its_own_is_refused():
    model = cohere()
    model.config.attn_temperature_tuning = True
    with pytest.raises(UserError, match="has a temperature, which grows with the text"):
        extend_context(model, "temperature")
