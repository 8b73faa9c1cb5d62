"""Tokenizers, token arrays, and their cache: reused, and never used when outdated or incomplete."""

import hashlib
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, ByT5Tokenizer

import coca_lab.data.text as text_module
from coca_attention.errors import UserError
from coca_lab.data import (
    DataError,
    Document,
    SourceSettings,
    documents_of,
    load_tokenizer,
    tokenise,
    train_tokenizer,
)
from coca_lab.data.text import tokenizer_fingerprint
from coca_lab.files import cache_folder
from coca_lab.recipe import DataRecipe
from conftest import VOCABULARY, some_text

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(3):
        (folder / f"{index}.txt").write_text(some_text(200, seed=index))
    return SourceSettings(source=str(folder))


def cached(tmp_path, source, tokenizer, **options):
    """Tokens from the cache, which are those in memory."""
    tokens = tokenise(source, tokenizer, folder=tmp_path / "cache", **options)
    assert isinstance(tokens, np.memmap)
    assert np.array_equal(tokens, tokenise(source, tokenizer, **options))
    return tokens


def files(tmp_path) -> list[str]:
    """The caches and what is left of others, without their locks."""
    there = (tmp_path / "cache" / "tokens").iterdir()
    return sorted(path.suffix for path in there if path.suffix != ".lock")


@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_an_endless_source_is_read_only_as_far_as_needed(tokenizer, monkeypatch):
    def endless(*_, **__):
        while True:
            read.append(1)
            yield Document(str(len(read)), some_text(500))

    read = []
    monkeypatch.setattr(text_module, "documents_of", endless)
    assert len(tokenise(SourceSettings(), tokenizer, max_tokens=5000)) == 5000
    assert len(read) <= 64
    monkeypatch.setattr(text_module, "TOKENIZER_CHARACTERS", 20_000)
    assert len(train_tokenizer(endless(), VOCABULARY)) > 257


def test_a_tokenizer_learns_from_long_runs_in_time_proportional_to_them():
    """80,000 letters without a break took 100 times as long as 8,000."""
    seconds = []
    for count in (8_000, 80_000):
        dna = "".join(random.Random(0).choices("ACGT", k=count))
        text = f"{'a' * count}\n{' ' * count}{dna}"
        started = time.process_time()
        trained = train_tokenizer([Document("runs", text)], 300)
        seconds.append(time.process_time() - started)
        assert len(trained("a" * 64)["input_ids"]) < 8
    assert seconds[1] < 30 * max(seconds[0], 0.01)


def test_a_tokenizer_is_the_same_whenever_it_is_trained_and_wherever_it_is(tokenizer, tmp_path):
    again = train_tokenizer([Document("a", some_text(3000))], VOCABULARY)
    assert again.get_vocab() == tokenizer.get_vocab() and 257 < len(again) <= VOCABULARY
    assert again("alpha1 ß")["input_ids"] == tokenizer("alpha1 ß")["input_ids"]
    for name in ("a", "b"):
        tokenizer.save_pretrained(tmp_path / name)
    loaded, other = load_tokenizer(tmp_path / "a"), load_tokenizer(tmp_path / "b")
    loaded(["a", "a b"], padding=True, truncation=True, max_length=3)
    assert len({tokenizer_fingerprint(t) for t in (tokenizer, loaded, other, again)}) == 1
    other.add_tokens(["gamma2"])
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(tokenizer)


def test_no_tokenizer_and_too_small_a_vocabulary_are_rejected(tmp_path):
    with pytest.raises(ValueError, match="the folder has no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="at least 257"):
        train_tokenizer([], 100)


@pytest.mark.parametrize("kind", ["gpt_neox", "qwen2", "qwen3", "gemma", "olmo", "cohere"])
def test_no_tokenizer_is_made_up_for_a_type_of_model(kind, tmp_path):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    for settings in (None, {"model_max_length": 2048}):
        if settings is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        with pytest.raises(ValueError, match="the folder has no tokenizer"):
            load_tokenizer(tmp_path)


def test_a_tokenizer_of_bytes_needs_no_vocabulary(tmp_path):
    ByT5Tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)("a").input_ids == [100, 1]


def test_a_damaged_tokenizer_is_refused_with_the_names_of_its_files(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(UserError, match=r"loaded: .*; if tokenizer\.json or .* is damaged"):
        load_tokenizer(tmp_path)


def test_token_ids_and_the_held_out_split_never_change(source, tokenizer):
    texts = [tokenise(source, tokenizer, share=share).data for share in (0.0, 0.5)]
    digests = [hashlib.sha256(text).hexdigest()[:16] for text in texts]
    assert digests == ["1870910e3b4306b3", "42db624929718ff7"]


def test_every_setting_and_tokenizer_has_one_cache(source, tokenizer, tmp_path):
    other = train_tokenizer([Document("b", "omega psi chi " * 50)], 280)
    half = {"share": 0.5}
    for _ in range(2):
        for options in ({}, half, {**half, "from_held_out": True}, {"max_tokens": 60}):
            for chosen in (tokenizer, other):
                assert cached(tmp_path, source, chosen, **options).dtype == np.uint16
        assert files(tmp_path) == [".bin"] * 8


def test_changed_files_are_noticed_even_with_their_times_set_back(source, tokenizer, tmp_path):
    cached(tmp_path, source, tokenizer)
    file = Path(source.source) / "1.txt"
    before = file.stat()
    file.write_text(file.read_text().replace("alpha", "omega"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    cached(tmp_path, source, tokenizer)
    (Path(source.source) / "3.txt").write_text("one more")
    cached(tmp_path, source, tokenizer)
    assert len(files(tmp_path)) == 3


def _killed_while_writing(source, tokenizer, folder):
    def some(*args):
        yield next(arrays(*args))
        os.kill(os.getpid(), signal.SIGKILL)

    arrays = text_module._token_arrays
    text_module._token_arrays = some
    tokenise(source, tokenizer, folder=folder)


def test_a_cache_is_complete_or_written_again_after_a_kill(source, tokenizer, tmp_path):
    arguments = (source, tokenizer, tmp_path / "cache")
    process = FORK.Process(target=_killed_while_writing, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert files(tmp_path) == [".coca-partial"]
    cached(tmp_path, source, tokenizer)
    assert files(tmp_path) == [".bin"]


def test_sources_and_disks_that_fail_leave_no_cache(source, tokenizer, tmp_path, monkeypatch):
    with pytest.raises(DataError, match="no documents"):
        tokenise(source, tokenizer, share=1.0)
    with pytest.raises(DataError, match="no documents"):
        tokenise(source, tokenizer, share=1.0, folder=tmp_path / "cache")

    def growing(*args, **options):
        yield from documents_of(*args, **options)
        (Path(source.source) / "0.txt").write_text("another text")

    with monkeypatch.context() as patched:
        patched.setattr(text_module, "documents_of", growing)
        with pytest.raises(DataError, match="changed while it was being read"):
            tokenise(source, tokenizer, folder=tmp_path / "cache")
    (tmp_path / "file").write_text("a file")
    with pytest.raises(UserError, match=r"cannot be stored here: Not a directory.*data\.cache"):
        tokenise(source, tokenizer, folder=tmp_path / "file")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(text_module, "tqdm", full)
    with pytest.raises(UserError, match=r"No space left on device; free disk.* data\.cache"):
        tokenise(source, tokenizer, folder=tmp_path / "cache")
    assert files(tmp_path) == []


def _ask(source, tokenizer, folder, barrier, answers):
    barrier.wait()
    made, write = [], text_module.tqdm
    text_module.tqdm = lambda *args, **options: made.append(1) or write(*args, **options)
    text = tokenise(source, tokenizer, folder=folder).tobytes()
    answers.put((len(made), text))


def test_concurrent_processes_write_one_cache(source, tokenizer, tmp_path):
    barrier, answers = FORK.Barrier(3), FORK.Queue()
    arguments = (source, tokenizer, tmp_path / "cache", barrier, answers)
    processes = [FORK.Process(target=_ask, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    answered = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sum(made for made, _ in answered) == 1
    assert {text for _, text in answered} == {tokenise(source, tokenizer).tobytes()}


def test_a_dataset_of_hugging_face_is_streamed_into_the_cache_offline(tokenizer, tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    lines = [json.dumps({"content": some_text(50, seed=index)}) for index in range(6)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    source = SourceSettings(source=f"hf:{folder}", text_field="content")
    same = SourceSettings(source=str(folder / "train.jsonl"), text_field="content")
    expected = tokenise(same, tokenizer)
    for limit in (None, 100, None, 100):
        assert np.array_equal(
            cached(tmp_path, source, tokenizer, max_tokens=limit), expected[:limit]
        )
    assert len(files(tmp_path)) == 2
    (folder / "train.jsonl").write_text(lines[0])
    assert len(cached(tmp_path, source, tokenizer)) < len(expected)


def test_the_default_place_follows_xdg(monkeypatch, tmp_path):
    assert DataRecipe(cache=None).token_folder is None
    assert DataRecipe(cache="here").token_folder == Path("here")
    assert DataRecipe().token_folder == cache_folder()
    for setting, base in ((str(tmp_path), tmp_path), ("", Path.home() / ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", setting)
        assert cache_folder() == base / "coca-attention"


def test_a_file_of_token_ids_is_read_in_place_of_text(tmp_path, tokenizer):
    path, ids = tmp_path / "tokens.npy", np.arange(50, dtype=np.uint16)
    source = SourceSettings(str(path))
    np.save(path, ids)
    tokens = tokenise(source, tokenizer, max_tokens=40)
    assert isinstance(tokens, np.memmap) and np.array_equal(tokens, ids[:40])
    with pytest.raises(UserError, match=r"set data\.held_out to 0"):
        tokenise(source, tokenizer, share=0.1)
    for wrong, message in (
        (np.array([len(tokenizer)], dtype=np.uint16), "the tokenizer that the file was made with"),
        (ids.astype(float), "a 1-D array"),
        (ids.reshape(5, 10), "a 1-D array"),
    ):
        np.save(path, wrong)
        with pytest.raises(UserError, match=message):
            tokenise(source, tokenizer)
    path.write_bytes(b"text")
    with pytest.raises(UserError, match="cannot be read"):
        tokenise(source, tokenizer)
