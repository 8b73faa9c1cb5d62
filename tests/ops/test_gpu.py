"""Operator, maps and half-cache decoding on a CUDA device: `pytest -m gpu`."""

from unittest.mock import Mock

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import oracle
from coca_attention.models.conversion import convert
from coca_attention.ops import (
    FORMS,
    DistanceMap,
    Rotation,
    attend,
    attend_half,
    coca_attention,
    kernels,
    key_frames,
    query_map,
    tile_length,
)
from coca_attention.testing import assert_consistent, difference, logits, some_tokens
from operands import normal, operands

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [(torch.float32, 2e-5), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)]


def inputs(dtype: torch.dtype, length: int, heads: int = 4, groups: int = 2):
    sizes = {"heads": heads, "kv_heads": groups, "queries": length, "keys": length}
    tensors = operands(batch=1, **sizes, width=64, value_width=64)
    return [x.to("cuda", dtype) for x in tensors]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
def test_agrees_with_the_oracle(form, dtype, tolerance):
    q, t, v = inputs(dtype, 257)
    assert kernels.supports(q)
    expected = oracle.coca_attention(q.cpu(), t.cpu(), v.cpu(), form=form)
    output = coca_attention(q, t, v, form=form).cpu().double()
    assert (output - expected).abs().max() <= tolerance


@pytest.mark.parametrize("form", FORMS)
def test_gradients_agree_with_those_of_the_cpu(form):
    tensors = inputs(torch.float32, 257)
    found = []
    for device in ("cuda", "cpu"):
        leaves = [x.to(device).requires_grad_() for x in tensors]
        output = coca_attention(*leaves, form=form)
        weights = torch.linspace(-1, 1, output.numel(), device=device).view_as(output)
        found.append(torch.autograd.grad(output, leaves, weights))
    for ours, expected in zip(*found, strict=True):
        assert (ours.cpu() - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_grouped_heads_allocate_no_score_matrix(dtype, masked):
    """At 16,384 tokens the scores of 4 heads would take 2 or 4 GB."""
    q, t, v = inputs(dtype, 16384)
    mask = torch.ones(1, 1, 1, 16384, dtype=torch.bool, device="cuda") if masked else None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.inference_mode():
        coca_attention(q, t, v, attention_mask=mask)
    assert torch.cuda.max_memory_allocated() - before < 400e6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (32, 4)], ids=str)
@pytest.mark.parametrize("length", [1000, 32768])
def test_half_keys_decode_like_the_oracle(form, dtype, tolerance, heads, length):
    q, t, v = inputs(dtype, length, *heads)
    q = q[..., -1:, :]
    cos, sin = Rotation(64).tables(torch.tensor([length - 1], device="cuda"))
    effective = query_map(q, cos, sin, form=form, scale=0.125)
    first, tile = torch.zeros(1, dtype=torch.long, device="cuda"), tile_length(t, q.shape[1])
    frames = key_frames(first, length, Rotation(64), tile=tile, pairs=32)
    output = attend_half(effective, t, v, frames).cpu().double()
    expected = oracle.coca_attention(q.cpu(), t.cpu(), v.cpu(), form=form)
    assert (output - expected).abs().max() <= tolerance


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["full", "half"])
def test_models_are_consistent_on_both_devices(form, kind):
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100,
    )  # fmt: skip
    torch.manual_seed(0)
    model = convert(LlamaForCausalLM(config), form).eval()
    model.config.kv_cache = kind
    ids = some_tokens(model)
    expected = logits(model, ids)
    model.cuda()
    ids = ids.cuda()
    assert difference(logits(model, ids).cpu(), expected) < 1e-4
    assert_consistent(model)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
        last = model(ids[:, -1:], past_key_values=cache).logits
    assert difference(last.cpu().double(), expected[:, -1:]) < 1e-4


def with_gradients(function, tensors):
    """Its output and the gradients of all tensors, in float64 on the CPU."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    output = function(*leaves)
    weights = normal(*output.shape, seed=9).to(output)
    found = [output, *torch.autograd.grad(output, leaves, weights)]
    return [x.detach().cpu().double() for x in found]


def assert_close_to_float64(function, tensors, dtype=torch.bfloat16):
    """Within what rounding to the dtype explains."""
    rounded = [x.to(dtype) for x in tensors]
    exact = with_gradients(function, [x.double() for x in rounded])
    for ours, expected in zip(
        with_gradients(function, [x.cuda() for x in rounded]), exact, strict=True
    ):
        assert (ours - expected).abs().max() <= 3e-2 * expected.abs().max()


@pytest.mark.parametrize("window", [None, 2, 64, 300])
@pytest.mark.parametrize("queries", [1000, 700])
def test_windows(window, queries):
    shapes = [(2, 4, queries, 64), (2, 2, 1000, 64), (2, 2, 1000, 64)]
    tensors = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    assert_close_to_float64(lambda q, k, v: attend(q, k, v, window=window), tensors)


@pytest.mark.parametrize(("form", "free"), [("strict", 0), ("strict", 8), ("slack", 32)])
@pytest.mark.parametrize("queries", [1000, 700])
@pytest.mark.parametrize("limit", [1, 100, 900])
def test_limited_distances(form, free, queries, limit):
    sizes = {"heads": 4, "kv_heads": 2, "queries": queries, "keys": 1000}
    tensors = operands(batch=2, **sizes, width=64, value_width=64, free=free)
    rotation = Rotation(64, distance_map=DistanceMap.limited(limit))
    assert_close_to_float64(
        lambda q, t, v: coca_attention(q, t, v, form=form, rotation=rotation), tensors
    )


def test_windows_and_limits_need_no_mask(monkeypatch):
    masked = Mock(wraps=torch.nn.functional.scaled_dot_product_attention)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", masked)
    q, t, v = inputs(torch.bfloat16, 1000)
    attend(q, torch.cat((t, t), dim=-1), v, window=64)
    coca_attention(
        q, t, v, form="strict", rotation=Rotation(64, distance_map=DistanceMap.limited(64))
    )
    assert not masked.called
