"""One new token over a half cache, compared with full keys and `attend`; and its Triton kernel."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_attention.ops import (
    Rotation,
    attend,
    attend_half,
    kernels,
    key_frames,
    key_map,
    tile_length,
)
from coca_attention.ops.decoding import attend_half_at
from operands import operands, stock

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def case(heads=4, kv_heads=2, keys=70, dtype=torch.float64, **sizes):
    tensors = operands(heads=heads, kv_heads=kv_heads, queries=1, keys=keys, **sizes)
    query, t, value = (x.to(DEVICE, dtype) for x in tensors)
    return query, t, value


def whole_keys(query, t, value, first, rotation, scale, mask=None):
    positions = first.unsqueeze(-1) + torch.arange(t.shape[-2], device=t.device)
    wide = torch.promote_types(t.dtype, torch.float32)
    cos, sin = rotation.tables(positions, wide)
    key = key_map(t, cos, sin, free_pairs=t.shape[-1] - query.shape[-1] // 2)
    return attend(query, key, value, attention_mask=mask, is_causal=False, scale=scale)


def seen_from(first, keys):
    """A mask of two rows: keys from the first on, and none."""
    begins = torch.tensor([[first], [keys]], device=DEVICE)
    return (torch.arange(keys, device=DEVICE) >= begins)[:, None, None]


def frames_for(query, t, first, rotation, tile):
    pairs, wide = query.shape[-1] // 2, torch.promote_types(t.dtype, torch.float32)
    options = {"tile": tile, "pairs": pairs, "free_pairs": t.shape[-1] - pairs, "dtype": wide}
    return key_frames(first, t.shape[-2], rotation, **options)


@settings(max_examples=60)
@given(
    free=st.sampled_from([0, 3, 8]),
    keys=st.integers(1, 130),
    tile=st.sampled_from([16, 32, 64]),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    span=st.sampled_from([16, 6]),
    value_width=st.sampled_from([16, 5]),
    rows=st.sampled_from([1, 2]),
    magnitude=st.sampled_from([1.0, 1.2]),
    masked=st.booleans(),
    first=st.integers(-40, 100_000),
)
def test_agrees_with_whole_keys(
    free, keys, tile, heads, span, value_width, rows, magnitude, masked, first
):
    query, t, value = case(*heads, keys=keys, value_width=value_width, free=free)
    start = torch.tensor([first, first - 7])[:rows].to(DEVICE)
    mask = seen_from(keys // 2, keys) if masked else None
    rotation = Rotation(span, rule=stock("yarn", 64, attention_factor=magnitude))
    expected = whole_keys(query, t, value, start, rotation, 0.3, mask)
    frames = frames_for(query, t, start, rotation, tile)
    ours = attend_half(query, t, value, frames, attention_mask=mask, scale=0.3)
    assert ours.shape == expected.shape and ours.dtype == expected.dtype
    # cos and sin of positions of 100,000 differ by the angles' round-off in float64.
    assert (ours - expected).abs().max() < 1e-9
    positions = start.unsqueeze(-1) + torch.arange(keys, device=DEVICE)
    cos, sin = rotation.tables(positions, torch.float64)
    anywhere = attend_half_at(query, t, value, cos, sin, attention_mask=mask, scale=0.3)
    assert anywhere.shape == expected.shape and anywhere.dtype == expected.dtype
    assert (anywhere - expected).abs().max() < 1e-12
    if masked:
        assert not ours[1].any() and not anywhere[1].any()  # nothing may be seen


@pytest.mark.parametrize(
    ("by_kernel", "free", "heads", "masked", "dtype", "tolerance"),
    [
        pytest.param(True, 0, (4, 4), False, torch.float32, 1e-5, marks=pytest.mark.slow),
        pytest.param(True, 5, (4, 4), True, torch.bfloat16, 2**-6, marks=pytest.mark.slow),
        pytest.param(True, 5, (20, 1), True, torch.float32, 1e-5, marks=pytest.mark.slow),
        (True, 12, (4, 2), True, torch.float16, 4e-3),
        (False, 0, (4, 4), False, torch.bfloat16, 2**-6),
        (False, 0, (4, 2), True, torch.bfloat16, 2**-6),
    ],
    ids=str,
)
def test_kernel_and_half_precision(monkeypatch, by_kernel, free, heads, masked, dtype, tolerance):
    """Several splits, an incomplete last tile, and widths that are not powers of two.

    Scores are computed in float32, so that of half precision only weights and values are rounded.
    """
    if by_kernel:
        pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "supports", lambda x: by_kernel)
    query, t, value = case(*heads, keys=133, width=24, value_width=20, dtype=dtype, free=free)
    t, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (t, value))
    first = torch.tensor([900, -3], device=DEVICE)
    mask = seen_from(100, 133) if masked else None
    exact = (query.double(), t.double(), value.double())
    expected = whole_keys(*exact, first, Rotation(16), 0.2, mask)
    frames = frames_for(query, t, first, Rotation(16), 32)
    ours = attend_half(query, t, value, frames, attention_mask=mask, scale=0.2)
    assert ours.dtype == dtype
    assert (ours.double() - expected).abs().max() < tolerance
    if masked:
        assert not ours[1].any()


def test_tiles_are_powers_of_two_that_fit_the_cache():
    for shape in ((1, 16, 5, 32), (64, 64, 5, 64), (1, 1, 5, 1), (1, 3, 5, 20)):
        alone, shared = (tile_length(torch.empty(shape), n * shape[1]) for n in (1, 4))
        assert alone & (alone - 1) == 0 and shared == max(16, alone // 2)


def test_other_lengths_several_queries_and_gradients_are_refused():
    query, t, value = case()
    frames = frames_for(query, t, torch.zeros(1, device=DEVICE), Rotation(16), 16)
    with pytest.raises(ValueError, match="one query token and frames for 69 keys"):
        attend_half(query, t[:, :, 1:], value[:, :, 1:], frames)
    with pytest.raises(ValueError, match="one query token"):
        attend_half(query.repeat(1, 1, 2, 1), t, value, frames)
    with pytest.raises(ValueError, match="no gradient"):
        attend_half(query.requires_grad_(), t, value, frames)
    with pytest.raises(ValueError, match="no gradient"):
        attend_half_at(query, t, value, *torch.zeros(2, 70, 8).to(query))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
def test_weights_of_a_long_cache_do_not_overflow(heads):
    """Equal keys: a float16 sum of V before dividing by the sum of weights would be inf."""
    query, t, value = case(*heads, keys=40_000, width=4, dtype=torch.float16, batch=1)
    query, value = torch.zeros_like(query), torch.full_like(value, 2.0)
    frames = frames_for(query, t, torch.zeros(1, device=DEVICE), Rotation(4), 1024)
    cos, sin = Rotation(4).tables(torch.arange(40_000, device=DEVICE))
    for output in (attend_half(query, t, value, frames), attend_half_at(query, t, value, cos, sin)):
        assert (output - 2).abs().max() < 0.01


def test_layers_share_scratch_memory_also_in_inference_mode():
    """What one layer leaves in it does not affect the next one."""
    first = torch.zeros(1, device=DEVICE)
    query, t, value = case()
    frames = frames_for(query, t, first, Rotation(16), 32)
    with torch.inference_mode():
        alone = attend_half(query, t, value, frames)
    attend_half(*case(seed=1), frames)
    attend_half(*case(heads=2, kv_heads=2, seed=2), frames)
    assert torch.equal(attend_half(query, t, value, frames), alone)
