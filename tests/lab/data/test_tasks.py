"""Blocks of a text and of several sources by their shares; associative recall: texts and blocks.

Passkeys and needles are tested where they are evaluated.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_attention.errors import UserError
from coca_lab.data.tasks import recall_block, recall_text, recall_vocabulary
from coca_lab.evaluation.recall import RecallSettings, read_texts
from coca_lab.training.texts import (
    BlockDataset,
    TaskBlocks,
    apportion,
    mixture_order,
    spread_evenly,
)

VOCABULARY = range(10, 210)


def text(pairs, length, seed=0):
    return recall_text(VOCABULARY, pairs, length, np.random.default_rng(seed))


@pytest.mark.parametrize(("pairs", "length"), [(1, 4), (4, 16), (4, 17), (32, 256), (16, 1000)])
def test_every_pair_is_asked_for_once_and_answered_by_its_value(pairs, length):
    for seed in range(20):
        found = text(pairs, length, seed)
        ids, values = found.ids, dict(found.ids[: 2 * pairs].reshape(-1, 2).tolist())
        assert len(ids) == length and len(values) == pairs and set(ids) <= set(VOCABULARY)
        assert max(values) < VOCABULARY[100] <= min(values.values())
        assert [values[key] for key in ids[found.answers - 1]] == ids[found.answers].tolist()
        # A key stands at its pair and at its query alone.
        assert np.isin(ids, list(values)).sum() == 2 * pairs
        assert found.answers.min() > 2 * pairs and (np.diff(found.answers) > 0).all()
        places = found.answers - found.distances
        assert (places % 2 == 1).all() and (ids[places] == ids[found.answers]).all()
        assert (ids[places - 1] == ids[found.answers - 1]).all()


def test_queries_are_spread_evenly():
    places = np.concatenate([text(8, 816, seed).answers for seed in range(500)]) - 16
    quarters = np.bincount(places * 4 // 801, minlength=4)
    assert (abs(quarters / 1000 - 1) < 0.1).all()


def test_too_short_texts_are_refused():
    with pytest.raises(UserError, match="5 pairs needs at least 20 tokens"):
        text(5, 19)
    with pytest.raises(UserError, match="a vocabulary of 202; got 404 and 200"):
        text(101, 404)
    with pytest.raises(UserError, match="choose a block_length of at least 16"):
        recall_block(VOCABULARY, 0, 15, (0, 0))


def test_blocks_have_texts_of_many_lengths_and_loads_and_mark_the_answers():
    counts = []
    for index in range(40):
        block, answers = recall_block(VOCABULARY, 0, 257, (7, index))
        assert len(block) == 257
        assert (recall_block(VOCABULARY, 0, 257, (7, index))[0] == block).all()
        texts = (np.split(x, np.flatnonzero(block == 0)) for x in (block, answers))
        for part, marks in zip(*texts, strict=True):
            part, marks = part[part > 0], marks[part > 0]
            values = dict(part[: 2 * marks.sum()].reshape(-1, 2).tolist())
            keys = part[np.flatnonzero(marks) - 1]
            assert [values[key] for key in keys] == part[marks].tolist()
            counts += [len(keys)] * bool(len(part))
    assert min(counts) == 4 and 25 < max(counts) <= 32 and len(counts) > 60


def test_answers_alone_are_trained(tokenizer):
    item = TaskBlocks("recall", tokenizer, 64, 3, 5)[1]
    vocabulary = recall_vocabulary(tokenizer)
    block, answers = recall_block(vocabulary, tokenizer.eos_token_id, 65, (5, 1))
    assert item["input_ids"].tolist() == block[:-1].tolist()
    targets = item["shift_labels"]
    assert targets[targets != -100].tolist() == block[answers].tolist()
    assert ((targets != -100).numpy() == answers[1:]).all()
    assert tokenizer.eos_token_id not in vocabulary


def test_accuracy_is_counted_by_octave_of_distance():
    class Oracle:
        """Knows the answers of distances below a limit."""

        device = "cpu"

        def __init__(self, limit):
            self.limit = limit

        def __call__(self, input_ids, use_cache):
            self.logits = torch.zeros(*input_ids.shape, 300)
            for row, ids in enumerate(input_ids.tolist()):
                for place, token in enumerate(ids[:-1]):
                    earlier = ids.index(token)
                    if earlier < place < earlier + self.limit:
                        self.logits[row, place, ids[earlier + 1]] = 1
            return self

    vocabulary = list(range(1, 250))
    settings = RecallSettings(samples=70, seed=1, batch_tokens=300)
    found = read_texts(Oracle(10**6), vocabulary, 128, 4, settings)
    assert [sum(counts) for counts in zip(*found.values(), strict=True)] == [280, 280]
    near = read_texts(Oracle(32), vocabulary, 128, 4, replace(settings, batch_tokens=8192))
    for octave, (asked, right) in near.items():
        assert right == (asked if int(octave) < 32 else 0)
        assert asked == found[octave][0]


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


def test_blocks_to_validate_on_are_spread_over_the_text():
    blocks = BlockDataset(np.arange(101, dtype=np.uint16), 10)
    assert list(spread_evenly(blocks, 4).indices) == [0, 2, 5, 7]


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
    equal = mixture_order([9, 9], apportion([0.5, 0.5], 2, 9), 0)
    assert (equal[equal < 9] != equal[equal >= 9] - 9).any()  # sources have orders of their own
    assert mixture_order([40, 7], read, 0).tolist() == blocks
    assert mixture_order([40, 7], read, 1).tolist() != blocks
