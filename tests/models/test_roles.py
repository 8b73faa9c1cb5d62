"""Layers with roles, free pairs, pairs that do not turn, and the temperature, in models."""

from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from coca_attention import convert
from coca_attention.errors import UserError
from coca_attention.models import Roles, layer_pass
from coca_attention.models.configuration import rotation
from coca_attention.ops import attend
from coca_attention.testing import decoded_logits, difference, logits, some_tokens
from families import (
    FAMILIES,
    VARIED,
    assert_reads_the_same,
    attended,
    oracle_scores,
    reloaded,
    vanilla,
    with_exact_angles,
)

WINDOW = 6
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def with_roles(family="Llama", form="strict", kinds=(LOCAL, GLOBAL), **changes):
    """A local layer of collinear pairs and a global one of free pairs that do not turn."""
    model = vanilla(family, layer_types=list(kinds), sliding_window=WINDOW)
    added = {"turning_pairs": 0, "temperature": 16, "decay": 1.5, "decay_length": 4.0}
    model.config.rope_parameters |= added
    free = {LOCAL: 0, GLOBAL: 4} | changes.pop("free", {})
    return convert(model, form, free_pairs=free, **changes).double().eval()


@pytest.mark.parametrize("family", VARIED)
def test_attention_weights_are_the_oracles(family):
    model = with_roles(family)
    positions = torch.arange(20)
    distance = positions.unsqueeze(-1) - positions
    for attention, q, t, weights in attended(model, some_tokens(model, length=20))[1]:
        hidden, scores = distance < 0, oracle_scores("strict", attention, q, t)
        if attention.layer_type == LOCAL:
            hidden = hidden | (distance >= WINDOW)
        else:
            assert not rotation(model.config, GLOBAL).frequencies().any()
            scores = scores * ((positions + 2).log() / torch.tensor(17.0).log()).unsqueeze(-1)
            # The decay multiplies weights by a power of the distance.
            scores = scores + ((1 + distance.clamp(min=0) / 4.0) ** -1.5).log() / attention.scaling
        expected = (scores * attention.scaling).masked_fill(hidden, -torch.inf).softmax(-1)
        assert (weights - expected).abs().max() < 1e-6


def test_local_layers_need_no_mask_where_it_is_nothing_but_the_window(monkeypatch):
    model = with_roles(kv_cache="half")
    ids, recorded = some_tokens(model, length=200), Mock(wraps=attend)
    monkeypatch.setattr(layer_pass, "attend", recorded)
    given = {"attention_mask": torch.ones_like(ids)}, {"position_ids": torch.arange(200)[None]}
    for options in ({}, *given):
        logits(model, ids, **options)
    for options in ({}, {"cache": DynamicCache()}, {"first": 4}):
        decoded_logits(model, ids, **options)
    # The local layer in one pass each, then in every piece of several tokens.
    windows = [call.kwargs["window"] for call in recorded.call_args_list]
    assert list(filter(None, windows)) == [WINDOW] * 9  # besides biases of the global layer


def test_a_boolean_mask_hides_alike_in_every_implementation():
    """(B, 1, T, S), as for packed documents; without a window, which the caller's mask contains."""
    model = with_roles()
    ids = some_tokens(model, batch=2, length=20)
    mask = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    mask[:, :, 9:, :9] = False
    fused = logits(model, ids, attention_mask=mask)
    model.set_attn_implementation("eager")
    eager = logits(model, ids, attention_mask=mask)
    assert difference(eager, fused) < 1e-12
    assert difference(eager[:, 9:], logits(model, ids)[:, 9:]) > 1e-3


@pytest.mark.parametrize("family", [*VARIED, "Qwen3"])
def test_a_model_is_converted_to_roles(family, tmp_path):
    kinds = {"use_sliding_window": False, "layer_types": None} if "Qwen" in family else {}
    model, other = (vanilla(family, **kinds).double().eval() for _ in range(2))
    ids, length = some_tokens(model, length=20), model.config.max_position_embeddings
    before = logits(model, ids)
    # Windows as long as the text and rotary attention everywhere: what it was.
    pairs = rotation(model.config).width // 2
    convert(model, "rope", roles=Roles("lg", window=20, turning_pairs=pairs, temperature=False))
    assert difference(logits(model, ids), before) < 1e-6
    config = convert(other, "rope", roles=Roles("lg")).config
    assert config.layer_types == [LOCAL, GLOBAL]
    assert config.sliding_window == length // 8
    found = rotation(config, GLOBAL)
    assert (found.turning, found.temperature) == (0, length)
    assert found.decay is None
    assert difference(logits(reloaded(other, tmp_path), ids), logits(other, ids)) < 1e-12


@pytest.mark.parametrize("family", ["Mistral", "Phi-3", "Llama"])
def test_global_layers_alone_see_the_whole_text(family):
    model = convert(vanilla(family).double().eval(), "rope", roles=Roles("g"))
    ids = some_tokens(model, length=60)
    changed = ids.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 90 + 3
    assert (logits(model, changed) - logits(model, ids)).abs()[:, -1].max() > 1e-9


@pytest.mark.parametrize("layers", ["l", "g", "lg"])
def test_any_kinds_of_layers_generate_with_a_static_cache(layers):
    model = convert(
        vanilla("Llama").double().eval(), "rope", roles=Roles(layers, window=6, decay=1.0)
    )
    assert_reads_the_same(model, some_tokens(model, length=10))


@pytest.mark.parametrize(
    ("family", "changes", "got"),
    [("Llama", {"layer_types": [LOCAL] * 2}, ""), ("Mistral", {"sliding_window": 1}, ".* got 1")],
)
def test_local_layers_need_a_window_of_two(family, changes, got):
    """Transformers' cache of one keeps everything, and decoding would see all of that."""
    with pytest.raises(UserError, match=f"sliding_window of sliding_attention layers must{got}"):
        convert(vanilla(family, **changes), "strict")


def test_the_default_window_of_short_models_decodes_right():
    model = convert(vanilla("Llama", max_position_embeddings=8), "strict", roles=Roles("lg"))
    assert model.config.sliding_window == 2
    assert_reads_the_same(model.double(), some_tokens(model, length=10))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": "x"}, "letters l and g, got 'x'"),
        ({"window": 1}, "`window` must be a whole number between 2 and .*, got 1"),
        ({"window": True}, "`window` must be a whole number between 2 and .*, got True"),
        ({"window": 5.5}, "`window` must be a whole number between 2 and .*, got 5.5"),
        ({"turning_pairs": -1}, "`turning_pairs` must be a whole number between 0 and"),
        ({"decay": float("nan")}, "`decay` must be a finite number from 0, got nan"),
        ({"decay_length": 0.0}, "`decay_length` must be a finite number above 0, got 0"),
    ],
)
def test_roles_out_of_range_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Roles(**fields)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_all_pairs_free_a_converted_model_is_what_it_was(family):
    model = with_exact_angles(vanilla(family).double())
    ids = some_tokens(model)
    expected = logits(model, ids)
    convert(model, "strict", free_pairs=4)
    # Cohere's and ERNIE's own attention rotates in float32.
    tolerance = 1e-5 if family in ("Cohere", "ERNIE 4.5") else 1e-12
    assert difference(logits(model, ids), expected) < tolerance * expected.abs().max()
    some = convert(vanilla(family).double(), "strict", free_pairs=3)
    assert difference(logits(some, ids), expected) > 1e-4


def test_free_pairs_are_saved_loaded_initialised_and_trained(tmp_path):
    model = convert(vanilla("Llama"), "strict", free_pairs=3)
    model.config.rope_parameters |= {"temperature": 16, "turning_pairs": 1}
    ids = some_tokens(model)
    assert torch.equal(logits(reloaded(model, tmp_path), ids), logits(model, ids))
    drawn = AutoModelForCausalLM.from_config(model.config).model.layers[0].self_attn.t_proj.weight
    rows = drawn.unflatten(0, (-1, 7))
    assert 0.5 < rows[:, :1].std() / rows[:, 1:].std() < 0.95  # 1/√2, of few numbers
    model.train()(ids, labels=ids).loss.backward()
    rows = model.model.layers[0].self_attn.t_proj.weight.grad.unflatten(0, (-1, 7))
    assert (rows.abs().amax((0, 2)) > 0).all()
