"""Blocks of a text, and of several sources by their shares."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_lab.data.blocks import BlockDataset, apportion, mixture_order


@given(tokens=st.integers(2, 200), length=st.integers(1, 20))
def test_every_token_is_a_target_at_most_once(tokens, length):
    array = np.arange(tokens, dtype=np.uint16)
    if tokens <= length:
        with pytest.raises(ValueError, match="fewer than one block"):
            BlockDataset(array, length)
        return
    dataset = BlockDataset(array, length)
    items = [dataset[i] for i in range(len(dataset))]
    targets = torch.cat([item["shift_labels"] for item in items]).tolist()
    assert targets == list(range(1, len(items) * length + 1))
    assert tokens - 1 - len(targets) < length
    for item in items:
        assert torch.equal(item["input_ids"] + 1, item["shift_labels"])


@settings(max_examples=30)
@given(weights=st.lists(st.floats(0.001, 1), min_size=1, max_size=6), batch=st.integers(1, 50))
def test_shares_hold_after_every_step(weights, batch):
    read = apportion(weights, batch, 60)
    due = np.outer(np.arange(61) * batch, np.array(weights) / sum(weights))
    assert (read.sum(1) == np.arange(61) * batch).all()
    assert (np.diff(read, axis=0) >= 0).all()
    assert (read - due < 1).all()
    if len(weights) == 2:
        assert (abs(read - due) < 1).all()


def test_the_papers_shares_are_exact():
    assert apportion([0.75, 0.25], 256, 100)[-1].tolist() == [19200, 6400]
    assert apportion([0.75, 0.25], 4, 3).tolist() == [[0, 0], [3, 1], [6, 2], [9, 3]]


def test_a_short_source_is_repeated_each_pass_in_a_new_order():
    """75 blocks of a source that has 40, and 25 of one that has 7."""
    read = apportion([0.75, 0.25], 10, 10)
    blocks = mixture_order([40, 7], read, 0).tolist()
    assert len(blocks) == 100
    for first, size, count in ((0, 40, 75), (40, 7, 25)):
        mine = [block for block in blocks if first <= block < first + size]
        assert len(mine) == count
        passes = [mine[start : start + size] for start in range(0, count, size)]
        for one in passes[:-1]:
            assert sorted(one) == list(range(first, first + size))
        assert len(set(passes[-1])) == len(passes[-1])
        assert len({tuple(one) for one in passes}) == len(passes)
    for step in range(10):
        counts = Counter(block < 40 for block in blocks[10 * step : 10 * step + 10])
        assert counts[True] in (7, 8) and counts[False] in (2, 3)
    assert mixture_order([40, 7], read, 0).tolist() == blocks
    assert mixture_order([40, 7], read, 1).tolist() != blocks
