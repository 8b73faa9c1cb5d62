"""The mask of a decay: a view of one vector where positions are consecutive."""

import pytest
import torch

from coca_attention.ops import Rotation, attend


@pytest.mark.parametrize("window", [None, 50, 200])
@pytest.mark.parametrize(("heads", "queries", "keys"), [((4, 4), 300, 300), ((4, 1), 129, 400)])
def test_a_decay_of_consecutive_positions_is_formed_once_for_every_distance(
    heads, queries, keys, window
):
    """And attention is that of the masks that are formed otherwise, gradients included."""
    rotation, formed = Rotation(16, decay=1.5, decay_length=3.0), []
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(2, h, n, 16, generator=generator, dtype=torch.float64).requires_grad_()
        for h, n in ((heads[0], queries), (heads[1], keys), (heads[1], keys))
    ]

    def bias(query_positions, key_positions, dtype):
        found = rotation.bias(query_positions, key_positions, dtype)
        formed.append(found.shape[-2:])
        return found

    def attended(positions, mask=None):
        formed.clear()
        output = attend(
            *tensors, bias=bias, positions=positions, attention_mask=mask, window=window
        )
        return output, *torch.autograd.grad(output.square().sum(), tensors)

    places = torch.tensor([[0], [7]]) + torch.arange(keys)
    expected = attended(None, torch.ones(queries, keys, dtype=torch.bool))
    assert sum(rows * columns for rows, columns in formed) > keys
    for positions in (None, (places[:, keys - queries :], places)):
        for ours, theirs in zip(attended(positions), expected, strict=True):
            assert (ours - theirs).abs().max() <= 1e-12
        assert formed == [(1, keys)]
    torn = places.clone()
    torn[0, keys // 2 :] += 100
    distance = (torn[:, keys - queries :, None] - torn[:, None]).unsqueeze(1)
    causal = distance >= 0
    if window:
        causal &= torch.ones_like(causal).triu(keys - queries - window + 1)
    added = torch.where(causal, rotation.bias(torn[:, keys - queries :], torn).unsqueeze(1), -1e30)
    ours = attended((torn[:, keys - queries :], torn))[0]
    theirs = attend(*tensors, attention_mask=added.double(), is_causal=False)
    assert (ours - theirs).abs().max() <= 1e-6  # `added` is of float32
