"""Reading documents, from good sources and from broken ones."""

import gzip
import json
import lzma
import os

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from coca_lab.data import DataError, Document, held_out, read_documents
from coca_lab.data.documents import text_fingerprint

RECORDS = [{"id": "a", "text": "first"}, {"id": "b", "text": "zweite Zeile: äöü"}]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)
EXPECTED = [Document("a", "first"), Document("b", "zweite Zeile: äöü")]
PACKERS = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pyarrow.compress(data, codec="zstd", asbytes=True),
}
# A frame of one raw block, "hello", whose header asks for a window of 256 MiB (RFC 8878).
WIDE_FRAME = bytes.fromhex("28b52ffd 00 90 290000") + b"hello"


def read(source, **options) -> list[Document]:
    return list(read_documents(str(source), **options))


@pytest.mark.parametrize("packing", PACKERS)
def test_lines_and_texts_with_every_compression(tmp_path, packing):
    """The last suffix before that of the compression determines the type."""
    for name in ("a.jsonl", "book.txt.jsonl", ".jsonl"):
        path = tmp_path / f"{name}{packing}"
        path.write_bytes(PACKERS[packing](LINES.encode()))
        assert read(path) == EXPECTED
    path = tmp_path / f"book.txt{packing}"
    path.write_bytes(PACKERS[packing]("one\ntwo ä\n".encode()))
    assert read(path) == [Document(str(path), "one\ntwo ä\n")]


def test_parquet(tmp_path):
    path = tmp_path / "books.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)
    assert read(path) == EXPECTED
    with pytest.raises(DataError, match=r"no text in field 'body' .fields: 'id', 'text'"):
        read(path, text_field="body")
    numbers = tmp_path / "numbers.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": 5}]), numbers)
    with pytest.raises(DataError, match=r"'text': expected a string, got int"):
        read(numbers)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read(path)


def test_a_hugging_face_dataset_is_streamed(tmp_path):
    (tmp_path / "train.jsonl").write_text(LINES)
    assert read(f"hf:{tmp_path}") == read(f"hf:{tmp_path}:train") == EXPECTED
    with pytest.raises(DataError, match=r"reading failed after 0 rows.*check its name"):
        read(f"hf:{tmp_path}:validation")
    with pytest.raises(DataError, match=r":0: no text in field 'body' .*use --text-field text"):
        read(f"hf:{tmp_path}", text_field="body")
    with pytest.raises(DataError, match="expected hf:NAME"):
        read("hf:a:b:c:d")


def test_folders_of_save_to_disk_are_read_without_their_caches(tmp_path):
    """One split in several files, or a folder of splits; each as it was when it was saved."""
    rows = datasets.Dataset.from_list([{**record, "words": 2} for record in RECORDS])
    one = tmp_path / "one"
    rows.save_to_disk(one, num_shards=2)
    assert len([*one.glob("*.arrow")]) == 2
    assert read(one) == EXPECTED and read(one / "data-00001-of-00002.arrow") == EXPECTED[1:]
    before = text_fingerprint(str(one))
    # What `map` keeps in the folder of a loaded dataset is no part of it.
    datasets.load_from_disk(one).map(lambda row: {"text": row["text"].upper()}).to_list()
    assert [*one.glob("cache-*.arrow")] and read(one) == EXPECTED
    assert text_fingerprint(str(one)) == before
    splits = {"train": rows, "test": rows.select([1])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "several")
    assert read(tmp_path / "several") == [EXPECTED[1], *EXPECTED]
    assert read(tmp_path / "several" / "train") == EXPECTED
    with pytest.raises(DataError, match=r"arrow:1: no text in field 'body' .*--text-field text"):
        read(one, text_field="body")
    with pytest.raises(DataError, match="folder of save_to_disk: name it without hf:"):
        read(f"hf:{one}")
    path = one / "data-00000-of-00002.arrow"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"00000-of-00002.arrow: not a readable Arrow file"):
        read(one)


@pytest.mark.parametrize(
    ("record", "advice"),
    [
        ({"id": "a" * 99}, r"\(fields: 'id'\);"),
        ({"id": "a" * 99, "body": "b"}, "use --text-field body "),
        ({"prompt": "b", "messages": [{"role": "user", "content": "b"}]}, "messages is a chat"),
        ({"id": "a", "conversations": [{"from": "human", "value": "b"}]}, "one text first"),
    ],
)
def test_advice_on_a_missing_text_is_of_use(tmp_path, record, advice):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    (tmp_path / "b.json").write_text(json.dumps([record]))
    for name in ("a.parquet", "b.json"):
        with pytest.raises(DataError, match=advice):
            read(tmp_path / name)
    if "chat" in advice:
        with pytest.raises(DataError, match=r"apply_chat_template\(record\['messages'\]"):
            read(tmp_path / "b.json", text_field="messages")


def test_a_byte_order_mark_is_no_text(tmp_path):
    """Windows' editors begin files with one."""
    for name, content in (("a.jsonl", LINES), ("b.json", LINES), ("c.txt", "Ünicode")):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress("packed".encode("utf-8-sig")))
    texts = [record["text"] for record in RECORDS]
    assert [d.text for d in read(tmp_path)] == [*texts, *texts, "Ünicode", "packed"]


def test_parquet_columns_of_bytes_are_text(tmp_path, caplog):
    """Some writers leave out Parquet's note that a column is UTF-8."""
    kinds = pyarrow.binary(), pyarrow.large_binary(), pyarrow.large_string()
    for number, kind in enumerate(kinds):
        path = tmp_path / f"{number}.parquet"
        schema = pyarrow.schema([("id", pyarrow.binary()), ("text", kind)])
        rows = [{"id": b"a", "text": "zweite Zeile: äöü".encode()}]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path)
        assert read(path) == [Document("a", "zweite Zeile: äöü")]
        with pytest.raises(DataError, match="--text-field text"):
            read(path, text_field="body")
    path = tmp_path / "latin.parquet"
    rows = [{"text": "é".encode("latin-1")}, {"text": b"fine"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(DataError, match=r"latin.parquet:1: the text is not UTF-8"):
        read(path)
    assert [d.text for d in read(path, bad_lines="skip")] == ["fine"]
    assert "skipped" in caplog.text


@pytest.mark.parametrize(
    "name", ["c4.00000.json.gz", "dolma.json", "a.ndjson", "A.JSONL", "B.JSONL.GZ", "list.json"]
)
def test_records_by_any_name_that_people_give_them(tmp_path, name):
    content = json.dumps(RECORDS, indent=2) if name == "list.json" else LINES
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.lower().endswith("gz") else data)
    assert read(tmp_path / name) == read(tmp_path) == EXPECTED


def test_folders_and_globs_are_read_in_order(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.TXT").write_text("B")
    (tmp_path / "deep" / "a.txt").write_text("A")
    (tmp_path / "deep" / "up").symlink_to("..")  # repeats nothing
    assert [d.text for d in read(tmp_path)] == ["B", "A"]
    assert [d.text for d in read(tmp_path / "*.TXT")] == ["B"]
    assert [d.text for d in read(tmp_path / "**" / "*.txt")] == ["A"]


def test_a_name_that_is_there_is_no_glob(tmp_path):
    for name in ("data[1].txt", "data1.txt", "[a]/x.txt", "a/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for name, expected in (
        ("data[1].txt", "data[1].txt"),
        ("[a]", "[a]/x.txt"),
        ("[ab]/*.txt", "a/x.txt"),
        ("data[12].txt", "data1.txt"),
    ):
        assert [d.text for d in read(tmp_path / name)] == [expected]


def test_links_are_followed_by_folders_and_globs_alike(tmp_path):
    """Large texts lie on other disks; and a link may lead back to where it is."""
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    (elsewhere / "deep" / ".hidden").mkdir(parents=True)
    source.mkdir()
    for place in (source, elsewhere, elsewhere / "deep", elsewhere / "deep" / ".hidden"):
        (place / "text.txt").write_text(place.name)
    (source / "linked").symlink_to(elsewhere)
    (source / "also").symlink_to(elsewhere)
    # With two links back, a search that follows them again would not end.
    for name in ("back", "up"):
        (elsewhere / "deep" / name).symlink_to(source)
    for asked in (source, source / "**", source / "**" / "*.txt", source / "**/deep/../**/*.txt"):
        texts = [d.text for d in read(asked)]
        assert sorted(texts) == ["deep", "elsewhere", "source"], asked
    assert read(source) == read(source / "**" / "*.txt")
    ids = [document.id for document in read(source)]
    assert ids[0] == str(source / "also" / "deep" / "text.txt")
    assert [d.text for d in read(source / "linked" / "*.txt")] == ["elsewhere"]


def test_what_is_hidden_in_a_folder_is_read_if_named_alone(tmp_path, caplog, monkeypatch):
    """Jupyter's checkpoints are copies, and macOS's ._ files are not text."""
    folder = tmp_path / ".texts"
    hidden = folder / ".ipynb_checkpoints"
    hidden.mkdir(parents=True)
    (folder / "a.txt").write_text("A")
    (hidden / "a-checkpoint.txt").write_text("old")
    (folder / "._a.txt").write_bytes(b"\0\5\x16\7")
    (folder / ".gitattributes").write_text("* text")
    assert [d.text for d in read(folder)] == [d.text for d in read(folder / "*")] == ["A"]
    monkeypatch.chdir(folder)
    assert [d.text for d in read(".")] == ["A"] and not caplog.messages
    for named in (hidden, hidden / "a-checkpoint.txt", folder / ".ipy*" / "*.txt"):
        assert [d.text for d in read(named)] == ["old"]
    (folder / "a.txt").unlink()
    with pytest.raises(DataError, match=r"no readable file there.*hidden files, are read if named"):
        read(folder)


def test_a_folder_names_what_it_leaves_out(tmp_path, caplog):
    """As folders come from the Hub: records beside settings and notes, which are no records."""
    (tmp_path / "books.jsonl").write_text(LINES)
    (tmp_path / "more.json").write_text(LINES)
    (tmp_path / "dataset_info.json").write_text(json.dumps({"splits": {}}, indent=2))
    (tmp_path / "README.md").write_text("# About")
    assert read(tmp_path) == EXPECTED * 2
    (said,) = caplog.messages
    assert "left out: README.md, dataset_info.json;" in said
    for number in range(9):
        (tmp_path / f"z{number}.md").write_text("z")
    read(tmp_path)
    assert "z2.md and 6 more" in caplog.messages[-1]
    caplog.clear()
    assert len(read(tmp_path / "*.md")) == 10 and not caplog.messages


@pytest.mark.parametrize("name", ["notes.md", "code.py", "page.rst", "NOTES", "notes.md.gz"])
def test_a_file_that_is_named_is_read_as_text(tmp_path, name):
    data = b"# About\n"
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert read(tmp_path / name) == [Document(str(tmp_path / name), "# About\n")]
    with pytest.raises(DataError, match="no readable file there"):
        read(tmp_path)


def test_the_standard_library_is_real_text_in_a_fixed_order():
    documents = read("stdlib")
    ids = [document.id for document in documents]
    assert "argparse.py" in ids and "json/decoder.py" in ids
    assert len(set(ids)) == len(ids)
    assert sum(len(document.text) for document in documents) > 4_000_000
    assert not [name for name in ids if name.startswith(("test/", "site-packages/"))]
    assert ids == [document.id for document in read_documents("stdlib")]


def test_the_split_is_by_text_and_independent_of_order_and_path(text_folder, monkeypatch):
    documents = [Document(str(i), f"text {i}") for i in range(2000)]
    chosen = {d.id for d in documents if held_out(d, 0.1)}
    assert chosen == {d.id for d in reversed(documents) if held_out(d, 0.1)}
    assert 150 < len(chosen) < 250
    assert chosen <= {d.id for d in documents if held_out(d, 0.2)}
    assert not any(held_out(d, 0.0) for d in documents)
    assert all(held_out(d, 1.0) for d in documents)
    whole = [d.text for d in read(text_folder) if held_out(d, 0.4)]
    monkeypatch.chdir(text_folder.parent)
    assert [d.text for d in read(text_folder.name) if held_out(d, 0.4)] == whole
    assert 0 < len(whole) < 12


def test_a_broken_line_is_named_and_fatal_or_skipped(tmp_path, caplog):
    path = tmp_path / "books.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "tw\n{"text": "three", "id": 0}\n')
    with pytest.raises(
        DataError, match=r"jsonl:3: the line is not valid JSON.*; correct it.*`bad_lines` skip"
    ):
        read(path)
    documents = read(path, bad_lines="skip")
    (said,) = caplog.messages
    assert said.startswith(f"skipped {path}:3: the line is not valid JSON")
    assert documents == [Document(f"{path}:1", "one"), Document("0", "three")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("list.jsonl", b"[1, 2]\n", "expected a JSON object, got list"),
        ("field.jsonl", b'{"body": "x"}', "'text' .fields: 'body'.: use --text-field body"),
        ("number.jsonl", b'{"text": 5}', "no text in field 'text': expected a string, got int"),
        ("null.jsonl", b'{"text": null}', "expected a string, got null"),
        ("indented.json", b'{\n "text": "x"\n}', "a record in each line or, in .json, one list"),
        ("indented.jsonl", b'[\n {"text": "x"}\n]', "in .json, one list of records"),
        ("object.json", b'{"data": [{"text": "x"}]}', "fields: 'data'.; expected a record in each"),
        ("half.jsonl", b'{"text": "\\ud800"}', "not valid Unicode"),
        ("deep.jsonl", b"[" * 99999, "not valid JSON"),
        ("empty.txt", b"", "the file is empty: name one that has text, or remove it"),
        ("blank.txt", b" \n\n", "holds no text"),
        ("blank.jsonl", b"\n\n", "no document in the file"),
        ("binary.txt", b"abc\0def\n", "NUL byte"),
        ("latin.txt", "é\n".encode("latin-1"), "not UTF-8 text"),
        ("picture.png", b"\x89PNG", "not UTF-8 text"),
        ("broken.json", b'[{"text": "x"},', "not valid JSON"),
        ("latin.jsonl", b'{"text": "\xe9"}', "not UTF-8 text"),
        ("cut.txt.gz", gzip.compress(b"hello" * 999, mtime=0)[:-9], "Truncated compressed stream"),
        ("cut.txt.xz", lzma.compress(b"hello" * 999)[:-9], "ended before the end-of-stream"),
        ("cut.txt.zst", PACKERS[".zst"](os.urandom(2**18).hex().encode())[:-2000], "Truncated"),
        ("false.txt.gz", b"not gzip at all", "cannot be read: zlib inflate failed"),
        ("false.txt.zst", b"not zstd at all", "cannot be read: ZSTD decompress failed"),
        ("large.txt.zst", WIDE_FRAME, r"too much memory.*zstd -d --long=31"),
        ("packed.parquet.gz", gzip.compress(b"x", mtime=0), "not a readable Parquet file"),
    ],
)
def test_invalid_files_are_rejected_by_name(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        read(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("source", "message"), [("", "the source is empty"), ("hf:", "expected hf:NAME")]
)
def test_an_empty_name_is_not_the_current_folder(text_folder, monkeypatch, source, message):
    """As of a variable of the shell that is not set."""
    monkeypatch.chdir(text_folder)
    for function in (read, text_fingerprint):
        with pytest.raises(DataError, match=message):
            function(source)
    assert len(read(".")) == 12


def test_missing_sources_and_what_is_no_file_are_rejected(tmp_path):
    for name in ("nowhere", "nowhere/*.txt"):
        with pytest.raises(DataError, match="no such file, folder or glob"):
            read(tmp_path / name)
    with pytest.raises(DataError, match="no readable file"):
        read(tmp_path)
    for number, make in enumerate((lambda path: path.symlink_to("nowhere"), os.mkfifo)):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / "b.txt")
        with pytest.raises(DataError, match=r"b.txt: a broken link, a pipe or a device"):
            read(folder)


def test_names_that_are_not_utf8_are_read(tmp_path):
    """Archives from Windows unpack to such names on Linux."""
    for name, content in ((b"\xe9.jsonl", LINES), (b"\xe9.txt", "text")):
        (tmp_path / os.fsdecode(name)).write_text(content)
    table = pyarrow.Table.from_pylist(RECORDS)
    with open(tmp_path / os.fsdecode(b"\xe9.parquet"), "wb") as file:
        pyarrow.parquet.write_table(table, file)
    assert [d.text for d in read(tmp_path)] == [*[d.text for d in EXPECTED] * 2, "text"]
