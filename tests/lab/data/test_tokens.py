"""Tokenizers, token arrays and blocks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coca_lab.data import (
    BlockDataset,
    DataError,
    Document,
    load_or_train_tokenizer,
    load_tokenizer,
    token_array,
    train_tokenizer,
)
from conftest import VOCABULARY, some_text


@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_training_is_deterministic_and_within_the_size(tokenizer):
    again = train_tokenizer([Document("a", some_text(3000))], VOCABULARY)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert 257 < len(tokenizer) <= VOCABULARY


def test_saved_and_loaded(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded("alpha1 ß")["input_ids"] == tokenizer("alpha1 ß")["input_ids"]
    assert loaded.eos_token_id == tokenizer.eos_token_id is not None


def test_a_tokenizer_learns_from_the_start_of_an_endless_stream():
    def endless():
        while True:
            yield Document("x", some_text(500))

    assert len(train_tokenizer(endless(), VOCABULARY, max_characters=20_000)) > 257


def test_a_tokenizer_is_trained_once_and_saved_atomically(tokenizer, tmp_path):
    folder = tmp_path / "tokenizer"
    (tmp_path / ".tokenizer.partial").mkdir()  # left by a start that was killed
    (tmp_path / ".tokenizer.partial" / "rubbish").write_text("")
    documents = [Document("a", some_text(3000))]
    first = load_or_train_tokenizer(folder, lambda: documents, VOCABULARY)
    assert first.get_vocab() == tokenizer.get_vocab()
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]
    assert not (folder / "rubbish").exists()

    def never():
        raise AssertionError("trained again")

    assert load_or_train_tokenizer(folder, never, VOCABULARY).get_vocab() == first.get_vocab()


def test_no_tokenizer_and_too_small_a_vocabulary_are_rejected(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="at least 257"):
        train_tokenizer([], 100)


def test_documents_are_joined_by_the_end_of_text(tokenizer):
    array = token_array([Document("a", "alpha"), Document("b", "beta")], tokenizer)
    ends = np.flatnonzero(array == tokenizer.eos_token_id)
    assert len(ends) == 2 and ends[-1] == len(array) - 1
    assert tokenizer.decode(array[: ends[0]]) == "alpha"
    assert tokenizer.decode(array[ends[0] + 1 : ends[1]]) == "beta"
    assert array.dtype == np.uint16


def test_endless_streams_are_truncated(tokenizer):
    def endless():
        number = 0
        while True:
            number += 1
            yield Document(str(number), "alpha beta")

    assert len(token_array(endless(), tokenizer, max_tokens=1000)) == 1000


def test_no_documents_are_rejected(tokenizer):
    with pytest.raises(DataError, match="no documents"):
        token_array([], tokenizer)


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


def test_a_block_of_no_tokens_is_rejected():
    with pytest.raises(ValueError, match="at least 1 token"):
        BlockDataset(np.arange(5, dtype=np.uint16), 0)
