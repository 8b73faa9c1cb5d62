"""Random operands of attention, the same in every run, and how large what is made of them gets."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coca_attention.models.frequencies import StockRule
from coca_attention.ops import activate, key_map, query_map


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def stock(kind: str, training_length: int | None, length: int | None = None, **rope) -> StockRule:
    """A rule of Transformers, fixed to the text of a length if one is given."""
    rule = StockRule.of(kind, rope, training_length)
    return rule if length is None else rule.for_length(length)


def maps(cos, sin, form, scale, *, free=0, **options):
    """The maps of queries and of keys, with these tables and options."""

    def query(x):
        return query_map(x, cos, sin, form=form, scale=scale, free_pairs=free, **options)

    return query, lambda x: key_map(x, cos, sin, free_pairs=free)


def assert_same_with_gradients(ours, exact, leaves, *, outputs=1e-12, gradients=1e-12) -> None:
    """The same output, and of it the same gradients of the leaves, up to these differences."""
    weights = normal(*exact.shape, seed=9)
    options = {"retain_graph": True, "materialize_grads": True}
    found = [(x, *torch.autograd.grad(x, leaves, weights, **options)) for x in (ours, exact)]
    for index, (a, b) in enumerate(zip(*found, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert (a - b).abs().max() <= (gradients if index else outputs)


def operands(
    *, batch=2, heads=4, kv_heads=2, queries=13, keys=29, width=16, value_width=16, free=0, seed=0
) -> list[torch.Tensor]:
    """Queries, key coefficients of collinear and then of free pairs, and values, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [
        draw(batch, heads, queries, width),
        activate(draw(batch, kv_heads, keys, width // 2 + free), width // 2),
        draw(batch, kv_heads, keys, value_width),
    ]


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor):
                bytes_of = x.untyped_storage().nbytes()
                self.elements = max(self.elements, bytes_of // x.element_size())
        return found
