"""The query and key maps: derivatives, layouts, tensors saved for the backward pass."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from coca_attention.ops import FORMS, Rotation, key_map, query_map
from covering import covering, mostly_slow
from operands import maps, normal


@pytest.mark.parametrize(
    ("form", "interleaved", "share"), covering(FORMS, [False, True], [(8, 0), (4, 0), (8, 3)])
)
def test_first_and_second_derivatives(form, interleaved, share):
    span, free = share
    q, t = normal(1, 2, 2, 8).requires_grad_(), normal(1, 1, 2, 4 + free, seed=1).requires_grad_()
    cos, sin = Rotation(span).tables(torch.arange(1, 3), torch.float64)
    both = maps(cos, sin, form, 0.7, free=free, interleaved=interleaved)
    for function, x in zip(both, (q, t), strict=True):
        assert gradcheck(function, (x,))
        assert gradgradcheck(function, (x,))


def test_magnitude_has_gradient_zero_where_the_query_is_zero():
    q = torch.zeros(1, 1, 2, 4, dtype=torch.float64, requires_grad=True)
    cos, sin = Rotation(4).tables(torch.arange(2), torch.float64)
    made = query_map(q, cos, sin, form="magnitude")
    (first,) = torch.autograd.grad(made.sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), q)
    assert torch.equal(first, torch.zeros_like(q)) and torch.equal(second, torch.zeros_like(q))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_query_is_kept_for_the_backward_pass(dtype):
    """Besides cos and sin, shared by all heads: nothing for keys, and q in its own dtype."""
    q, t = (normal(1, 8, 64, n, dtype=dtype).requires_grad_() for n in (16, 8))
    cos, sin = Rotation(16).tables(torch.arange(64))
    kept: dict[int, int] = {}

    def keep(x):
        kept[x.data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        made = query_map(q, cos, sin, form="slack"), key_map(t, cos, sin)
    assert all(x.requires_grad for x in made)
    assert sum(kept.values()) == q.numel() * q.element_size() + 4 * cos.numel() * 4


@pytest.mark.parametrize("form", FORMS)
def test_memory_layout_of_heads_and_rows_is_kept(form):
    """Projections give (B, T, H, D) viewed as (B, H, T, D): results keep that memory layout."""
    q, t = (normal(2, 5, 3, n).transpose(1, 2) for n in (8, 4))
    cos, sin = Rotation(8).tables(torch.arange(5), torch.float64)
    assert query_map(q, cos, sin, form=form).transpose(1, 2).is_contiguous()
    assert key_map(t, cos, sin).transpose(1, 2).is_contiguous()


def test_learned_frequencies_are_refused():
    q, t = normal(1, 1, 2, 4), normal(1, 1, 2, 2)
    cos, sin = Rotation(4).tables(torch.arange(2), torch.float64)
    cos.requires_grad_()
    with pytest.raises(ValueError, match="must not require gradients"):
        query_map(q, cos, sin, form="strict")
    with pytest.raises(ValueError, match="must not require gradients"):
        key_map(t, cos, sin)


@pytest.mark.parametrize("form", mostly_slow(FORMS, ["magnitude"]))
def test_maps_compile_in_one_graph(form):
    q, t = normal(1, 2, 6, 8).requires_grad_(), normal(1, 1, 6, 4, seed=1).requires_grad_()
    cos, sin = Rotation(8).tables(torch.arange(6), torch.float64)

    def scores(q, t):
        query = query_map(q, cos, sin, form=form, scale=0.5)
        return (query @ key_map(t, cos, sin).mT).square().sum()

    found = [
        torch.autograd.grad(function(q, t), (q, t))
        for function in (scores, torch.compile(scores, backend="aot_eager", fullgraph=True))
    ]
    for ours, expected in zip(*found, strict=True):
        assert (ours - expected).abs().max() < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_compiled_queries_are_not_written_in_parts(form):
    """Such a write is a choice in every compiled loop over the keys, which cannot be vectorized."""
    q = normal(1, 2, 1, 8)
    cos, sin = Rotation(8).tables(torch.arange(1))
    operations = []

    def backend(graph, inputs):
        operations.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(
        lambda x: query_map(x, cos, sin, form=form), backend=backend, fullgraph=True
    )
    assert torch.allclose(compiled(q), query_map(q, cos, sin, form=form))
    assert operations and not {"select", "addcmul_"} <= set(operations)
