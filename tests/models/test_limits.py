"""Rotary models with limited distances: unchanged within the limit, and bounded beyond.

The limit is the length that a model was made for, read from configurations as they are on the Hub.
"""

import json
from dataclasses import asdict
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from coca_attention import convert
from coca_attention.errors import UserError
from coca_attention.models import CoCALlamaConfig, Roles
from coca_attention.models.configuration import (
    attention_of,
    made_for,
    original_length,
    rope_parameters,
    rotation,
)
from coca_attention.ops import DistanceMap, Rotation, key_frames
from coca_attention.ops.distances import attend_half_by_distance
from coca_attention.testing import difference, logits, some_tokens
from commands import run
from covering import mostly_slow
from families import (
    FAMILIES,
    VARIED,
    assert_reads_the_same,
    attentions,
    left_padded,
    read_in_pieces,
    reloaded,
    set_map,
    vanilla,
)
from public_models import CASES

NEAR = 11
MAPS = [
    DistanceMap.limited(NEAR),
    DistanceMap.leaky(NEAR, 0.3),
    DistanceMap.shifted(NEAR, 4),
    DistanceMap.grouped(NEAR, 3),
]


def limited(family, form="rope", distance_map=None, **changes):
    changes.setdefault("near", NEAR)
    model = convert(vanilla(family), form, **changes).double().eval()
    if distance_map is not None:
        set_map(model, distance_map)
    return model


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, [*VARIED, "Gemma 3"]))
def test_nothing_changes_within_the_training_length(family, tmp_path):
    model = vanilla(family).double().eval()
    ids = some_tokens(model, length=64)
    before = logits(model, ids)
    assert convert(model, "rope", near=64) is model
    assert attention_of(model.config) == "rope"
    found = rotation(model.config, "full_attention")
    assert (found.distance_map, found.temperature, found.decay) == (
        DistanceMap.limited(64),
        64,
        None,
    )
    assert difference(logits(model, ids), before) < 1e-6
    longer = some_tokens(model.float(), length=80)
    assert difference(logits(reloaded(model, tmp_path), longer), logits(model, longer)) < 1e-6


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
# As vicuna-7b-v1.5-16k, divided by 256.
VICUNA = {"max_position_embeddings": 16, "max_sequence_length": 64, "rope_parameters": LINEAR}


def test_the_training_length_can_be_set():
    found = rotation(convert(vanilla("Llama"), "rope", length=16).config)
    assert (found.distance_map.near, found.temperature) == (16, 16)
    roles = rotation(
        convert(vanilla("Llama"), "rope", roles=Roles("lg", decay=1.0), length=16).config
    )
    assert (roles.temperature, roles.decay_length) == (16, 2)


@pytest.mark.parametrize(
    ("fields", "words", "said"),
    [
        ({"rope_parameters": LLAMA3}, ["--length", 16], "16 tokens (--length)"),
        ({"rope_parameters": LLAMA3}, [], "64 tokens (with llama3 scaling of 16: max_position_"),
        ({"rope_parameters": LINEAR}, [],
         "64 tokens (assumed: max_position_embeddings, after linear scaling by 4; --length sets"),
        (VICUNA, [], "64 tokens (max_sequence_length; --length sets another)"),
    ],
)  # fmt: skip
def test_coca_convert_says_which_training_length_it_takes(fields, words, said, tmp_path, capsys):
    vanilla("Llama", **fields).save_pretrained(tmp_path / "model")
    words = ["convert", tmp_path / "model", tmp_path / "target", "--form", "rope", *words]
    code, printed, _ = run(capsys, *words)
    assert code == 0 and f"Training length: {said}" in printed


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
    convert(model, "rope", near=32)
    assert all(difference(logits(model, texts[n]), before[n]) < 1e-6 for n in (10, 32))
    assert_reads_the_same(model, texts[33])
    assert not rotation(model.config).follows_length
    # A limit beyond the length of the rule, whose frequencies then change with the text.
    model.config.rope_parameters |= {
        "distance_map": asdict(DistanceMap.limited(90)),
        "temperature": 90,
    }
    assert all(difference(logits(model, texts[n]), before[n]) < 1e-6 for n in texts)


@pytest.mark.parametrize(
    ("family", "window", "changes"),
    [("Mistral", 8, False), ("Phi-3", 8, False), ("Mistral", 64, False), ("Mistral", 65, True)],
)
def test_a_limit_beyond_the_window_of_all_layers_changes_nothing(family, window, changes):
    model = vanilla(family, sliding_window=window).double()
    ids = some_tokens(model, length=120)
    before = logits(model, ids)
    changed = difference(logits(convert(model, "rope"), ids), before)
    assert changed > 1e-4 if changes else changed < 1e-6


def test_a_window_that_the_family_ignores_is_none():
    """Files of Llama models derived from others can name one."""
    models = [limited("Llama"), limited("Llama")]
    models[1].config.sliding_window = 4
    ids = some_tokens(models[0], length=40)
    assert torch.equal(*(logits(model, ids) for model in models))


@pytest.mark.parametrize("distance_map", [each for each in MAPS if each.has_equal_steps])
@pytest.mark.parametrize(("family", "form"), [("Llama", "rope"), ("GPT-NeoX", "strict")])
def test_one_token_is_scored_without_forming_keys(family, form, distance_map, monkeypatch):
    """Also with left padding; the logits are those of a single pass."""
    model = limited(family, form, distance_map, kv_cache="half")
    half = Mock(wraps=attend_half_by_distance)
    monkeypatch.setattr("coca_attention.models.layer_pass.attend_half_by_distance", half)
    ids, mask = left_padded(some_tokens(model, length=30), 4)
    expected = logits(model, ids, attention_mask=mask)
    found = read_in_pieces(model, ids, (26, *range(27, 35)), mask, DynamicCache())
    assert difference(found[mask.bool()], expected[mask.bool()]) < 1e-12
    assert half.call_count == 8 * len(attentions(model))
    tensors, options = half.call_args
    ours = attend_half_by_distance(*(x.bfloat16() for x in tensors), **options)
    assert ours.dtype == torch.bfloat16
    assert difference(ours.double(), half(*tensors, **options)) < 0.05


@pytest.mark.parametrize("kv_cache", ["full", "half"])
@pytest.mark.parametrize("distance_map", MAPS)
@pytest.mark.parametrize(("family", "form"), [("Llama", "rope"), ("GPT-NeoX", "strict")])
def test_tokens_read_one_by_one_from_the_first_on_are_read_as_at_once(
    family, form, distance_map, kv_cache
):
    """With a rule that scales keys, where the map takes it; and in a static cache."""
    model = limited(family, form, distance_map, kv_cache=kv_cache)
    rule = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    rope_parameters(model.config).update(rule)
    ids = some_tokens(model, length=30)
    expected = logits(model, ids)
    for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=40)):
        with torch.no_grad():
            found = read_in_pieces(model, ids, range(1, 31), cache=cache)
        assert difference(found, expected) < 1e-12


def test_rotary_models_of_older_versions_are_read_as_such():
    """Those had another form, and a number of free pairs."""
    model = limited("Llama")
    values = model.config.to_dict()
    assert values["coca_form"] == "rope"
    old = CoCALlamaConfig.from_dict(values | {"coca_form": "strict", "coca_free_pairs": 4})
    assert (old.coca_form, attention_of(old)) == ("rope", "rope")
    some = CoCALlamaConfig.from_dict(values | {"coca_form": "strict", "coca_free_pairs": 3})
    assert attention_of(some) == "strict"


@pytest.mark.parametrize("leak", [None, 0.3])
@pytest.mark.parametrize("family", ["Llama", "Gemma 3"])
def test_configurations_of_older_versions_are_read(family, leak, tmp_path):
    """Those had ``max_distance`` and ``leak`` in place of a distance map."""
    model = limited(family, distance_map=DistanceMap.leaky(NEAR, leak or 0.0))
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())
    rope = saved["rope_parameters"]
    rope = rope.get("full_attention", rope)
    del rope["distance_map"]
    rope |= {"max_distance": NEAR} | ({} if leak is None else {"leak": leak})
    path.write_text(json.dumps(saved))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).double().eval()
    assert rope_parameters(loaded.config)["distance_map"]["near"] == NEAR
    ids = some_tokens(model, length=30)
    assert difference(logits(loaded, ids), logits(model, ids)) < 1e-6
    loaded.save_pretrained(tmp_path)
    assert "max_distance" not in path.read_text()


LONG_QWEN = {
    "rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.0, 1.2], "long_factor": [2.0, 4.0, 3.0, 2.5],
}  # fmt: skip


def test_layers_with_windows_and_a_rule_by_the_text_take_no_limit():
    """The original selects its frequencies by the length of the text, in every layer."""
    sizes = {"max_position_embeddings": 128, "rope_parameters": LONG_QWEN}
    with pytest.raises(UserError, match="needs frequencies of one length; got longrope scaling"):
        convert(vanilla("Qwen2", **sizes), "rope")


def test_groups_of_tokens_have_no_frames():
    """Their far keys are not equally far apart, so they are formed."""
    rotation = Rotation(8, distance_map=DistanceMap.grouped(NEAR, 3))
    with pytest.raises(ValueError, match=r"far keys that are equally far apart, got .*group=3"):
        key_frames(torch.zeros(1), 30, rotation, tile=16, pairs=4, of="far")


def test_what_cannot_work_is_refused():
    values = limited("Llama").config.to_dict()
    values["rope_parameters"] |= {"decay": 0.5, "decay_length": 8}
    with pytest.raises(Exception, match=r"remove decay from rope_parameters in its config\.json"):
        CoCALlamaConfig.from_dict(values)
    model = limited("Llama").float()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(
        ValueError, match="sdpa or eager; got flash_attention_2: load the model with"
    ):
        model(some_tokens(model), use_cache=False)
    model.config.is_causal = False
    with pytest.raises(ValueError, match="distance_map are for causal models"):
        logits(model, some_tokens(model))
    model = vanilla("Gemma 3", use_bidirectional_attention=True)  # embeddinggemma-300m
    with pytest.raises(UserError, match="an encoder a query sees those after it"):
        convert(model, "rope")
    model = vanilla("Llama")
    model.config.rope_condense_ratio = 8  # longchat-7b-16k, whose positions are not divided
    with pytest.raises(UserError, match=r'rope_condense_ratio 8.*"type": "linear", "factor": 8'):
        convert(model, "rope")


# The length that a model was made for


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name]["result"] != "refused"])
def test_the_length_of_public_models_in_small(name):
    config = AutoConfig.for_model(**CASES[name]["config"])
    assert made_for(config)[0] == CASES[name]["length"]


def scaled(kind, length, factor, **rule):
    """Fields of a configuration with a rotary scaling, as on the Hub."""
    rope = {"type": kind, "factor": factor, **rule}
    return {"max_position_embeddings": length, "rope_scaling": rope}


YARN = {"original_max_position_embeddings": 32768}
DUAL = {"dual_chunk_attention_config": {"original_max_position_embeddings": 262144}}
PUBLISHED = {
    "Qwen2.5 with the YaRN block of its card": (
        "qwen2", scaled("yarn", 32768, 4.0, **YARN), 131072, 32768, "yarn scaling by 4 of 32,768",
    ),
    "Qwen3 with the YaRN block of its card": (
        "qwen3", scaled("yarn", 40960, 4.0, **YARN), 131072, 32768, "yarn scaling by 4 of 32,768",
    ),
    "vicuna-7b-v1.5-16k": (
        "llama", scaled("linear", 4096, 4.0) | {"max_sequence_length": 16384},
        16384, 4096, "max_sequence_length",
    ),
    "LongAlpaca-7B": (
        "llama", scaled("linear", 4096, 8.0),
        32768, 4096, "assumed: linear scaling by 8 of max_position_embeddings",
    ),
    "LLaMA-2-7B-32K": (
        "llama", scaled("linear", 32768, 8.0),
        32768, 4096, "assumed: max_position_embeddings, after linear scaling by 8",
    ),
    "c4ai-command-r-v01": (
        "cohere", {"max_position_embeddings": 8192, "model_max_length": 131072},
        131072, 131072, "model_max_length",
    ),
    "Qwen2.5-7B-Instruct-1M": (
        "qwen2", {"max_position_embeddings": 1010000} | DUAL,
        262144, 262144, "dual_chunk_attention_config; Transformers has no such attention",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_length_of_public_models(name):
    kind, fields, length, original, why = PUBLISHED[name]
    config = AutoConfig.for_model(kind, **fields)
    found, reason = made_for(config)
    assert (found, original_length(config), reason[: len(why)]) == (length, original, why)


def test_the_frequencies_of_dynamic_scaling_stay_those_of_transformers():
    fields = scaled("dynamic", 64, 2.0) | {"model_max_length": 256}
    assert rotation(AutoConfig.for_model("llama", **fields)).rule.training_length == 64


@pytest.mark.parametrize(
    ("changes", "rounding"),  # of frequencies, by Transformers in float32
    [({}, 1e-6), ({"rope_parameters": LLAMA3}, 1e-5), (VICUNA, 1e-5)],
)
def test_by_default_nothing_changes_in_texts_that_the_model_was_made_to_read(changes, rounding):
    """Also where a rule has extended what it was trained on first, as in Llama 3.1."""
    model = vanilla("Llama", **changes).double().eval()
    longest, longer = some_tokens(model, length=64), some_tokens(model, length=68)
    before = [logits(model, ids) for ids in (longest, longer)]
    found = rotation(convert(model, "rope").config)
    assert (found.distance_map.near, found.temperature) == (64, 64)
    assert difference(logits(model, longest), before[0]) < rounding
    assert difference(logits(model, longer), before[1]) > 1e-4
