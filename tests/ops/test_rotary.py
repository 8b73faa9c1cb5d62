"""Rotary frequencies, scaling rules and rotation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from coca_attention.ops import (
    RotaryScaling,
    apply_rotary,
    inverse_frequencies,
    ntk_base,
    oracle,
    rotary_cos_sin,
)
from coca_attention.ops.rotary import split_pairs


def transformers_frequencies(kind: str, seq_len: int | None = None, **parameters):
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=1,
        max_position_embeddings=128,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **parameters},
    )
    return ROPE_INIT_FUNCTIONS[kind](config, seq_len=seq_len)


def test_unscaled_frequencies_are_the_papers():
    theta = inverse_frequencies(8, 10000.0)
    assert theta.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-14)


@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
def test_linear_agrees_with_transformers(factor):
    theirs, _ = transformers_frequencies("linear", factor=factor)
    ours = inverse_frequencies(64, scaling=RotaryScaling("linear", factor))
    assert torch.allclose(ours.float(), theirs, rtol=1e-6)


@pytest.mark.parametrize("length", [100, 128, 300, 4096])
def test_dynamic_agrees_with_transformers(length):
    theirs, _ = transformers_frequencies("dynamic", seq_len=length, factor=4.0)
    scaling = RotaryScaling("dynamic", 4.0, training_length=128, length=length)
    assert torch.allclose(inverse_frequencies(64, scaling=scaling).float(), theirs, rtol=1e-5)


@pytest.mark.parametrize("factor", [2.0, 16.0])
@pytest.mark.parametrize("attention_factor", [None, 1.25])
def test_yarn_agrees_with_transformers(factor, attention_factor):
    optional = {} if attention_factor is None else {"attention_factor": attention_factor}
    theirs, magnitude = transformers_frequencies(
        "yarn", factor=factor, original_max_position_embeddings=128, **optional
    )
    scaling = RotaryScaling("yarn", factor, training_length=128, attention_factor=attention_factor)
    assert torch.allclose(inverse_frequencies(64, scaling=scaling).float(), theirs, rtol=1e-5)
    assert scaling.magnitude == pytest.approx(magnitude)


def test_yarn_without_rounding_of_its_ramp():
    theirs, _ = transformers_frequencies(
        "yarn", factor=4.0, original_max_position_embeddings=128, truncate=False
    )
    scaling = RotaryScaling("yarn", 4.0, training_length=128, truncate=False)
    ours = inverse_frequencies(64, scaling=scaling)
    assert torch.allclose(ours.float(), theirs, rtol=1e-5)
    rounded = inverse_frequencies(64, scaling=RotaryScaling("yarn", 4.0, training_length=128))
    assert not torch.allclose(ours, rounded, rtol=1e-3)


@pytest.mark.parametrize("factor", [1.0, 8.0])
@pytest.mark.parametrize("edges", [(1.0, 4.0), (0.5, 12.0)])
def test_llama3_agrees_with_transformers(factor, edges):
    low, high = edges
    theirs, _ = transformers_frequencies(
        "llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=128,
    )
    scaling = RotaryScaling(
        "llama3", factor, training_length=128, low_freq_factor=low, high_freq_factor=high
    )
    assert torch.allclose(inverse_frequencies(64, scaling=scaling).float(), theirs, rtol=1e-5)
    assert scaling.magnitude == 1.0


@pytest.mark.parametrize("length", [1, 128, 129, None])
@pytest.mark.parametrize("attention_factor", [None, 1.5])
def test_longrope_agrees_with_transformers(length, attention_factor):
    short = [1.0 + 0.01 * j for j in range(32)]
    long = [2.0 + j for j in range(32)]
    optional = {} if attention_factor is None else {"attention_factor": attention_factor}
    theirs, magnitude = transformers_frequencies(
        "longrope",
        seq_len=length or 10**6,
        factor=8.0,
        short_factor=short,
        long_factor=long,
        original_max_position_embeddings=128,
        **optional,
    )
    scaling = RotaryScaling(
        "longrope",
        8.0,
        training_length=128,
        length=length,
        short_factor=tuple(short),
        long_factor=tuple(long),
        attention_factor=attention_factor,
    )
    assert torch.allclose(inverse_frequencies(64, scaling=scaling).float(), theirs, rtol=1e-5)
    assert scaling.magnitude == pytest.approx(magnitude)


def test_ntk_without_a_length_multiplies_the_base():
    assert ntk_base(10000.0, 64, RotaryScaling("ntk", 4.0)) == 10000.0 * 4.0 ** (64 / 62)


def test_ntk_with_a_length_is_dynamic_ntk_at_that_length():
    fixed = RotaryScaling("ntk", 4.0, training_length=128, length=1024)
    dynamic = RotaryScaling("dynamic", 4.0, training_length=128, length=1024)
    assert torch.equal(
        inverse_frequencies(64, scaling=fixed), inverse_frequencies(64, scaling=dynamic)
    )
    assert ntk_base(10000.0, 64, fixed) == pytest.approx(10000.0 * (4 * 8 - 3) ** (64 / 62))


def test_ntk_within_the_training_length_changes_nothing():
    scaling = RotaryScaling("ntk", 4.0, training_length=128, length=100)
    assert torch.equal(inverse_frequencies(64, scaling=scaling), inverse_frequencies(64))


def test_dynamic_takes_its_length_from_the_positions_and_keeps_no_state():
    scaling = RotaryScaling("dynamic", 4.0, training_length=16)
    short = torch.arange(8)
    before = rotary_cos_sin(short, 32, scaling=scaling)
    rotary_cos_sin(torch.arange(1000), 32, scaling=scaling)
    after = rotary_cos_sin(short, 32, scaling=scaling)
    assert torch.equal(before[0], after[0])
    at_100 = RotaryScaling("dynamic", 4.0, training_length=16, length=100)
    positions = torch.arange(100)
    assert torch.equal(
        rotary_cos_sin(positions, 32, scaling=scaling)[0],
        rotary_cos_sin(positions, 32, scaling=at_100)[0],
    )


def test_far_positions_keep_their_precision():
    position = 131_071
    cos, _ = rotary_cos_sin(torch.tensor([position]), 64)
    theta = [10000.0 ** (-2 * j / 64) for j in range(32)]
    expected = [math.cos(position * angle) for angle in theta]
    assert cos[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_yarn_magnitude_multiplies_cos_and_sin():
    scaling = RotaryScaling("yarn", 4.0, training_length=128, attention_factor=1.5)
    cos, sin = rotary_cos_sin(torch.arange(5), 16, scaling=scaling, dtype=torch.float64)
    assert torch.allclose(cos**2 + sin**2, torch.full((5, 8), 2.25, dtype=torch.float64))


@given(
    pairs=st.integers(1, 8),
    interleaved=st.booleans(),
    first=st.integers(0, 10_000),
    seed=st.integers(0, 100),
)
def test_rotation_gives_the_scores_of_equation_2(pairs, interleaved, first, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, 1, 5, 2 * pairs, dtype=torch.float64, generator=generator)
    positions = torch.arange(first, first + 5)
    cos, sin = rotary_cos_sin(positions, 2 * pairs, dtype=torch.float64)
    ours = apply_rotary(q, cos, sin, interleaved) @ apply_rotary(k, cos, sin, interleaved).mT
    expected = oracle.rope_scores(q, k, positions, positions, interleaved=interleaved)
    assert torch.allclose(ours, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "cubic"}, "unknown rotary scaling 'cubic'"),
        ({"kind": "linear", "factor": 0.0}, "factor must be a number of at least 1"),
        ({"kind": "linear", "factor": float("nan")}, "factor must be a number of at least 1"),
        ({"kind": "dynamic", "factor": 2.0}, "needs training_length"),
        ({"kind": "ntk", "length": 64}, "needs training_length"),
        ({"kind": "ntk", "length": 0, "training_length": 8}, "at least 1 token"),
        ({"kind": "yarn", "training_length": 8, "beta_slow": 64.0}, "beta_fast > beta_slow"),
    ],
)
def test_bad_scaling_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RotaryScaling(**arguments)


@pytest.mark.parametrize("width", [0, 1, 7])
def test_odd_width_is_refused(width):
    with pytest.raises(ValueError, match="must be even"):
        inverse_frequencies(width)


def test_bad_base_and_dynamic_without_length_are_refused():
    with pytest.raises(ValueError, match="base must be positive"):
        inverse_frequencies(8, 0.0)
    with pytest.raises(ValueError, match="needs the current length"):
        inverse_frequencies(8, scaling=RotaryScaling("dynamic", 2.0, training_length=8))


def test_pairs_under_partial_rotary_are_taken_inside_the_span():
    x = torch.arange(10.0)
    first, second = split_pairs(x, rotary_width=6)
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 6, 7], [3, 4, 5, 8, 9])
    first, second = split_pairs(x, interleaved=True, rotary_width=6)
    assert (first.tolist(), second.tolist()) == ([0, 2, 4, 6, 7], [1, 3, 5, 8, 9])
    assert split_pairs(x, rotary_width=10)[0].tolist() == [0, 1, 2, 3, 4]
    for width, message in ((5, "must be even"), (0, "at least 2"), (12, "at most the head width")):
        with pytest.raises(ValueError, match=message):
            split_pairs(x, rotary_width=width)
