"""Rotary models with limited distances: unchanged within the limit, and bounded beyond."""

import pytest
import torch

from coca_attention import convert
from coca_attention.models import CoCALlamaConfig, Roles
from coca_attention.models.configuration import attention_of, rotation
from coca_attention.ops import coca_attention
from coca_attention.testing import difference, logits, some_tokens
from commands import run
from families import (
    FAMILIES,
    VARIED,
    assert_reads_the_same,
    attentions,
    reloaded,
    vanilla,
)

LIMIT = 11


def limited(family, form="rope", **changes):
    changes.setdefault("max_distance", LIMIT)
    return convert(vanilla(family), form, **changes).double().eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_changes_within_the_training_length(family, tmp_path):
    model = vanilla(family).double().eval()
    ids = some_tokens(model, length=64)
    before = logits(model, ids)
    assert convert(model, "rope", max_distance=64) is model
    assert attention_of(model.config) == "rope"
    found = rotation(model.config, "full_attention")
    assert (found.max_distance, found.temperature, found.decay) == (64, 64, None)
    assert difference(logits(model, ids), before) < 1e-6
    longer = some_tokens(model.float(), length=80)
    assert difference(logits(reloaded(model, tmp_path), longer), logits(model, longer)) < 1e-6


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "rounding"),
    [({}, 1e-6), ({"rope_parameters": LLAMA3}, 1e-5)],  # of frequencies, by Transformers in float32
)
def test_by_default_nothing_changes_in_texts_that_the_model_was_made_to_read(changes, rounding):
    """Also where a rule has extended what it was trained on first, as in Llama 3.1."""
    model = vanilla("Llama", **changes).double().eval()
    longest, longer = some_tokens(model, length=64), some_tokens(model, length=68)
    before = [logits(model, ids) for ids in (longest, longer)]
    found = rotation(convert(model, "rope").config)
    assert (found.max_distance, found.temperature) == (64, 64)
    assert difference(logits(model, longest), before[0]) < rounding
    assert difference(logits(model, longer), before[1]) > 1e-4


def test_the_training_length_can_be_set():
    found = rotation(convert(vanilla("Llama"), "rope", length=16).config)
    assert (found.max_distance, found.temperature) == (16, 16)
    roles = rotation(convert(vanilla("Llama"), "rope", roles=Roles("lg"), length=16).config)
    assert (roles.temperature, roles.decay_length) == (16, 2)


def test_coca_convert_says_which_training_length_it_takes(tmp_path, capsys):
    vanilla("Llama", rope_parameters=LLAMA3).save_pretrained(tmp_path / "model")
    words = ["convert", tmp_path / "model", "--form", "rope"]
    code, said, _ = run(capsys, *words, tmp_path / "short", "--length", 16)
    assert code == 0 and "Training length: 16 tokens (--length)\n" in said
    code, said, _ = run(capsys, *words, tmp_path / "target")
    assert code == 0 and "the same as before up to 64 tokens" in said
    assert (
        "Training length: 64 tokens (with llama3 scaling of 16: max_position_embeddings; "
        "--length sets another)\n"
    ) in said


LONGROPE = {"short_factor": [1.0, 1.1], "long_factor": [2.0, 4.0]}


@pytest.mark.parametrize("rule", ["longrope", "dynamic"])
def test_rules_by_the_length_of_the_text_are_kept_up_to_the_limit(rule):
    rope = {"rope_type": rule, "rope_theta": 100.0, "original_max_position_embeddings": 32}
    if rule == "longrope":
        family, rope = "Phi-3", rope | {"partial_rotary_factor": 0.5, **LONGROPE}
        sizes = {"sliding_window": None, "max_position_embeddings": 512}
    else:
        family, rope, sizes = "Llama", rope | {"factor": 4.0}, {"max_position_embeddings": 32}
    model = vanilla(family, rope_parameters=rope, **sizes).double().eval()
    texts = {n: some_tokens(model, length=n) for n in (10, 32, 33, 90)}
    before = {n: logits(model, ids) for n, ids in texts.items()}
    convert(model, "rope", max_distance=32)
    assert all(difference(logits(model, texts[n]), before[n]) < 1e-6 for n in (10, 32))
    assert_reads_the_same(model, texts[33])
    assert not rotation(model.config).follows_length
    # A limit beyond the length of the rule, whose frequencies then change with the text.
    model.config.rope_parameters |= {"max_distance": 90, "temperature": 90}
    assert all(difference(logits(model, texts[n]), before[n]) < 1e-6 for n in texts)


@pytest.mark.parametrize("family", ["Mistral", "Phi-3"])
def test_a_window_within_the_limit_leaves_nothing_to_limit(family):
    model = vanilla(family).double().eval()
    ids = some_tokens(model, length=200)
    before = logits(model, ids)
    assert difference(logits(convert(model, "rope", max_distance=16), ids), before) < 1e-6


def test_a_window_that_the_family_ignores_is_none():
    """Files of Llama models derived from others can name one."""
    models = [limited("Llama"), limited("Llama")]
    models[1].config.sliding_window = 4
    ids = some_tokens(models[0], length=40)
    assert torch.equal(*(logits(model, ids) for model in models))


@pytest.mark.parametrize("family", VARIED)
def test_a_layer_is_the_operator(family):
    model, calls = limited(family, "magnitude"), []
    ids = some_tokens(model, length=30)
    layer = attentions(model)[-1]
    output = layer.get_submodule(layer.layout.output_name)
    layer.register_forward_pre_hook(
        lambda m, a, k: calls.append(a[0] if a else k["hidden_states"]), with_kwargs=True
    )
    output.register_forward_pre_hook(lambda m, a: calls.append(a[0]))
    logits(model, ids)
    turning = rotation(model.config, getattr(layer, "layer_type", None))
    assert turning.max_distance == LIMIT
    options = {"interleaved": layer.layout.interleaved, "scale": layer.scaling}
    with torch.no_grad():
        tensors = layer.project(calls[0])
        expected = coca_attention(*tensors, form="magnitude", rotation=turning, **options)
    assert difference(calls[1], expected.transpose(1, 2).flatten(2)) < 1e-12


def test_bidirectional_models_are_refused():
    model = limited("Llama")
    model.config.is_causal = False
    with pytest.raises(ValueError, match="max_distance are for causal models"):
        logits(model, some_tokens(model))


def test_what_cannot_work_is_refused():
    values = limited("Llama").config.to_dict()
    values["rope_parameters"] |= {"decay": 0.5, "decay_length": 8}
    with pytest.raises(Exception, match=r"remove decay from rope_parameters in its config\.json"):
        CoCALlamaConfig.from_dict(values)
    model = limited("Llama").float()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="eager or flex_attention; got flash_attention_2"):
        model(some_tokens(model), use_cache=False)
