"""Linear attention: chunks, recurrence and the definition agree; what it refuses."""

import pytest
import torch

from coca_attention.ops import RULES, Rotation, coca_linear_attention
from coca_attention.ops.positions import split_pairs


def make(heads=4, kv_heads=2, length=150, width=16, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    query, value = draw(2, heads, length, width), draw(2, kv_heads, length, 7)
    return query, torch.nn.functional.softplus(draw(2, kv_heads, length, width // 2)), value


def by_definition(query, t, value, rotation, power=2, interleaved=False):
    """Eq. 19 with the key of every pair of tokens, k = q ∘ t, both rotated."""
    (_, heads, length, width), groups = query.shape, query.shape[1] // t.shape[1]
    t, value = (x.repeat_interleave(groups, 1) for x in (t, value))
    pairs = torch.complex(*split_pairs(query, interleaved, rotation.width))
    if power == 1:
        pairs = pairs / pairs.abs().sqrt()
    angles = rotation.angles(torch.arange(length)).double()
    angles = torch.nn.functional.pad(angles, (0, width // 2 - angles.shape[-1]))
    turn = torch.polar(torch.ones_like(angles), angles)
    scores, norms = (query.new_zeros(2, heads, length, length) for _ in range(2))
    for m in range(length):
        keys = pairs[:, :, m : m + 1] * t[:, :, : m + 1]
        rotated = (pairs[:, :, m] * turn[m])[:, :, None] * (keys * turn[: m + 1]).conj()
        scores[:, :, m, : m + 1] = rotated.real.sum(-1)
        norms[:, :, m, : m + 1] = (pairs[:, :, m, None].conj() * keys).real.sum(-1)
    return scores @ value / norms.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("form", "power", "kv_heads", "width", "interleaved"),
    [("strict", 2, 2, 16, False), ("magnitude", 1, 4, 16, True), ("strict", 2, 1, 8, True)],
)
def test_chunks_are_the_definition(form, power, kv_heads, width, interleaved):
    query, t, value = make(kv_heads=kv_heads)
    inputs = [x.requires_grad_() for x in (query, t, value)]
    rotation = Rotation(width, base=100.0)
    expected = by_definition(query, t, value, rotation, power, interleaved)
    output, _ = coca_linear_attention(
        query, t, value, form=form, rotation=rotation, interleaved=interleaved
    )
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    direction = torch.randn_like(output)
    gradients = torch.autograd.grad(output, inputs, direction)
    for ours, theirs in zip(
        gradients, torch.autograd.grad(expected, inputs, direction), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    assert output.abs().max() <= value.abs().max()


@pytest.mark.parametrize("sizes", [[1] * 150, [149, 1], [7, 64, 65, 14]])
def test_a_state_continues_a_text(sizes):
    query, t, value = make()
    whole, last = coca_linear_attention(query, t, value)
    state, parts = None, []
    for part in zip(*(x.split(sizes, dim=2) for x in (query, t, value)), strict=True):
        output, state = coca_linear_attention(*part, state=state)
        parts.append(output)
    torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=0, atol=1e-10)
    assert state.products.shape == (2, 2, 16, 7) and state.coefficients.shape == (2, 2, 8)
    for ours, theirs in zip(state, last, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_padding_counts_for_nothing():
    query, t, value = make(length=20)
    padded = [torch.nn.functional.pad(x, (0, 0, 5, 0), value=3.0) for x in (query, t, value)]
    padded[1][:, :, :5] = 0
    positions = torch.cat((torch.zeros(5, dtype=torch.long), torch.arange(20)))
    output, state = coca_linear_attention(*padded, positions=positions)
    expected, without = coca_linear_attention(query, t, value)
    torch.testing.assert_close(output[:, :, 5:], expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(state.products, without.products, rtol=0, atol=1e-10)
    assert (output[:, :, :5] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_its_inputs(dtype):
    query, t, value = (x.to(dtype) for x in make(length=3000))
    output, state = coca_linear_attention(query, t, value)
    expected, _ = coca_linear_attention(query.double(), t.double(), value.double())
    assert output.dtype == dtype and state.products.dtype == torch.float32
    error = (output.double() - expected).abs().max()
    assert error <= max(1e-5, torch.finfo(dtype).eps * value.abs().max())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"form": "slack"}, "shift-invariant"),
        ({"rotation": Rotation(16, max_distance=8)}, "max_distance"),
        ({"rotation": Rotation(16, rule=RULES["dynamic"](2.0, 8))}, "follows"),
    ],
)
def test_what_has_no_state_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        coca_linear_attention(*make(length=10), **options)


def test_wrong_shapes_are_named():
    query, t, value = make(length=10)
    with pytest.raises(ValueError, match="key_coefficients must be"):
        coca_linear_attention(query, torch.cat((t, t), -1), value)
    with pytest.raises(ValueError, match="value must be"):
        coca_linear_attention(query, t, value[:, :, :9])


def test_sums_stay_wide_under_autocast_and_nothing_in_is_nothing_out():
    inputs = make(length=300, dtype=torch.float32)
    expected, _ = coca_linear_attention(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        output, state = coca_linear_attention(*inputs)
    assert torch.equal(output, expected) and state.products.dtype == torch.float32
    output, after = coca_linear_attention(*(x[:, :, :0] for x in inputs), state=state)
    assert output.shape == (2, 4, 0, 7) and after is state
