"""Tokenised text on disk: reused, and never used when outdated, damaged or incomplete."""

import errno
import hashlib
import json
import logging
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest

import coca_lab.data.cache as cache
from coca_attention.errors import UserError
from coca_lab.data import (
    DataError,
    Document,
    SourceSettings,
    cache_folder,
    load_tokenizer,
    token_array,
    tokenise,
    train_tokenizer,
)
from conftest import some_text

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(3):
        (folder / f"{index}.txt").write_text(some_text(200, seed=index))
    return SourceSettings(source=str(folder))


@pytest.fixture
def made(monkeypatch):
    """Counts the caches that are written."""
    counted = []
    write = cache._write

    def counting(*args):
        counted.append(args[0])
        write(*args)

    monkeypatch.setattr(cache, "_write", counting)
    return counted


def in_memory(source, tokenizer, **options):
    return tokenise(source, tokenizer, **options).tokens


def pair(folder: Path) -> tuple[Path, Path]:
    (tokens,) = (folder / "tokens").glob("*.bin")
    return tokens, tokens.with_suffix(".json")


def test_a_cache_is_written_once_and_has_the_tokens_in_memory(source, tokenizer, tmp_path, made):
    expected = token_array(source.documents(), tokenizer)
    for _ in range(2):
        text = tokenise(source, tokenizer, folder=tmp_path / "cache")
        assert isinstance(text.tokens, np.memmap) and text.tokens.dtype == np.uint16
        assert np.array_equal(text.tokens, expected)
        assert text.sha256 == tokenise(source, tokenizer).sha256
    assert len(made) == 1
    left = {path.suffix for path in (tmp_path / "cache" / "tokens").iterdir()}
    assert left <= {".bin", ".json", ".lock"}


def cut(tokens: Path, about: Path) -> None:
    os.truncate(tokens, tokens.stat().st_size - 2)


def change_a_byte(tokens: Path, about: Path) -> None:
    content = bytearray(tokens.read_bytes())
    content[100] ^= 1
    tokens.write_bytes(content)


def lose_tokens(tokens: Path, about: Path) -> None:
    tokens.unlink()


def cut_json(tokens: Path, about: Path) -> None:
    os.truncate(about, 30)


def wrong_json(tokens: Path, about: Path) -> None:
    about.write_text("[]")


def of_another_tokenizer(tokens: Path, about: Path) -> None:
    content = json.loads(about.read_text())
    content["settings"]["tokenizer"] = "0" * 64
    about.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "damage",
    [cut, change_a_byte, lose_tokens, cut_json, wrong_json, of_another_tokenizer],
)
def test_a_damaged_cache_is_rewritten_and_never_used(
    source, tokenizer, tmp_path, made, caplog, damage
):
    expected = in_memory(source, tokenizer)
    tokenise(source, tokenizer, folder=tmp_path)
    damage(*pair(tmp_path))
    text = tokenise(source, tokenizer, folder=tmp_path)
    assert np.array_equal(text.tokens, expected) and len(made) == 2
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "tokenising the text again" in record.getMessage()
    assert np.array_equal(tokenise(source, tokenizer, folder=tmp_path).tokens, expected)
    assert len(made) == 2


def test_changed_source_files_are_noticed_even_with_their_times_set_back(
    source, tokenizer, tmp_path, made, caplog
):
    tokenise(source, tokenizer, folder=tmp_path / "cache")
    file = Path(source.source) / "1.txt"
    before = file.stat()
    file.write_text(file.read_text().replace("alpha", "omega"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    text = tokenise(source, tokenizer, folder=tmp_path / "cache")
    assert np.array_equal(text.tokens, in_memory(source, tokenizer)) and len(made) == 2
    assert "files of the source have changed" in caplog.text
    (Path(source.source) / "3.txt").write_text("one more")
    text = tokenise(source, tokenizer, folder=tmp_path / "cache")
    assert np.array_equal(text.tokens, in_memory(source, tokenizer)) and len(made) == 3


def test_files_that_were_only_touched_are_the_same(source, tokenizer, tmp_path, made):
    tokenise(source, tokenizer, folder=tmp_path / "cache")
    for file in Path(source.source).iterdir():
        os.utime(file, (0, 0))
    tokenise(source, tokenizer, folder=tmp_path / "cache")
    assert len(made) == 1


def test_every_setting_and_tokenizer_has_its_own_cache(source, tokenizer, tmp_path, made):
    other = train_tokenizer([Document("b", "omega psi chi " * 50)], 280)
    for options in ({}, {"share": 0.5}, {"max_tokens": 60}):
        for chosen in (tokenizer, other):
            text = tokenise(source, chosen, folder=tmp_path / "cache", **options)
            assert np.array_equal(text.tokens, in_memory(source, chosen, **options))
    assert len(made) == 6


def test_a_tokenizer_is_the_same_wherever_it_is_loaded_from(tokenizer, tmp_path):
    for name in ("a", "b"):
        tokenizer.save_pretrained(tmp_path / name)
    loaded = load_tokenizer(tmp_path / "a")
    loaded(["a", "a b"], padding=True, truncation=True, max_length=3)
    prints = {
        cache.tokenizer_fingerprint(t) for t in (tokenizer, loaded, load_tokenizer(tmp_path / "b"))
    }
    assert len(prints) == 1
    other = load_tokenizer(tmp_path / "b")
    other.add_tokens(["gamma2"])
    assert cache.tokenizer_fingerprint(other) not in prints


def _killed_while_writing(how, source, tokenizer, folder):
    def kill(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def some(*args, **options):
        yield next(arrays(*args, **options))
        kill()

    arrays = cache.token_arrays
    if how == "tokens":
        cache.token_arrays = some
    else:
        cache.write_json = kill
    tokenise(source, tokenizer, folder=folder)


@pytest.mark.parametrize("how", ["tokens", "json"])
def test_a_cache_is_complete_or_rewritten_after_a_kill(source, tokenizer, tmp_path, how):
    """Killed while writing tokens, and between the two files; the lock is released."""
    arguments = (how, source, tokenizer, tmp_path / "cache")
    process = FORK.Process(target=_killed_while_writing, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    left = {path.suffix for path in (tmp_path / "cache" / "tokens").iterdir()}
    assert left == {".lock", ".partial" if how == "tokens" else ".bin"}
    text = tokenise(source, tokenizer, folder=tmp_path / "cache")
    assert np.array_equal(text.tokens, in_memory(source, tokenizer))
    left = {path.suffix for path in (tmp_path / "cache" / "tokens").iterdir()}
    assert left <= {".lock", ".bin", ".json"}


def test_a_full_disk_is_a_clear_error_and_leaves_no_part(source, tokenizer, tmp_path, monkeypatch):
    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            self.file.write(bytes(data)[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_open(path, mode="r", **options):
        file = open(path, mode, **options)  # noqa: SIM115
        return Full(file) if "w" in mode else file

    monkeypatch.setattr(cache, "open", full_open, raising=False)
    with pytest.raises(UserError, match=r"No space left on device; free disk.* data\.cache") as it:
        tokenise(source, tokenizer, folder=tmp_path / "cache")
    assert "\n" not in str(it.value)
    assert [p.suffix for p in (tmp_path / "cache" / "tokens").iterdir()] in ([], [".lock"])
    monkeypatch.undo()
    text = tokenise(source, tokenizer, folder=tmp_path / "cache")
    assert np.array_equal(text.tokens, in_memory(source, tokenizer))


def test_a_folder_that_cannot_be_written_is_a_clear_error(source, tokenizer, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"cannot be stored here: Not a directory.*data\.cache"):
        tokenise(source, tokenizer, folder=tmp_path / "cache")


def test_a_source_that_cannot_be_read_is_no_fault_of_the_cache(source, tokenizer, tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "a.txt").symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match=r"a\.txt: cannot be read: Input/output error"):
        tokenise(SourceSettings(str(folder)), tokenizer, folder=tmp_path / "cache")


def test_an_empty_source_leaves_no_cache(source, tokenizer, tmp_path):
    with pytest.raises(DataError, match="no documents"):
        tokenise(source, tokenizer, share=1.0, folder=tmp_path / "cache")
    assert not list((tmp_path / "cache" / "tokens").glob("*.[bjp]*"))


def test_a_source_that_changes_while_it_is_read_is_rejected(source, tokenizer, tmp_path):
    class Growing(SourceSettings):
        def documents(self):
            yield from super().documents()
            (Path(self.source) / "0.txt").write_text("another text")

    with pytest.raises(DataError, match="changed while it was being read"):
        tokenise(Growing(source.source), tokenizer, folder=tmp_path / "cache")
    assert not list((tmp_path / "cache" / "tokens").glob("*.[bjp]*"))


def _ask(source, tokenizer, folder, barrier, answers):
    barrier.wait()
    made = []
    write = cache._write
    cache._write = lambda *args: (made.append(1), write(*args))
    text = tokenise(source, tokenizer, folder=folder)
    answers.put((len(made), text.sha256))


def test_concurrent_processes_write_one_cache(source, tokenizer, tmp_path):
    barrier, answers = FORK.Barrier(3), FORK.Queue()
    arguments = (source, tokenizer, tmp_path / "cache", barrier, answers)
    processes = [FORK.Process(target=_ask, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sum(made for made, _ in found) == 1
    assert {sha256 for _, sha256 in found} == {tokenise(source, tokenizer).sha256}


def test_an_endless_source_is_read_only_as_far_as_needed(tokenizer, tmp_path):
    read = []

    class Endless(SourceSettings):
        def documents(self):
            while True:
                read.append(len(read))
                yield Document(str(len(read)), some_text(20, seed=len(read)))

    file = tmp_path / "some.txt"
    file.write_text("x")
    text = tokenise(Endless(str(file)), tokenizer, max_tokens=5000, folder=tmp_path / "cache")
    assert len(text.tokens) == 5000
    assert len(read) < 5000 // 20 + 128


def test_a_dataset_of_hugging_face_is_streamed_into_the_cache_offline(
    tokenizer, tmp_path, made, caplog
):
    pytest.importorskip("datasets")
    folder = tmp_path / "dataset"
    folder.mkdir()
    texts = [some_text(50, seed=index) for index in range(6)]
    lines = [json.dumps({"content": text}) for text in texts]
    (folder / "train.jsonl").write_text("\n".join(lines))
    source = SourceSettings(source=f"hf:{folder}", text_field="content")
    expected = token_array((Document("", text) for text in texts), tokenizer)
    for limit in (None, 100):
        for _ in range(2):
            text = tokenise(source, tokenizer, max_tokens=limit, folder=tmp_path / "cache")
            assert np.array_equal(text.tokens, expected[:limit])
    assert len(made) == 2
    (folder / "train.jsonl").write_text(lines[0])
    text = tokenise(source, tokenizer, folder=tmp_path / "cache")
    assert "files of the source have changed" in caplog.text
    assert len(text.tokens) < len(expected)


def test_the_default_place_follows_xdg(monkeypatch, tmp_path):
    assert cache_folder(None) is None
    assert cache_folder("here") == Path("here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("auto") == tmp_path / "coca-attention"
    for unfit in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unfit)
        assert cache_folder("auto") == Path.home() / ".cache" / "coca-attention"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder("auto") == Path.home() / ".cache" / "coca-attention"


def test_a_file_of_token_ids_is_read_in_place_of_text(tmp_path, tokenizer):
    path, ids = tmp_path / "tokens.npy", np.arange(50, dtype=np.uint16)
    np.save(path, ids)
    text = tokenise(SourceSettings(str(path)), tokenizer, max_tokens=40)
    assert isinstance(text.tokens, np.memmap)
    assert np.array_equal(text.tokens, ids[:40])
    assert text.sha256 == hashlib.sha256(ids[:40].tobytes()).hexdigest()
    with pytest.raises(UserError, match=r"set data\.held_out to 0"):
        tokenise(SourceSettings(str(path)), tokenizer, share=0.1)
    np.save(path, np.array([len(tokenizer)], dtype=np.uint16))
    with pytest.raises(UserError, match="the tokenizer that the file was made with"):
        tokenise(SourceSettings(str(path)), tokenizer)
    for wrong in (ids.astype(float), ids.reshape(5, 10)):
        np.save(path, wrong)
        with pytest.raises(UserError, match="a 1-D array"):
            tokenise(SourceSettings(str(path)), tokenizer)
    path.write_bytes(b"text")
    with pytest.raises(UserError, match="cannot be read"):
        tokenise(SourceSettings(str(path)), tokenizer)
