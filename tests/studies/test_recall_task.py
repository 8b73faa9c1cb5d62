"""Associative recall: its texts and blocks, how it is trained on, evaluated and reported."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import runs
from coca_attention.errors import UserError
from coca_lab.data.tasks import TRAINED_TASKS, register_blocks
from coca_lab.evaluation import TASKS
from coca_lab.settings.evaluations import TASK_OPTIONS
from coca_lab.studies import load_study, run_study
from coca_lab.training.texts import TaskBlocks
from commands import run
from studies.recall.task import RecallSettings, read_texts
from studies.recall.texts import recall_block, recall_text, recall_vocabulary

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
    with pytest.raises(UserError, match="choose a `block_length` of at least 16"):
        recall_block(VOCABULARY, 0, 15, (0, 0))


def test_blocks_have_texts_of_many_lengths_and_loads_and_mark_the_answers():
    counts = []
    for index in range(40):
        made = recall_block(VOCABULARY, 0, 257, (7, index))
        block, answers = made.ids, made.trained
        assert len(block) == 257
        assert (recall_block(VOCABULARY, 0, 257, (7, index)).ids == block).all()
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


def test_recall_takes_its_share_of_the_blocks_of_a_text(text_folder, tokenizer):
    recipe = runs.recipe(
        text_folder,
        data__tasks="{recall: 0.4}",
        data__block_length=32,
        data__held_out=0,
        validation__every="null",
        training__steps=30,
        training__global_batch_size=8,
    )
    blocks = runs.data_of(recipe, tokenizer).stages[0]
    masked = [bool((blocks[i]["shift_labels"] == -100).any()) for i in range(len(blocks))]
    assert abs(np.mean(masked) - 0.4) < 0.02


def test_answers_alone_are_trained(tokenizer):
    item = TaskBlocks("recall", tokenizer, 64, 3, 5)[1]
    vocabulary = recall_vocabulary(tokenizer)
    made = recall_block(vocabulary, tokenizer.eos_token_id, 65, (5, 1))
    block, answers = made.ids, made.trained
    assert item["input_ids"].tolist() == block[:-1].tolist()
    targets = item["shift_labels"]
    assert targets[targets != -100].tolist() == block[answers].tolist()
    assert ((targets != -100).numpy() == answers[1:]).all()
    assert tokenizer.eos_token_id not in vocabulary


def test_recall_is_measured_by_length_and_pairs(capsys, model_folder, tmp_path):
    words = ["eval", "recall", model_folder, "--output", tmp_path / "r.json", "--samples=3"]
    code, said, error = run(capsys, *words, "--lengths=20,40", "--pairs=4,8", "--name=tiny")
    assert code == 0, error
    cells = json.loads((tmp_path / "r.json").read_text())["results"]
    assert [(c["length"], c["pairs"], c["asked"]) for c in cells] == [
        (20, 4, 12), (40, 4, 12), (40, 8, 24)
    ]  # fmt: skip
    for cell in cells:
        assert cell["right"] == sum(right for _, right in cell["octaves"].values())
        assert cell["accuracy"] == cell["right"] / cell["asked"]
    assert said.count("share of questions answered at") == 2 and "tiny" in said
    assert "8 pairs" in said
    # The same as a section of a study.
    section = "recall: {lengths: [20, 40], pairs: [4, 8], samples: 3}"
    (tmp_path / "study.yaml").write_text(f"models: {{tiny: {model_folder}}}\n{section}")
    results = run_study(load_study(tmp_path / "study.yaml"), tmp_path / "study")
    for cell, same in zip(json.loads(results.read_text())["results"], cells, strict=True):
        assert cell | same | {"seconds": cell["seconds"]} == cell
    assert "questions answered" in (tmp_path / "study" / "report.html").read_text()
    code, _, error = run(capsys, *words, "--lengths=15,40", "--pairs=4,8")
    assert code == 2 and "texts of 15 tokens have no room for 4 pairs, which take 16" in error


def test_a_recipe_a_study_and_a_command_say_where_recall_is(monkeypatch, capsys, model_folder):
    monkeypatch.delitem(TASKS, "recall")
    monkeypatch.delitem(TASK_OPTIONS, "recall")
    monkeypatch.delitem(TRAINED_TASKS, "recall")
    for words in (["eval", "recall", model_folder], ["study", "recall"], ["train", "recall"]):
        code, _, error = run(capsys, *words)
        assert code == 2 and "set COCA_IMPORT=studies.recall PYTHONPATH=." in error


def test_names_are_taken_once():
    with pytest.raises(UserError, match="already a task to train on named 'passkey'"):
        register_blocks("passkey", lambda tokenizer: None)
