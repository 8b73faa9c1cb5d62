"""Reading documents, from good sources and from broken ones."""

import gzip
import json
import lzma
import os

import pyarrow
import pytest

from coca_lab.data import DataError, Document, held_out, read_documents

RECORDS = [{"id": "a", "text": "first"}, {"id": "b", "text": "zweite Zeile: äöü"}]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)
EXPECTED = [Document("a", "first"), Document("b", "zweite Zeile: äöü")]
PACKERS = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pyarrow.compress(data, codec="zstd", asbytes=True),
}


def read(source, **options) -> list[Document]:
    return list(read_documents(str(source), **options))


@pytest.mark.parametrize("packing", PACKERS)
def test_json_lines_with_every_compression(tmp_path, packing):
    path = tmp_path / f"books.jsonl{packing}"
    path.write_bytes(PACKERS[packing](LINES.encode()))
    assert read(path) == EXPECTED


@pytest.mark.parametrize("packing", PACKERS)
def test_text_with_every_compression(tmp_path, packing):
    path = tmp_path / f"book.txt{packing}"
    path.write_bytes(PACKERS[packing]("one\ntwo ä\n".encode()))
    assert read(path) == [Document(str(path), "one\ntwo ä\n")]


def test_parquet(tmp_path):
    import pyarrow.parquet

    path = tmp_path / "books.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)
    assert read(path) == EXPECTED
    with pytest.raises(DataError, match="no column 'body'; its columns: id, text"):
        read(path, text_field="body")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read(path)


def test_a_hugging_face_dataset_is_streamed(tmp_path):
    (tmp_path / "train.jsonl").write_text(LINES)
    assert read(f"hf:{tmp_path}") == EXPECTED
    assert read(f"hf:{tmp_path}:train") == EXPECTED
    with pytest.raises(DataError, match="cannot be opened"):
        read(f"hf:{tmp_path}:validation")
    with pytest.raises(DataError, match="its fields: id, text"):
        read(f"hf:{tmp_path}", text_field="body")
    with pytest.raises(DataError, match="expected hf:NAME"):
        read("hf:a:b:c:d")


def test_folders_and_globs_are_read_in_order(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("B")
    (tmp_path / "deep" / "a.txt").write_text("A")
    (tmp_path / "notes.md").write_text("left alone")
    assert [d.text for d in read(tmp_path)] == ["B", "A"]
    assert [d.text for d in read(tmp_path / "*.txt")] == ["B"]
    assert [d.text for d in read(tmp_path / "**" / "*.txt")] == ["B", "A"]


def test_the_standard_library_is_real_text_in_a_fixed_order():
    documents = read("stdlib")
    ids = [document.id for document in documents]
    assert "argparse.py" in ids and "json/decoder.py" in ids
    assert len(set(ids)) == len(ids)
    assert sum(len(document.text) for document in documents) > 4_000_000
    assert not [name for name in ids if name.startswith(("test/", "site-packages/"))]
    assert ids == [document.id for document in read_documents("stdlib")]


def test_the_split_is_by_document_and_independent_of_order():
    documents = [Document(str(i), f"text {i}") for i in range(2000)]
    chosen = {d.id for d in documents if held_out(d, 0.1)}
    assert chosen == {d.id for d in reversed(documents) if held_out(d, 0.1)}
    assert 150 < len(chosen) < 250
    assert chosen <= {d.id for d in documents if held_out(d, 0.2)}
    assert not any(held_out(d, 0.0) for d in documents)
    assert all(held_out(d, 1.0) for d in documents)


def test_the_split_does_not_depend_on_how_the_path_is_typed(text_folder, monkeypatch):
    whole = [d.text for d in read(text_folder) if held_out(d, 0.4)]
    monkeypatch.chdir(text_folder.parent)
    assert [d.text for d in read(text_folder.name) if held_out(d, 0.4)] == whole
    assert 0 < len(whole) < 12


def test_a_broken_line_is_named_and_fatal_or_skipped(tmp_path):
    path = tmp_path / "books.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "tw\n{"text": "three"}\n')
    with pytest.raises(DataError, match=r"books\.jsonl: line 3: not valid JSON"):
        read(path)
    with pytest.warns(UserWarning, match=r"skipped .*line 3: not valid JSON"):
        found = read(path, bad_lines="skip")
    assert [d.text for d in found] == ["one", "three"]
    assert [d.id for d in found] == [f"{path}:1", f"{path}:4"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1, 2]", "expected a JSON object, got list"),
        ('{"body": "x"}', "no text in field 'text' .fields: 'body'."),
        ('{"text": 5}', "no text in field 'text'"),
        ('{"text": "\\ud800"}', "not valid Unicode"),
    ],
)
def test_lines_without_text_are_rejected(tmp_path, line, message):
    path = tmp_path / "books.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=message):
        read(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "the file is empty"),
        ("empty.jsonl", b"", "the file is empty"),
        ("blank.txt", b" \n\n", "holds no text"),
        ("blank.jsonl", b"\n\n", "no document in the file"),
        ("binary.txt", b"abc\0def\n", "line 1 has a NUL byte"),
        ("latin.txt", "é\n".encode("latin-1"), "not UTF-8 text"),
        ("picture.png", b"\x89PNG", "unknown file type"),
        ("cut.txt.gz", gzip.compress(b"hello" * 999, mtime=0)[:-9], "truncated or damaged"),
        ("cut.txt.xz", lzma.compress(b"hello" * 999)[:-9], "truncated or damaged"),
        ("false.txt.gz", b"not gzip at all", "truncated or damaged"),
        ("false.txt.xz", b"not xz at all", "truncated or damaged"),
        ("false.txt.zst", b"not zstd at all", "cannot be read: ZSTD decompress failed"),
        ("packed.parquet.gz", gzip.compress(b"x", mtime=0), "decompress the file first"),
    ],
)
def test_invalid_files_are_rejected(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        read(path)
    assert str(path) in str(raised.value)


def test_a_truncated_zstandard_file_is_rejected(tmp_path):
    path = tmp_path / "cut.txt.zst"
    lines = "".join(f"line {i}\n" for i in range(99_999)).encode()
    path.write_bytes(PACKERS[".zst"](lines)[:-2000])
    with pytest.raises(DataError, match="Truncated compressed stream"):
        read(path)


def test_the_last_suffix_determines_the_file_type(tmp_path):
    path = tmp_path / "book.txt.jsonl"
    path.write_text(LINES)
    assert read(path) == EXPECTED


def test_a_name_that_is_nothing_but_a_suffix(tmp_path):
    (tmp_path / ".jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    assert read(tmp_path) == EXPECTED


def test_an_id_of_zero_is_an_id(tmp_path):
    path = tmp_path / "books.jsonl"
    path.write_text('{"id": 0, "text": "x"}\n')
    assert read(path)[0].id == "0"


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere", "no such file, folder or glob"), ("nowhere/*.txt", "no such file")],
)
def test_a_missing_source_is_rejected(tmp_path, name, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.symlink_to("nowhere"), "a link that leads nowhere"),
        (lambda path: path.symlink_to(path), "a link that leads nowhere"),
        (os.mkfifo, "a pipe or device"),
    ],
)
def test_what_is_no_file_among_texts_is_named(tmp_path, make, message):
    (tmp_path / "a.txt").write_text("A")
    make(tmp_path / "b.txt")
    for source in (tmp_path, tmp_path / "*.txt", tmp_path / "b.txt"):
        with pytest.raises(DataError, match=f"b.txt: {message}, not a file"):
            read(source)


def test_a_link_to_its_own_folder_repeats_no_text(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("A")
    (tmp_path / "deep" / "up").symlink_to("..")
    for source in (tmp_path, tmp_path / "**" / "*.txt"):
        assert [document.text for document in read(source)] == ["A"]


def test_a_folder_without_text_is_rejected(tmp_path):
    with pytest.raises(DataError, match="no readable file"):
        read(tmp_path)
