"""The windows of the perplexity task: golden ones, then properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coca_lab.evaluation.windows import shared_first_target, sliding_windows


def spans(*arguments) -> list[tuple[int, int, int]]:
    return [(w.start, w.stop, w.first_target) for w in sliding_windows(*arguments)]


GOLDEN = {
    # (length, window, stride, first target): (first input, end of inputs, first target) …
    (10, 4, 2, 1): [(0, 2, 1), (0, 4, 3), (2, 6, 5), (4, 8, 7), (5, 9, 9)],
    (10, 4, 4, 1): [(0, 4, 1), (4, 8, 5), (5, 9, 9)],
    (9, 4, 4, 1): [(0, 4, 1), (4, 8, 5)],
    (5, 8, 4, 1): [(0, 4, 1)],
    (2, 8, 4, 1): [(0, 1, 1)],
    (1, 8, 4, 1): [],
    (10, 4, 1, 7): [(3, 7, 7), (4, 8, 8), (5, 9, 9)],
    (12, 8, 4, 5): [(0, 8, 5), (3, 11, 9)],
    (12, 4, 4, 5): [(4, 8, 5), (7, 11, 9)],
}


@pytest.mark.parametrize("arguments", GOLDEN, ids=str)
def test_golden_windows(arguments):
    assert spans(*arguments) == GOLDEN[arguments]


SIZES = st.integers(1, 60).flatmap(
    lambda window: st.tuples(st.just(window), st.integers(1, window))
)


@given(length=st.integers(1, 300), sizes=SIZES, first=st.integers(1, 100))
def test_each_target_exactly_once_with_its_context(length, sizes, first):
    window, stride = sizes
    seen = []
    for w in sliding_windows(length, window, stride, first):
        targets = range(w.first_target, w.stop + 1)
        assert w.start >= 0 and w.stop < length
        assert 1 <= w.inputs <= window and w.targets == len(targets) <= stride
        for target in targets:
            context = target - w.start
            assert context >= min(target, window - stride + 1)
            assert context <= window
        seen += targets
    assert seen == list(range(first, length))


@given(sizes=st.lists(st.integers(8, 64), min_size=1), extra=st.integers(1, 50))
def test_shared_targets_are_the_same_at_every_window(sizes, extra):
    stride = 8
    first = shared_first_target(sizes, stride)
    length = max(sizes) + extra
    runs = []
    for window in sizes:
        found = list(sliding_windows(length, window, stride, first))
        assert all(w.inputs == window for w in found)
        runs.append([(w.first_target, w.stop) for w in found])
    assert all(run == runs[0] for run in runs)
    assert sum(stop + 1 - begin for begin, stop in runs[0]) == length - first


@pytest.mark.parametrize(("window", "stride"), [(0, 1), (4, 0), (4, 5)])
def test_a_stride_longer_than_the_window_is_refused(window, stride):
    with pytest.raises(ValueError, match="the stride must be at least 1 token and at most the"):
        list(sliding_windows(10, window, stride))
