"""Operator, maps and half-cache decoding on a CUDA device: `pytest -m gpu`."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import oracle
from coca_attention.models.conversion import convert
from coca_attention.ops import (
    FORMS,
    Rotation,
    attend_half,
    coca_attention,
    kernels,
    key_frames,
    query_map,
    tile_length,
)
from coca_attention.testing import assert_consistent, difference, logits, some_tokens
from operands import operands

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
