"""Clipped distances: keys farther back than W are scored as if W back."""

import math

import pytest
import torch

import oracle
from coca_attention import coca_attention
from coca_attention.ops import (
    Clipping,
    Rotation,
    attend_clipped,
    clipped,
    far_query_map,
    key_map,
    query_map,
)
from coca_attention.ops.positions import YaRN

WIDTH, LIMIT = 16, 7


def inputs(free: int, queries: int = 23, keys: int = 29):
    generator = torch.Generator().manual_seed(free)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    t = normal(2, 2, keys, WIDTH // 2 + free)
    collinear = WIDTH // 2 - free
    t = torch.cat((t[..., :collinear].relu(), t[..., collinear:]), dim=-1)
    return normal(2, 4, queries, WIDTH), t, normal(2, 2, keys, 12)


@pytest.mark.parametrize(("form", "free"), [("strict", 0), ("magnitude", 3), ("slack", 8)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("block", [None, 5])
def test_agrees_with_the_oracle(form, free, interleaved, block, monkeypatch):
    q, t, v = inputs(free)
    if block:
        monkeypatch.setattr(clipped, "can_attend_parts", lambda query: False)
        monkeypatch.setattr(clipped, "CPU_SCORES", 1)
        monkeypatch.setattr(clipped, "MIN_ROWS", block)
    rotation = Rotation(WIDTH, max_distance=LIMIT)
    options = {"form": form, "interleaved": interleaved}
    ours = coca_attention(q, t, v, rotation=rotation, **options)
    expected = oracle.coca_attention(q, t, v, max_distance=LIMIT, **options)
    assert (ours - expected).abs().max() <= 1e-12
    assert (ours - coca_attention(q, t, v, **options)).abs().max() > 1e-3
    unlimited = coca_attention(q, t, v, rotation=Rotation(WIDTH, max_distance=29), **options)
    assert torch.equal(unlimited, coca_attention(q, t, v, **options))


def test_a_temperature_shrinks_no_query():
    q, t, v = inputs(8)
    seen = torch.arange(29, dtype=q.dtype)[-23:] + 2
    factor = (seen.log() / math.log(15 + 1)).clamp(min=1)
    assert 1 < (factor == 1).sum() < 22
    ours = coca_attention(q, t, v, rotation=Rotation(WIDTH, temperature=15, max_distance=LIMIT))
    scores = oracle.coca_attention(q * factor[:, None], t, v, max_distance=LIMIT)
    assert (ours - scores).abs().max() <= 1e-12


def test_a_decay_counts_from_the_limit_and_masks_apply():
    q, t, v = inputs(8)
    positions = torch.arange(29)
    distance = positions[-23:, None] - positions
    bias = -1.5 * ((distance - LIMIT).clamp(min=0).double() / 3.0).log1p()
    visible = torch.rand(23, 29, generator=torch.Generator().manual_seed(1)) > 0.4
    visible[:, 0] = True
    bias = bias.masked_fill(~visible, -torch.inf)
    rotation = Rotation(WIDTH, decay=1.5, decay_length=3.0, max_distance=LIMIT)
    ours = coca_attention(q, t, v, rotation=rotation, attention_mask=visible)
    expected = oracle.coca_attention(q, t, v, max_distance=LIMIT, bias=bias)
    assert (ours - expected).abs().max() <= 1e-12
    additive = torch.zeros(visible.shape, dtype=q.dtype).masked_fill(~visible, -torch.inf)
    assert torch.equal(ours, coca_attention(q, t, v, rotation=rotation, attention_mask=additive))
    visible[4] = False
    q.requires_grad_()
    ours = coca_attention(q, t, v, rotation=rotation, attention_mask=visible)
    assert ours[:, :, 4].abs().max() == 0
    ours.sum().backward()
    assert q.grad.isfinite().all()


def test_positions_decide_and_not_the_order_of_keys():
    q, t, v = inputs(0)
    order = torch.randperm(29, generator=torch.Generator().manual_seed(0))
    rotation = Rotation(WIDTH, max_distance=LIMIT)
    later = torch.ones(1, 29, dtype=torch.bool)
    options = {"form": "strict", "rotation": rotation}
    last = q[:, :, -1:]
    ours = coca_attention(
        last,
        t[:, :, order],
        v[:, :, order],
        key_positions=order,
        query_positions=torch.tensor([28]),
        attention_mask=later,
        **options,
    )
    assert (ours - coca_attention(last, t, v, **options)).abs().max() <= 1e-12


def test_the_magnitude_of_a_rule_acts_at_every_distance():
    q, t, v = inputs(8)
    rule = YaRN(factor=4.0, training_length=16)
    ours = coca_attention(q, t, v, rotation=Rotation(WIDTH, rule=rule, max_distance=LIMIT))
    theta = rule.frequencies(WIDTH, 10000.0)
    expected = oracle.coca_attention(
        q, t, v, theta=theta, max_distance=LIMIT, scale=rule.magnitude**2 / 4
    )
    assert rule.magnitude != 1
    assert (ours - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("block", [None, 3])
def test_gradients(block, monkeypatch):
    q, t, v = inputs(3, queries=6, keys=8)
    t = t + 0.1 * t.sign()  # away from the kink of the ReLU's range
    if block:
        monkeypatch.setattr(clipped, "CPU_SCORES", 1)
        monkeypatch.setattr(clipped, "MIN_ROWS", block)
    rotation = Rotation(WIDTH, max_distance=3, decay=1.0, decay_length=2.0)
    tensors = [x[:1, :2].clone().requires_grad_() for x in (q, t, v)]
    assert torch.autograd.gradcheck(
        lambda *x: coca_attention(*x, rotation=rotation, form="strict"), tensors
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    q, t, v = inputs(0)
    rotation = Rotation(WIDTH, max_distance=LIMIT)
    exact = coca_attention(q, t, v, rotation=rotation, form="strict")
    ours = coca_attention(*(x.to(dtype) for x in (q, t, v)), rotation=rotation, form="strict")
    assert ours.dtype == dtype
    assert (ours.double() - exact).abs().max() < 0.05


def test_masks_of_float16_hide_however_large_the_scores_are():
    q, t, v = (x.half() for x in inputs(0, queries=29))
    rotation = Rotation(WIDTH)
    places = torch.arange(29)
    tables = rotation.tables(places, torch.float32)
    hidden = torch.ones(29, 29, dtype=torch.bool).triu(1)
    additive = torch.zeros(29, 29).half().masked_fill(hidden, torch.finfo(torch.float16).min)

    def attended(t: torch.Tensor) -> torch.Tensor:
        query = query_map(30 * q, *tables, form="strict")
        key, far = key_map(t, *tables), far_query_map(query, 0)
        clipping = Clipping(LIMIT, is_causal=False)
        options = {"positions": (places, places), "attention_mask": additive}
        return attend_clipped(query, key, far, t, v, clipping, **options)[0]

    changed = t.clone()
    changed[..., -1, :] += 90  # scores beyond the range of float16
    before, after = attended(t), attended(changed)
    assert torch.equal(after[:, :, :-1], before[:, :, :-1])
    assert not torch.equal(after[:, :, -1], before[:, :, -1])


@pytest.mark.parametrize(("batch", "queries"), [(2, 0), (0, 29)])
def test_nothing_to_attend_from(batch, queries):
    q, t, v = inputs(0, queries=29)
    rotation = Rotation(WIDTH, max_distance=LIMIT)
    found = coca_attention(q[:batch, :, :queries], t[:batch], v[:batch], rotation=rotation,
                           form="strict")  # fmt: skip
    assert found.shape == (batch, 4, queries, 12)


def test_errors():
    q, t, v = inputs(0)
    rotation = Rotation(WIDTH, max_distance=LIMIT)
    with pytest.raises(ValueError, match=r"those of form slack depend on both positions: use"):
        coca_attention(q, t, v, rotation=rotation)
    for options in ({"window": 5}, {"is_causal": False}):
        with pytest.raises(ValueError, match="max_distance requires causal attention"):
            coca_attention(q, t, v, rotation=rotation, form="strict", **options)
    with pytest.raises(
        ValueError, match="max_distance, a number of tokens, must be a whole number from 1"
    ):
        Rotation(WIDTH, max_distance=0)
