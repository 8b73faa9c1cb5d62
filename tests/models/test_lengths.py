"""The length that a model was made for, read from configurations as they are on the Hub."""

from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig

from coca_attention import convert
from coca_attention.errors import UserError
from coca_attention.models import Roles, training_length
from coca_attention.models.configuration import made_for, original_length, rotation
from coca_attention.testing import difference, logits, some_tokens
from commands import run
from families import vanilla

CASES = yaml.safe_load((Path(__file__).parent / "public_configs.yaml").read_text("utf-8"))
CONVERTED = [case for case in CASES if case["result"] != "refused"]


@pytest.mark.parametrize("case", CONVERTED, ids=lambda case: case["name"])
def test_the_length_of_public_models_in_small(case):
    config = AutoConfig.for_model(**case["config"])
    assert training_length(config) == case["length"]


def yarn(original):
    return {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}


def linear(factor):
    return {"type": "linear", "factor": factor}


@pytest.mark.parametrize(
    ("name", "kind", "fields", "expected"),
    [
        (
            "Qwen2.5 with the YaRN block of its card",
            "qwen2",
            {"max_position_embeddings": 32768, "rope_scaling": yarn(32768)},
            (131072, 32768, "yarn scaling by 4 of 32,768"),
        ),
        (
            "Qwen3 with the YaRN block of its card",
            "qwen3",
            {"max_position_embeddings": 40960, "rope_scaling": yarn(32768)},
            (131072, 32768, "yarn scaling by 4 of 32,768"),
        ),
        (
            "vicuna-7b-v1.5-16k",
            "llama",
            {"max_position_embeddings": 4096, "max_sequence_length": 16384}
            | {"rope_scaling": linear(4.0)},
            (16384, 4096, "max_sequence_length"),
        ),
        (
            "LongAlpaca-7B",
            "llama",
            {"max_position_embeddings": 4096, "rope_scaling": linear(8.0)},
            (32768, 4096, "assumed: linear scaling by 8 of max_position_embeddings"),
        ),
        (
            "LLaMA-2-7B-32K",
            "llama",
            {"max_position_embeddings": 32768, "rope_scaling": linear(8.0)},
            (32768, 4096, "assumed: max_position_embeddings, after linear scaling by 8"),
        ),
        (
            "c4ai-command-r-v01",
            "cohere",
            {"max_position_embeddings": 8192, "model_max_length": 131072},
            (131072, 131072, "model_max_length"),
        ),
        (
            "Qwen2.5-7B-Instruct-1M",
            "qwen2",
            {"max_position_embeddings": 1010000}
            | {"dual_chunk_attention_config": {"original_max_position_embeddings": 262144}},
            (262144, 262144, "dual_chunk_attention_config; Transformers has no such attention"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_length_of_public_models(name, kind, fields, expected):
    config = AutoConfig.for_model(kind, **fields)
    length, why = made_for(config)
    assert (length, original_length(config), why[: len(expected[2])]) == expected


def test_nothing_changes_within_the_length_of_a_linearly_scaled_model(tmp_path, capsys):
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    model = vanilla("Llama", max_position_embeddings=16, rope_parameters=rope)
    model.config.max_sequence_length = 64  # as in vicuna-7b-v1.5-16k, divided by 256
    model.save_pretrained(tmp_path / "model")
    ids = some_tokens(model, length=64)
    before = logits(model.double(), ids)
    assert difference(logits(convert(model, "rope"), ids), before) < 1e-5
    code, said, _ = run(
        capsys, "convert", tmp_path / "model", tmp_path / "target", "--form", "rope"
    )
    assert code == 0
    assert "Training length: 64 tokens (max_sequence_length; --length sets another)\n" in said


def test_what_was_assumed_is_said(tmp_path, capsys):
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    vanilla("Llama", rope_parameters=rope).save_pretrained(tmp_path / "model")
    words = ["convert", tmp_path / "model", "--form", "rope"]
    _, said, _ = run(capsys, *words, tmp_path / "target")
    assumed = "(assumed: max_position_embeddings, after linear scaling by 4; --length sets another)"
    assert f"Training length: 64 tokens {assumed}\n" in said
    _, said, _ = run(capsys, *words, tmp_path / "other", "--length", 256)
    assert "Training length: 256 tokens (--length)\n" in said


def test_a_model_whose_positions_transformers_would_not_divide_is_refused():
    model = vanilla("Llama")
    model.config.rope_condense_ratio = 8  # longchat-7b-16k
    with pytest.raises(UserError, match=r'rope_condense_ratio 8.*"type": "linear", "factor": 8'):
        convert(model, "rope")


@pytest.mark.parametrize(("window", "warns"), [(8, True), (64, True), (65, False), (80, False)])
def test_a_limit_beyond_the_window_of_all_layers_is_said_to_change_nothing(window, warns, caplog):
    model = vanilla("Mistral", sliding_window=window).double()
    ids = some_tokens(model, length=120)
    before = logits(model, ids)
    changes = difference(logits(convert(model, "rope"), ids), before) > 1e-4
    said = f"changes nothing: every layer sees the last {window} tokens" in caplog.text
    assert (said, changes) == (warns, not warns)


def test_a_decoder_that_sees_both_directions_is_not_limited():
    model = vanilla("Gemma 3", use_bidirectional_attention=True)  # embeddinggemma-300m
    with pytest.raises(UserError, match="an encoder a query sees those after it"):
        convert(model, "rope")


def test_a_window_of_the_query_alone_is_refused():
    """Transformers' cache of it keeps everything, and decoding would see all of that."""
    with pytest.raises(UserError, match=r"window must be .* 2 and .*, got 1"):
        Roles("lg", window=1)
    with pytest.raises(UserError, match=r"sliding_window of sliding_attention layers .* got 1"):
        convert(vanilla("Mistral", sliding_window=1), "strict")


def test_the_default_window_of_short_models_decodes_right():
    model = convert(vanilla("Llama", max_position_embeddings=8), "strict", roles=Roles("lg"))
    assert model.config.sliding_window == 2
    ids = some_tokens(model, length=8)
    with torch.no_grad():
        continued = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    following = logits(model, continued[:, :-1])[:, 7:].argmax(-1)
    assert torch.equal(continued[:, 8:], following)


def test_the_frequencies_of_dynamic_scaling_stay_those_of_transformers():
    config = AutoConfig.for_model(
        "llama",
        max_position_embeddings=64,
        model_max_length=256,
        rope_scaling={"type": "dynamic", "factor": 2.0},
    )
    assert rotation(config).rule.training_length == 64
