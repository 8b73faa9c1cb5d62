"""From a recipe to blocks: mixtures, documents kept apart, several processes, resuming."""

import hashlib
import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import runs
from coca_attention.errors import UserError
from coca_lab.data import DataError, SourceSettings, tokenise
from coca_lab.training import BlockDataset
from coca_lab.training.model import check_separable
from coca_lab.training.texts import (
    TaskBlocks,
    apportion,
    inputs_of,
    load_run_tokenizer,
    mixture_order,
    spread_evenly,
    training_documents,
)
from conftest import CONFIGS, some_text, tiny_model


@pytest.fixture
def sources(text_folder, tmp_path):
    """A long source and a short one whose text is all the letter z."""
    code = tmp_path / "code.jsonl"
    lines = [json.dumps({"content": " ".join(["zz"] * 30 + [str(i)])}) for i in range(4)]
    code.write_text("\n".join(lines))
    return {
        "text": {"source": str(text_folder), "weight": 0.75},
        "code": {"source": str(code), "text_field": "content", "weight": 0.25},
    }


def recipe(mixture=None, **changes):
    options = {"data__held_out": 0, "validation__every": "null", "training__steps": 30}
    if mixture is not None:
        options["data__mixture"] = json.dumps(mixture)
    options |= {"training__global_batch_size": 8, **changes}
    return runs.recipe(options.pop("data__source", "stdlib"), **options)


def test_one_source_gives_consecutive_blocks_in_whole_batches(text_folder, tokenizer, tmp_path):
    """With and without a cache, which recipes with the same text share."""
    tokens = tokenise(SourceSettings(str(text_folder)), tokenizer)
    expected = BlockDataset(tokens, 16)
    for cache, steps in ((str(tmp_path), 30), (str(tmp_path), 9), ("null", 30)):
        chosen = recipe(data__source=text_folder, data__cache=cache, training__steps=steps)
        data = runs.data_of(chosen, tokenizer)
        sha256 = hashlib.sha256(tokens.data).hexdigest()
        assert data.fingerprint == {"text": {"tokens": len(tokens), "sha256": sha256}}
        (found,) = data.stages
        assert isinstance(found.dataset.datasets[0].tokens, np.memmap) == (cache != "null")
        assert data.validation is None
        assert data.epochs == {"text": steps * 8 / len(found)}
        assert len(found) == len(expected) // 8 * 8
        for item, other in zip(found, expected, strict=False):
            assert item.keys() == {"input_ids", "labels", "shift_labels"}
            assert torch.equal(item["shift_labels"], other["shift_labels"])
    assert len(list((tmp_path / "tokens").glob("*.bin"))) == 1


def test_a_mixture_has_the_shares_of_its_recipe(sources, tokenizer):
    """In every step, with those of passkey texts."""
    data = runs.data_of(recipe(sources, data__block_length=300, data__passkey_share=0.5), tokenizer)
    found = data.stages[0]
    assert len(found) == 30 * 8
    assert isinstance(found.dataset.datasets[2], TaskBlocks)
    source = np.searchsorted(found.dataset.cumulative_sizes, found.indices, side="right")
    assert [np.bincount(step).tolist() for step in source.reshape(30, 8)] == [[3, 1, 4]] * 30
    z = tokenizer("zz", add_special_tokens=False)["input_ids"][-1]
    code = [(block["input_ids"] == z).float().mean().item() > 0.2 for block in found]
    assert code == (source == 1).tolist()
    text, code, _ = map(len, found.dataset.datasets)
    assert data.epochs == {"text": 90 / text, "code": 30 / code, "passkey": 1.0}
    assert list(data.epochs)[:2] == list(data.fingerprint) == ["text", "code"]


def test_a_stream_in_a_mixture_is_read_as_far_as_its_share_needs(sources, tokenizer, tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    lines = [json.dumps({"text": some_text(100, seed=i)}) for i in range(100)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    sources["text"]["source"] = f"hf:{folder}"
    for limit, expected in ((None, 180 * 16 + 1), (100, 100)):
        sources["text"]["max_tokens"] = limit
        data = runs.data_of(recipe(sources), tokenizer)
        assert data.fingerprint["text"]["tokens"] == expected


def test_a_tokenizer_sees_every_source(sources, monkeypatch):
    monkeypatch.setattr("coca_lab.training.texts.TOKENIZER_CHARACTERS", 400)
    texts = [document.text for document in training_documents(recipe(sources))]
    assert len(texts) == 1 + 2  # up to 300 characters of one, 100 of the other
    assert "alpha" in texts[0] and texts[1].startswith("zz")


def test_missing_and_empty_sources_are_rejected_by_name(sources, tokenizer, tmp_path):
    sources["code"]["source"] = str(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"data\.mixture\.code: .*nowhere: no such file"):
        inputs_of(recipe(sources))
    (tmp_path / "empty.jsonl").write_text("")
    sources["code"]["source"] = str(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match=r"data\.mixture\.code: .*the file is empty"):
        runs.data_of(recipe(sources), tokenizer)
    with pytest.raises(DataError, match=r"data\.mixture\.code: .*the file is empty"):
        list(training_documents(recipe(sources)))
    none = recipe(data__source=tmp_path / "code.jsonl", data__held_out=1e-9, validation__every=1)
    none.data.text_field = "content"
    with pytest.raises(DataError, match=r"data\.held_out: no documents"):
        runs.data_of(none, tokenizer)
    (tmp_path / "short.txt").write_text("few")
    sources["code"]["source"] = str(tmp_path / "short.txt")
    with pytest.raises(DataError, match=r"code: the text has .* fewer than one block"):
        runs.data_of(recipe(sources), tokenizer)


def test_a_tokenizer_is_trained_once_and_saved_whole(text_folder, tmp_path, monkeypatch):
    (tmp_path / ".tokenizer.coca-partial").mkdir()  # left by a start that was killed
    (tmp_path / ".tokenizer.coca-partial" / "rubbish").write_text("")
    chosen = recipe(data__source=text_folder, data__vocab_size=300)
    first = load_run_tokenizer(chosen, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]
    assert not (tmp_path / "tokenizer" / "rubbish").exists()
    monkeypatch.setattr("coca_lab.training.texts.train_tokenizer", None)
    assert load_run_tokenizer(chosen, tmp_path).get_vocab() == first.get_vocab()


def test_positions_restart_and_no_target_crosses_a_border(tokenizer):
    end = 9
    tokens = np.array([1, 2, end, 3, end, end, 4, 5, 6, 7], dtype=np.uint16)
    item = BlockDataset(tokens, 9, end=end)[0]
    assert item["input_ids"].tolist() == [1, 2, 9, 3, 9, 9, 4, 5, 6]
    assert item["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 0, 1, 2]
    assert item["shift_labels"].tolist() == [2, 9, -100, 9, -100, -100, 5, 6, 7]
    item = TaskBlocks("passkey", tokenizer, 900, 3, 0, separate=True)[0]
    ends = (item["input_ids"] == tokenizer.eos_token_id).nonzero().flatten()
    assert len(ends) and (item["shift_labels"][ends] == -100).all()
    assert (item["position_ids"][ends[:-1] + 1] == 0).all()


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_document_in_a_packed_block_is_read_as_if_alone(kind, tokenizer):
    """Two blocks in a batch, as Trainer calls it: no mask, no cache."""
    model = tiny_model(kind).train()
    check_separable(model)
    assert model.training
    end = tokenizer.eos_token_id
    texts = tokenizer([some_text(30, seed=i)[:9] for i in range(4)], add_special_tokens=False)
    pieces = [[*ids, end] for ids in texts["input_ids"]]
    orders = [pieces, pieces[::-1]]
    length = sum(map(len, pieces)) - 1  # the last token is a target alone
    tokens = [np.concatenate(order).astype(np.uint16) for order in orders]
    blocks = [BlockDataset(each, length, end=end)[0] for each in tokens]
    ids, places = (torch.stack([b[n] for b in blocks]) for n in ("input_ids", "position_ids"))
    packed = model(input_ids=ids, position_ids=places, use_cache=False).logits
    for row, order, found in zip(ids, orders, packed, strict=True):
        parts = row.tensor_split(np.cumsum([len(piece) for piece in order[:-1]]).tolist())
        alone = [model(input_ids=part[None], use_cache=False).logits[0] for part in parts]
        torch.testing.assert_close(found, torch.cat(alone), atol=2e-4, rtol=1e-4)
    joined = model(input_ids=ids, use_cache=False).logits
    assert (joined - packed).abs().max() > 0.1  # it would have made a difference


def test_a_model_that_does_not_keep_documents_apart_is_rejected():
    model = tiny_model("rope")
    forward = model.forward

    def deaf(input_ids, position_ids=None, **options):
        return forward(input_ids=input_ids, **options)

    model.forward = deaf
    with pytest.raises(UserError, match="GPTNeoXForCausalLM does not keep documents apart"):
        check_separable(model)


# Blocks and orders


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


def test_blocks_to_validate_on_are_spread_over_the_text(caplog):
    blocks = BlockDataset(np.arange(101, dtype=np.uint16), 10)
    assert list(spread_evenly(blocks, 4).indices) == [0, 2, 5, 7]
    assert not caplog.text


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
