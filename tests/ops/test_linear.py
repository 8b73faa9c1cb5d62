"""Linear attention: chunks, recurrence and the definition agree; what it refuses."""

import pytest
import torch

import oracle
from coca_attention.ops import DistanceMap, Rotation, coca_linear_attention
from operands import assert_same_with_gradients, normal, operands, stock


def make(kv_heads=2, length=150, dtype=torch.float64):
    query, t, value = operands(kv_heads=kv_heads, queries=length, keys=length, value_width=7)
    return [x.to(dtype) for x in (query, t + 0.1, value)]


def by_definition(query, t, value, form, rotation, interleaved):
    """Eq. 19: scores, and as their norms those without rotation."""
    t, value = (x.repeat_interleave(query.shape[1] // t.shape[1], 1) for x in (t, value))
    pairs = oracle.pairs_of(query, interleaved, rotation.width)
    places, theta = torch.arange(query.shape[2]), rotation.frequencies()
    scores, norms = (
        oracle.scores(form, pairs, t, places, places, x).tril() for x in (theta, 0 * theta)
    )
    return scores @ value / norms.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("form", "kv_heads", "width", "interleaved"),
    [("strict", 2, 16, False), ("magnitude", 4, 16, True), ("strict", 1, 8, True)],
)
def test_chunks_are_the_definition(form, kv_heads, width, interleaved):
    inputs = [x.requires_grad_() for x in make(kv_heads=kv_heads)]
    options = {"form": form, "rotation": Rotation(width, 100.0), "interleaved": interleaved}
    output, _ = coca_linear_attention(*inputs, **options)
    expected = by_definition(*inputs, **options)
    assert_same_with_gradients(output, expected, inputs, outputs=1e-10, gradients=1e-10)
    assert output.abs().max() <= inputs[2].abs().max()


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


@pytest.mark.parametrize("form", ["strict", "magnitude"])
def test_gradients_are_finite_where_a_query_sees_nothing(form):
    inputs = make(length=70, dtype=torch.float32)
    inputs[1][:, :, :5] = 0  # as of padding
    inputs[0][:, :, 9] = 0  # a query without a direction
    for x in inputs:
        x.requires_grad_()
    output, _ = coca_linear_attention(*inputs, form=form)
    assert (output[:, :, :5] == 0).all() and (output[:, :, 9] == 0).all()
    gradients = torch.autograd.grad((output - 1).square().sum(), inputs)
    assert all(x.isfinite().all() and x.any() for x in gradients)
    assert not gradients[0][:, :, :5].any() and not gradients[2][:, :, :5].any()


@pytest.mark.parametrize("form", ["strict", "magnitude"])
@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e-19, 1e19, 1e30])
def test_the_size_of_a_query_does_not_matter(form, size):
    query, t, value = make(length=70, dtype=torch.float32)
    expected, _ = coca_linear_attention(query.double(), t.double(), value.double(), form=form)
    scaled = (size * query).requires_grad_()
    output, _ = coca_linear_attention(scaled, t, value, form=form)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)
    query.requires_grad_()
    whole, _ = coca_linear_attention(query, t, value, form=form)
    (ours,) = torch.autograd.grad(output.sum(), scaled)
    (theirs,) = torch.autograd.grad(whole.sum(), query)
    torch.testing.assert_close(ours * size, theirs, rtol=1e-3, atol=1e-4)


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
        ({"rotation": Rotation(16, distance_map=DistanceMap.limited(8))}, "a distance map"),
        ({"rotation": Rotation(16, rule=stock("dynamic", 8, factor=2.0))}, "follows"),
        ({"key_coefficients": normal(2, 2, 10, 16)}, "key_coefficients must be"),
        ({"value": normal(2, 2, 9, 7)}, "key length must match"),
        ({"value": normal(2, 2, 10, 7).float()}, "share one floating dtype"),
    ],
)
def test_what_has_no_state_and_wrong_shapes_are_refused(options, words):
    tensors = dict(zip(("query", "key_coefficients", "value"), make(length=10), strict=True))
    with pytest.raises((ValueError, TypeError), match=words):
        coca_linear_attention(**tensors | options)


def test_sums_stay_wide_under_autocast_and_nothing_in_is_nothing_out():
    """Neither tokens nor texts."""
    inputs = make(length=300, dtype=torch.float32)
    expected, _ = coca_linear_attention(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        output, state = coca_linear_attention(*inputs)
    assert torch.equal(output, expected) and state.products.dtype == torch.float32
    output, after = coca_linear_attention(*(x[:, :, :0] for x in inputs), state=state)
    assert output.shape == (2, 4, 0, 7) and after is state
    state = None
    for _ in range(2):
        output, state = coca_linear_attention(*(x[:0] for x in inputs), state=state)
        assert output.shape == (0, 4, 300, 7) and state.products.shape == (0, 2, 16, 7)
