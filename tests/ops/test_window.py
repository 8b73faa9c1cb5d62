"""Attention over a window, compared with softmax over all keys."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_attention.ops import attend
from coca_attention.ops.attention import WINDOW_BLOCK
from coca_attention.ops.parts import Part, attend_parts
from operands import assert_same_with_gradients, normal


def tensors(heads, kv_heads, queries, keys, value_width=8):
    shapes = ((heads, queries, 8), (kv_heads, keys, 8), (kv_heads, keys, value_width))
    return [normal(2, *shape, seed=seed) for seed, shape in enumerate(shapes)]


def visible(queries, keys, window):
    distance = torch.arange(keys - queries, keys).unsqueeze(-1) - torch.arange(keys)
    return (distance >= 0) & (distance < window)


def expected(q, k, v, mask):
    """Softmax over all keys with a boolean or additive mask; zeros where all are masked."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(scores).masked_fill(~mask, -torch.inf)
    scores = scores + mask
    none = scores.detach().isneginf().all(-1, keepdim=True)
    return scores.masked_fill(none, 0).softmax(-1).masked_fill(none, 0) @ v


def masks(kind, queries, keys):
    """A mask of every shape that broadcasts, the second row padded on the left."""
    generator = torch.Generator().manual_seed(7)
    if kind == "padding":
        return torch.arange(keys).expand(2, 1, 1, keys) >= torch.tensor([0, 9]).view(2, 1, 1, 1)
    if kind == "per head":
        return torch.rand(2, 4, queries, keys, generator=generator) > 0.3
    if kind == "two dimensions":
        return torch.rand(queries, keys, generator=generator) > 0.3
    if kind == "rows":
        return torch.rand(2, 1, queries, 1, generator=generator) > 0.3
    return normal(4, queries, keys, seed=7) if kind == "additive" else None


@settings(max_examples=60, deadline=None)
@given(
    window=st.sampled_from([1, 2, 31, 64, 65, 300]) | st.integers(1, 450),
    queries=st.integers(1, 400),
    earlier=st.integers(0, 150),
    kv_heads=st.sampled_from([1, 2, 4]),
    value_width=st.sampled_from([5, 8, 11]),
    kind=st.sampled_from(["none", "padding", "per head", "two dimensions", "rows", "additive"]),
)
def test_outputs_and_gradients(window, queries, earlier, kv_heads, value_width, kind):
    keys = queries + earlier
    mask, leaves = masks(kind, queries, keys), tensors(4, kv_heads, queries, keys, value_width)
    if kind == "additive":
        leaves.append(mask)
    leaves = [x.requires_grad_() for x in leaves]
    q, k, v = leaves[:3]
    band = visible(queries, keys, window)
    if mask is None or mask.dtype == torch.bool:
        full = band if mask is None else band & mask
    else:
        full = mask.masked_fill(~band, -torch.inf)
    ours = attend(q, k, v, attention_mask=mask, window=window)
    exact = expected(q, k, v, full)
    assert_same_with_gradients(ours, exact, leaves, gradients=1e-11)


def test_dropout_applies_within_the_window():
    q, k, v = tensors(2, 2, 300, 300)
    v = torch.eye(300, dtype=torch.float64).expand(2, 2, 300, 300)
    torch.manual_seed(0)
    weights = attend(q, k, v, window=20, dropout=0.5)
    whole = attend(q, k, v, window=20)
    kept = weights != 0
    assert torch.allclose(weights[kept], 2 * whole[kept]) and not (kept & (whole == 0)).any()
    assert 0.45 < kept.sum() / (whole != 0).sum() < 0.55


def test_no_key_outside_the_window_is_read():
    q, k, v = tensors(2, 2, 300, 400)
    k[:, :, :50], v[:, :, :50] = torch.nan, torch.nan
    assert attend(q, k, v, window=51).isfinite().all()


def test_cost_is_linear_in_the_length():
    """Sizes of what SDPA is given: all masks and keys together grow no faster than the length."""
    sizes = []

    class Recorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.nn.functional.scaled_dot_product_attention:
                sizes[-1] += kwargs["attn_mask"].numel() + args[0].numel() + args[1].numel()
            return function(*args, **(kwargs or {}))

    for length in (1024, 2048, 4096):
        sizes.append(0)
        with Recorder():
            attend(*tensors(2, 2, length, length), window=32)
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0]) < 2 * 5 * 2 * 2 * 8 * 1024
    assert 1024 % WINDOW_BLOCK == 0


def test_parts_make_up_the_whole():
    """As FlashAttention computes them on a GPU, here by the kernel of a CPU."""
    leaves = [x.requires_grad_() for x in tensors(4, 2, 20, 20)]
    whole = slice(0, 20)
    halves = [slice(0, 10), slice(10, 20)]
    parts = [Part(halves[0], halves[0], "lower"), Part(halves[1], halves[1], "lower")]
    parts.append(Part(halves[1], halves[0], "full"))
    q, k, v = leaves
    exact = expected(q, k, v, visible(20, 20, 20))
    for cut in ([Part(whole, whole, "lower")], parts):
        ours = attend_parts(cut, (q, k, q, k, v), q.shape[-1] ** -0.5)
        assert_same_with_gradients(ours, exact, leaves)
