"""Associative recall: texts and blocks.

Passkeys and needles are tested where they are evaluated.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from coca_attention.errors import UserError
from coca_lab.data.tasks import recall_block, recall_text
from coca_lab.evaluation.recall import RecallSettings, read_texts

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
