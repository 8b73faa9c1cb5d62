"""Rotary frequencies, scaling rules and rotation."""

import importlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import oracle
from coca_attention.ops import (
    NTK,
    RULES,
    Linear,
    Rotation,
    Rule,
    apply_rotary,
    key_frames,
    register_rule,
)
from coca_attention.ops.positions import split_pairs
from coca_attention.ops.rules import UNSCALED
from operands import stock


def theta(width: int, rule: Rule = UNSCALED, base: float = 10000.0) -> torch.Tensor:
    return rule.frequencies(width, base)


DIVISORS = {
    "short_factor": tuple(1.0 + 0.01 * j for j in range(32)),
    "long_factor": tuple(2.0 + j for j in range(32)),
}


@pytest.mark.parametrize(
    "rule",
    [
        Linear(1.0),
        Linear(8.0),
        *(stock("dynamic", 128, n, factor=4.0) for n in (100, 128, 300, 4096)),
        stock("yarn", 128, factor=2.0),
        stock("yarn", 128, factor=16.0, attention_factor=1.25),
        stock("yarn", 128, factor=4.0, truncate=False),
        stock("yarn", 128, factor=4.0),
        stock("llama3", 128, factor=1.0),
        stock("llama3", 128, factor=8.0, low_freq_factor=0.5, high_freq_factor=12.0),
        *(stock("longrope", 128, n, factor=8.0, **DIVISORS) for n in (1, 128, 129, None)),
        stock("longrope", 128, factor=8.0, attention_factor=1.5, **DIVISORS),
    ],
    ids=str,
)
def test_rules_agree_with_transformers(rule):
    given = {"rope_type": rule.kind, "rope_theta": 10000.0}
    if rule.kind not in ("linear", "dynamic"):
        given["original_max_position_embeddings"] = 128
    given |= dict(getattr(rule, "parameters", {"factor": rule.factor}))
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=1, max_position_embeddings=128, rope_parameters=given
    )
    seen = getattr(rule, "length", None) or 10**6
    theirs, magnitude = ROPE_INIT_FUNCTIONS[rule.kind](config, seq_len=seen)
    assert torch.allclose(theta(64, rule).float(), theirs, rtol=1e-5)
    assert rule.magnitude == pytest.approx(magnitude)


def test_frequencies_of_transformers_are_computed_in_float64():
    """In float32, angles at position 100,000 are off by up to 0.004 radians."""
    exact = theta(64)
    for rule in (stock("yarn", 128), stock("llama3", 128), stock("dynamic", 128, 100)):
        assert (1e5 * (theta(64, rule) - exact)).abs().max() < 1e-10
    slow = torch.tensor([10000.0 ** (-2 * 31 / 64)], dtype=torch.float64) / 33.0
    found = theta(64, stock("longrope", 128, 1000, factor=8.0, **DIVISORS))[-1:]
    assert (1e5 * (found - slow)).abs().max() < 1e-10


def test_ntk_multiplies_the_base_and_with_a_length_is_dynamic_ntk_at_that_length():
    assert NTK(4.0).scaled_base(64, 10000.0) == 10000.0 * 4.0 ** (64 / 62)
    fixed = NTK(4.0, training_length=128, length=1024)
    dynamic = theta(64, stock("dynamic", 128, 1024, factor=4.0))  # a division in place of a power
    assert torch.allclose(theta(64, fixed), dynamic, rtol=1e-14, atol=0)
    assert fixed.scaled_base(64, 10000.0) == pytest.approx(10000.0 * (4 * 8 - 3) ** (64 / 62))
    assert torch.equal(theta(64, NTK(4.0, training_length=128, length=100)), theta(64))


def test_dynamic_derives_its_length_from_the_positions_without_state():
    rotation = Rotation(32, rule=stock("dynamic", 16, factor=4.0))
    for length in (8, 1000, 8, 100):
        at_length = stock("dynamic", 16, length, factor=4.0)
        positions = torch.arange(length)
        found, expected = (x.tables(positions)[0] for x in (rotation, Rotation(32, rule=at_length)))
        assert torch.equal(found, expected)


def test_far_positions_keep_their_precision_and_magnitudes_multiply_tables():
    position = 131_071
    cos, _ = Rotation(64).tables(torch.tensor([position]))
    frequencies = [10000.0 ** (-2 * j / 64) for j in range(32)]
    expected = [math.cos(position * angle) for angle in frequencies]
    assert cos[0].tolist() == pytest.approx(expected, abs=1e-6)
    scaled = Rotation(16, rule=stock("yarn", 128, factor=4.0, attention_factor=1.5))
    cos, sin = scaled.tables(torch.arange(5), torch.float64)
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
    cos, sin = Rotation(2 * pairs).tables(positions, torch.float64)
    ours = apply_rotary(q, cos, sin, interleaved) @ apply_rotary(k, cos, sin, interleaved).mT
    q, k = (oracle.pairs_of(x, interleaved) for x in (q, k))
    expected = oracle.rope_scores(q, k, positions, positions, oracle.thetas(2 * pairs))
    assert torch.allclose(ours, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (Linear, {"factor": 0.0}, "factor must be a finite number from 1, got 0"),
        (Linear, {"factor": "2"}, "factor must be a finite number from 1, got '2'"),
        (stock, {"kind": "dynamic", "training_length": None}, "training_length, a number of tok"),
        (NTK, {"length": 64}, "needs training_length"),
        (NTK, {"length": 0, "training_length": 8}, "must be a whole number of at least 1, got 0"),
        (NTK, {"length": "8", "training_length": 8}, "whole number of at least 1, got '8'"),
        (stock, {"kind": "yarn", "training_length": 8, "beta_slow": 64.0}, "beta_fast > beta_slow"),
        *((Rotation, {"width": width}, "must be even") for width in (0, 1, 7, 64.0, "8", True)),
        *(
            (Rotation, {"width": 8, "base": base}, "rotary base must be a finite number above 0")
            for base in (0.0, -1.0, math.nan, math.inf)
        ),
        (Rotation, {"width": 8, "rule": "ntk"}, r"such as NTK\(factor=2\.0\), got 'ntk'"),
        (Rotation, {"width": 8, "turning": 5}, "between 0 and 4, got 5"),
        (Rotation, {"width": 8, "temperature": 0}, "whole number of at least 1, got 0"),
        (Rotation, {"width": 8, "decay": -1.0}, "decay must be a finite number from 0, got -1"),
        (Rotation, {"width": 8, "decay": math.nan}, "decay must be a finite number from 0, got"),
        (Rotation, {"width": 8, "decay": 1.0, "decay_length": 0.0}, "above 0, got 0"),
        (theta, {"width": 8, "rule": stock("dynamic", 8)}, "needs the current length"),
        (split_pairs, {"x": torch.arange(10.0), "rotary_width": 5}, "must be even"),
        (split_pairs, {"x": torch.arange(10.0), "rotary_width": 0}, "at least 2"),
        (split_pairs, {"x": torch.arange(10.0), "rotary_width": 12}, "at most the head width 10"),
    ],
)
def test_bad_rules_rotations_and_widths_are_refused(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_names_of_rules_are_unique():
    class Other(Rule):
        kind = "linear"

    assert register_rule(Rule) is Rule  # registering the same rule again changes nothing
    with pytest.raises(ValueError, match="a rotary scaling named 'linear'"):
        register_rule(Other)
    assert RULES["linear"] is Linear


def test_frequencies_are_made_once_for_a_device(monkeypatch):
    made = []
    frequencies = Rotation.frequencies
    monkeypatch.setattr(Rotation, "frequencies", lambda x: made.append(x) or frequencies(x))
    found = [Rotation(24, base=123.0).angles(torch.arange(n)) for n in (3, 5)]
    assert len(made) == 1
    expected = torch.arange(5).double().unsqueeze(-1) * frequencies(Rotation(24, base=123.0))
    assert torch.equal(found[1], expected)
    # Neither traced tensors nor those of inference mode are kept for later passes.
    with FakeTensorMode():
        assert isinstance(Rotation(24, base=124.0).angles(torch.arange(3)), FakeTensor)
    with torch.inference_mode():
        Rotation(24, base=124.0).angles(torch.arange(3))
    angles = Rotation(24, base=124.0).angles(torch.ones(3, requires_grad=True))
    assert type(angles) is torch.Tensor and angles.requires_grad


def test_devices_without_float64_make_none(monkeypatch):
    """On MPS float64 is an error; here the CPU plays that device."""
    rotation = Rotation(8)
    expected = rotation.tables(torch.arange(40))

    class Wide(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            assert not isinstance(made, torch.Tensor) or made.dtype != torch.float64, function
            return made

    module = importlib.import_module(Rotation.__module__)
    monkeypatch.setattr(module, "NO_FLOAT64", ("cpu",))
    rotation.angles(torch.arange(1))  # frequencies are formed in float64 on the CPU, once
    with Wide():
        found = rotation.tables(torch.arange(40))
        frames = key_frames(torch.tensor([3]), 37, rotation, tile=16, pairs=4)
    for ours, exact in zip(found, expected, strict=True):
        assert (ours - exact).abs().max() < 1e-5
    assert frames.cos.dtype == torch.float32
