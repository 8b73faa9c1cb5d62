"""Blocks of several sources by their shares."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_lab.data import Mixture, apportion


@settings(max_examples=30)
@given(
    weights=st.lists(st.floats(0.001, 1), min_size=1, max_size=6),
    batch=st.integers(1, 50),
)
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


def mixture(seed: int = 0) -> Mixture:
    """75 blocks of a source that has 40, and 25 of one that has 7."""
    names = [[f"text {i}" for i in range(40)], [f"code {i}" for i in range(7)]]
    return Mixture(names, apportion([0.75, 0.25], 10, 10), seed)


def test_a_short_source_is_repeated_each_pass_in_a_new_order():
    blocks = [mixture()[index] for index in range(len(mixture()))]
    assert len(blocks) == 100
    for name, size, count in (("text", 40, 75), ("code", 7, 25)):
        mine = [block for block in blocks if block.startswith(name)]
        assert len(mine) == count
        passes = [mine[start : start + size] for start in range(0, count, size)]
        for one in passes[:-1]:
            assert sorted(one) == sorted(f"{name} {i}" for i in range(size))
        assert len(set(passes[-1])) == len(passes[-1])
        assert len({tuple(one) for one in passes}) == len(passes)
    assert mixture().epochs() == [75 / 40, 25 / 7]
    for step in range(10):
        counts = Counter(block.split()[0] for block in blocks[10 * step : 10 * step + 10])
        assert counts["text"] in (7, 8) and counts["code"] in (2, 3)


def test_the_order_depends_on_the_seed_only():
    blocks = [mixture()[index] for index in range(100)]
    other = mixture()
    assert [other[index] for index in reversed(range(100))] == blocks[::-1]
    assert [mixture(seed=1)[index] for index in range(100)] != blocks
    with pytest.raises(IndexError):
        other[100]
