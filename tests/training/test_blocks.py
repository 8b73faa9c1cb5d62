"""From a recipe to blocks: mixtures, documents kept apart, processes, going on in the middle."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from coca_attention.training.blocks import (
    check_separable,
    check_sources,
    epochs_read,
    training_blocks,
    training_documents,
    training_texts,
)
from torch.utils.data import DataLoader

from coca_attention.data import BlockDataset, DataError, PasskeyBlocks, read_documents, token_array
from coca_attention.errors import UserError
from coca_attention.training import load_recipe
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
    options = {
        "data.held_out": 0,
        "data.block_length": 16,
        "training.steps": 30,
        "training.global_batch_size": 8,
        "training.micro_batch_size": 2,
        **({} if mixture is None else {"data.mixture": json.dumps(mixture)}),
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return load_recipe(
        None, [w for name, value in options.items() for w in (f"--{name}", str(value))]
    )


def blocks_of(chosen, tokenizer):
    return training_blocks(chosen, training_texts(chosen, tokenizer), tokenizer)


def test_one_source_gives_the_blocks_it_always_gave(text_folder, tokenizer, tmp_path):
    """Cached or not: the consecutive blocks of the joined documents, in order, in whole batches."""
    tokens = token_array(read_documents(str(text_folder)), tokenizer)
    expected = BlockDataset(tokens, 16)
    for cache in (str(tmp_path), "null"):
        chosen = recipe(data__source=text_folder, data__cache=cache)
        texts = training_texts(chosen, tokenizer)
        assert texts["text"].sha256 == hashlib.sha256(tokens.data).hexdigest()
        assert isinstance(texts["text"].tokens, np.memmap) == (cache != "null")
        found = training_blocks(chosen, texts, tokenizer)
        assert len(found) == len(expected) // 8 * 8
        for index in range(len(found)):
            item = found[index]
            assert item.keys() == {"input_ids", "labels", "shift_labels"}
            assert torch.equal(item["shift_labels"], expected[index]["shift_labels"])


def test_a_mixture_has_the_shares_of_its_recipe(sources, tokenizer):
    chosen = recipe(sources)
    found = blocks_of(chosen, tokenizer)
    assert len(found) == 30 * 8
    z = tokenizer("zz", add_special_tokens=False)["input_ids"][-1]
    code = [bool((found[index]["input_ids"] == z).any()) for index in range(len(found))]
    assert sum(code) == 60
    assert all(sum(code[step * 8 : step * 8 + 8]) == 2 for step in range(30))
    epochs = epochs_read(chosen, found)
    assert list(epochs) == ["text", "code"]
    assert epochs["code"] > 2 > 1 > epochs["text"] > 0


def test_passkey_texts_take_their_share_of_a_mixture(sources, tokenizer):
    chosen = recipe(sources, data__block_length=300, data__passkey_share=0.5)
    found = blocks_of(chosen, tokenizer)
    epochs = epochs_read(chosen, found)
    assert list(epochs) == ["text", "code", "passkey"] and epochs["passkey"] == 1.0
    assert isinstance(found.sources[2], PasskeyBlocks)
    assert found.read[-1].tolist() == [90, 30, 120]


def test_a_stream_in_a_mixture_is_read_as_far_as_its_share_asks(sources, tokenizer, tmp_path):
    pytest.importorskip("datasets")
    folder = tmp_path / "dataset"
    folder.mkdir()
    lines = [json.dumps({"text": some_text(100, seed=i)}) for i in range(100)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    sources["text"]["source"] = f"hf:{folder}"
    texts = training_texts(recipe(sources), tokenizer)
    assert len(texts["text"].tokens) == 180 * 16 + 1
    sources["text"]["max_tokens"] = 100
    assert len(training_texts(recipe(sources), tokenizer)["text"].tokens) == 100


def test_a_tokenizer_sees_every_source(sources, monkeypatch):
    monkeypatch.setattr("coca_attention.training.blocks.TOKENIZER_CHARACTERS", 400)
    texts = [document.text for document in training_documents(recipe(sources).data)]
    assert len(texts) == 1 + 2  # up to 300 characters of one, 100 of the other
    assert "alpha" in texts[0] and texts[1].startswith("zz")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"code": {"weight": 0.2}}, r"must sum to 1, got 0\.75 \+ 0\.2 = 0\.95"),
        ({"code": {"weight": 0}}, r"data\.mixture\.code needs a weight above 0"),
        ({"code": {"weight": -0.25}}, r"data\.mixture\.code needs a weight above 0"),
        ({"code": {"source": ""}}, r"data\.mixture\.code names no source"),
        ({"code": {"sauce": "x"}}, r"sauce"),
        ({"code": {"max_tokens": 0}}, r"max_tokens must be at least 1"),
    ],
)
def test_unfit_mixtures_are_refused(sources, change, message):
    for name, fields in change.items():
        sources[name].update(fields)
    with pytest.raises(UserError, match=message) as raised:
        recipe(sources)
    assert "\n" not in str(raised.value)


def test_a_mixture_beside_one_source_is_refused(sources):
    with pytest.raises(UserError, match=r"data\.source is given beside data\.mixture"):
        recipe(sources, data__source="books")
    with pytest.raises(UserError, match=r"data\.max_tokens is given beside data\.mixture"):
        recipe(sources, data__max_tokens=10)


def test_weights_that_sum_to_1_but_for_rounding_are_taken(sources):
    sources["text"]["weight"] = 0.7500004
    assert recipe(sources).data.mixture["text"].weight == 0.7500004


def test_missing_and_empty_sources_are_refused_by_name(sources, tokenizer, tmp_path):
    sources["code"]["source"] = str(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"data\.mixture\.code: .*nowhere: no such file"):
        check_sources(recipe(sources))
    (tmp_path / "empty.jsonl").write_text("")
    sources["code"]["source"] = str(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match=r"data\.mixture\.code: .*the file is empty"):
        training_texts(recipe(sources), tokenizer)
    with pytest.raises(DataError, match=r"data\.mixture\.code: .*the file is empty"):
        list(training_documents(recipe(sources).data))
    (tmp_path / "short.txt").write_text("few")
    sources["code"]["source"] = str(tmp_path / "short.txt")
    with pytest.raises(UserError, match=r"code: the training text has .* fewer than one block"):
        blocks_of(recipe(sources), tokenizer)


def batches(dataset, processes: int, process: int, skipped: int = 0) -> list[list[list[int]]]:
    """What Accelerate hands one of several processes: its batches of 2 blocks, as token ids."""
    loader = prepare_data_loader(
        DataLoader(dataset, batch_size=8 // processes, drop_last=True),
        num_processes=processes,
        process_index=process,
        put_on_device=False,
    )
    loader = skip_first_batches(loader, skipped) if skipped else loader
    return [batch["input_ids"].tolist() for batch in loader]


def test_processes_read_disjoint_parts_of_the_same_global_batch(sources, tokenizer):
    found = blocks_of(recipe(sources), tokenizer)
    one = batches(found, 1, 0)
    parts = [batches(found, 2, process) for process in range(2)]
    assert len(one) == len(parts[0]) == len(parts[1]) == 30
    for step, whole in enumerate(one):
        assert parts[0][step] + parts[1][step] == whole


def test_going_on_in_the_middle_begins_with_the_very_next_block(sources, tokenizer):
    found = blocks_of(recipe(sources), tokenizer)
    again = blocks_of(recipe(sources), tokenizer)  # as a new start makes it
    assert batches(again, 1, 0, skipped=13) == batches(found, 1, 0)[13:]
    assert batches(again, 2, 1, skipped=13) == batches(found, 2, 1)[13:]


def test_positions_begin_anew_and_no_target_crosses_a_border():
    end = 9
    tokens = np.array([1, 2, end, 3, end, end, 4, 5, 6, 7], dtype=np.uint16)
    item = BlockDataset(tokens, 9, end=end)[0]
    assert item["input_ids"].tolist() == [1, 2, 9, 3, 9, 9, 4, 5, 6]
    assert item["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 0, 1, 2]
    assert item["shift_labels"].tolist() == [2, 9, -100, 9, -100, -100, 5, 6, 7]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_document_in_a_packed_block_is_read_as_if_alone(kind, text_folder, tokenizer):
    """Logits and gradients of every document of real blocks equal those of the document alone."""
    model = tiny_model(kind).train()
    documents = [text[:9] for text in (some_text(30, seed=i) for i in range(8))]
    end = tokenizer.eos_token_id
    pieces = [[*tokenizer(text, add_special_tokens=False)["input_ids"], end] for text in documents]
    tokens = np.array([token for piece in pieces for token in piece], dtype=np.uint16)
    length = (len(tokens) - 1) // 2
    dataset = BlockDataset(tokens, length, end=end)
    batch = {name: torch.stack([dataset[0][name], dataset[1][name]]) for name in dataset[0]}
    # As Trainer calls it: no mask, no cache.
    packed = model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
    )
    checked = 0
    for row in range(2):
        starts = (batch["position_ids"][row] == 0).nonzero().flatten().tolist()
        for start, stop in zip(starts, [*starts[1:], length], strict=True):
            alone = model(input_ids=batch["input_ids"][row : row + 1, start:stop], use_cache=False)
            found = packed.logits[row : row + 1, start:stop]
            assert torch.allclose(found, alone.logits, atol=2e-4, rtol=1e-4)
            checked += start > 0
    assert checked >= 4
    joined = model(input_ids=batch["input_ids"], use_cache=False).logits
    assert (joined - packed.logits).abs().max() > 0.1  # it would have made a difference


@pytest.mark.parametrize("kind", CONFIGS)
def test_models_that_keep_documents_apart_pass_the_check(kind):
    model = tiny_model(kind).train()
    check_separable(model)
    assert model.training


def test_a_model_that_does_not_keep_documents_apart_is_refused():
    model = tiny_model("rope")
    forward = model.forward

    def deaf(input_ids, position_ids=None, **options):
        return forward(input_ids=input_ids, **options)

    model.forward = deaf
    with pytest.raises(UserError, match="GPTNeoXForCausalLM does not keep documents apart"):
        check_separable(model)


def test_passkey_blocks_can_be_kept_apart_too(tokenizer):
    item = PasskeyBlocks(tokenizer, 900, 3, seed=0, separate=True)[0]
    ends = (item["input_ids"] == tokenizer.eos_token_id).nonzero().flatten()
    assert len(ends) and (item["shift_labels"][ends] == -100).all()
    assert (item["position_ids"][ends[:-1] + 1] == 0).all()


def test_a_cache_is_not_made_twice_by_two_recipes_of_one_text(text_folder, tokenizer, tmp_path):
    folder = tmp_path / "cache"
    for steps in (5, 9):
        training_texts(
            recipe(data__source=text_folder, data__cache=folder, training__steps=steps), tokenizer
        )
    assert len(list(Path(folder, "tokens").glob("*.bin"))) == 1
    shutil.rmtree(folder)
