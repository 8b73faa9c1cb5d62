"""Attention in parts: the pairs are covered once, and merging is exact."""

import pytest
import torch

from coca_attention.ops import Clipping, attend_clipped
from coca_attention.ops.parts import attend_parts, clipped_parts, document_parts

SHAPES = [
    (37, 37, 8),
    (5, 37, 8),
    (2, 37, 8),
    (40, 40, 1),
    (17, 40, 39),
    (17, 40, 40),
    (33, 40, 11),
]


def covered(parts, queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How often every pair is near, and how often it is far."""
    counts = torch.zeros(2, queries, keys, dtype=torch.long)
    for part in parts:
        square = torch.ones_like(counts[0, part.rows, part.columns])
        shaped = {"full": square, "lower": square.tril(), "upper": square.triu()}[part.shape]
        counts[int(part.far), part.rows, part.columns] += shaped
    return counts[0], counts[1]


@pytest.mark.parametrize(("queries", "keys", "limit"), SHAPES)
def test_every_visible_pair_is_in_one_part(queries, keys, limit):
    near, far = covered(clipped_parts(queries, keys, limit), queries, keys)
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    assert torch.equal(near, ((distance >= 0) & (distance < limit)).long())
    assert torch.equal(far, (distance >= limit).long())


def test_documents_do_not_see_each_other():
    lengths, queries = [3, 20, 1, 9], 25
    near, far = covered(document_parts(lengths, queries, 4), queries, 33)
    document = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    distance = torch.arange(8, 33)[:, None] - torch.arange(33)
    same = (document[8:, None] == document) & (distance >= 0)
    assert torch.equal(near, (same & (distance < 4)).long())
    assert torch.equal(far, (same & (distance >= 4)).long())


@pytest.mark.parametrize(("queries", "keys", "limit"), SHAPES)
@pytest.mark.parametrize("widths", [(16, 12, 16), (16, 8, 24)])
def test_output_and_gradients_agree_with_attention_in_blocks(queries, keys, limit, widths):
    width, far_width, value_width = widths
    generator = torch.Generator().manual_seed(queries)
    shapes = [
        (2, 4, queries, width), (2, 2, keys, width), (2, 4, queries, far_width),
        (2, 2, keys, far_width), (2, 2, keys, value_width),
    ]  # fmt: skip
    tensors = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    gradient = torch.randn(2, 4, queries, value_width, generator=generator, dtype=torch.float64)
    results = []
    for in_parts in (True, False):
        leaves = [x.clone().requires_grad_() for x in tensors]
        if in_parts:
            output = attend_parts(list(clipped_parts(queries, keys, limit)), *leaves, scale=0.3)
        else:
            places = torch.arange(keys - queries, keys), torch.arange(keys)
            clipping = Clipping(limit, consecutive=False, scale=0.3)
            output, _ = attend_clipped(*leaves, clipping, positions=places)
        grads = torch.autograd.grad(output, leaves, gradient, materialize_grads=True)
        results.append((output, *grads))
    for ours, expected in zip(*results, strict=True):
        assert (ours - expected).abs().max() < 1e-12
