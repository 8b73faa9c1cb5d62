"""Documents of a source of text.

A source is a string:

- ``stdlib``: source code and documentation of the running Python: real text without a download;
- a folder, which is searched for files whose names end with ``.txt``, ``.jsonl``, ``.ndjson``,
  ``.json``, ``.parquet`` or ``.arrow``, in capitals or not; all but the last two may be compressed
  as ``.gz``, ``.xz`` or ``.zst``. ``.json`` has a record a line, as in C4 and Dolma, or is a list
  of records; of ``.arrow`` files those are read that ``save_to_disk`` of `datasets` has written,
  of all splits. Files and folders in it whose names begin with a dot are left out;
- a file: one of any other type is read as text;
- a glob, where there is no file or folder of that name; ``**`` stands for folders at any depth,
  and a file of any other type is read as text if the glob ends with its type;
- ``hf:NAME``, ``hf:NAME:SPLIT`` or ``hf:NAME:CONFIG:SPLIT``: a dataset for `datasets`, streamed;
- to train on, a ``.npy`` file of token ids.

Links to files and folders are followed, in a folder as in a glob; a folder that several links lead
to, or one back to, is read once.
"""

import glob
import hashlib
import io
import json
import logging
import lzma
import os
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from coca_attention.errors import UserError
from coca_lab.fingerprints import files_fingerprint, fingerprint
from coca_lab.settings.sources import TOKEN_IDS, BadLines, SourceSettings

log = logging.getLogger(__name__)

RECORD_FILES = (".jsonl", ".ndjson", ".json")
"""Endings of files with a record in each line, or, the last, with a list of records."""
TABLES = (".parquet", ".arrow")
"""Endings of files with a record in each row, which have a compression of their own."""
KNOWN = (".txt", *RECORD_FILES, *TABLES)
PACKED = {".gz": "gzip", ".xz": "xz", ".zst": "zstd"}
RECORDS = "expected a record in each line or, in .json, one list of records"
STATE = "state.json"
"""Of a folder that `datasets` has saved: names the files of its table."""
SAVED = (STATE, "dataset_dict.json", "dataset_info.json")
"""Files without records that `datasets` saves beside them."""
CHATS = ("messages", "conversations")
"""Fields in which datasets have chats, by custom."""
NAMED = 5
"""Files that a message names."""

# Folders of the standard library with tests or tables of numbers, or missing on some systems:
# without them, the text is nearly the same on every machine with the same Python.
STDLIB_EXCLUDED = {
    "__pycache__", "config", "distutils", "encodings", "ensurepip", "idlelib", "lib-dynload",
    "lib2to3", "pydoc_data", "site-packages", "test", "tests", "tkinter", "turtledemo",
}  # fmt: skip


class DataError(UserError):
    """A data source cannot be read or has too little text."""


@dataclass(frozen=True)
class Document:
    """A text; ``id`` identifies it in messages and results."""

    id: str
    text: str


def read_documents(
    source: str, *, text_field: str = "text", bad_lines: BadLines = "error"
) -> Iterator[Document]:
    """Documents of a source, in a fixed order, read lazily; arguments as in `SourceSettings`.

    Raises:
        DataError: If the source does not exist, or a file is empty, binary, truncated or malformed.
            The message names the file and the line or row.
    """
    if source == "stdlib":
        return _stdlib_documents()
    if source.startswith("hf:"):
        return _hub_documents(source, text_field)
    files, others = _find(source)
    if others:
        names = ", ".join(path.name for path in others[:NAMED])
        log.warning(
            "%s: files of other types are left out: %s%s; a glob that ends with their type reads "
            "them as text",
            source,
            names,
            f" and {len(others) - NAMED:,} more" if len(others) > NAMED else "",
        )
    return chain.from_iterable(_file_documents(path, text_field, bad_lines) for path in files)


def documents_of(
    settings: SourceSettings, share: float = 0.0, *, from_held_out: bool = False
) -> Iterator[Document]:
    """`read_documents` of settings: the share that is held out, or all others."""
    documents = read_documents(
        settings.source, text_field=settings.text_field, bad_lines=settings.bad_lines
    )
    for document in documents:
        if (share > 0 and held_out(document, share)) == from_held_out:
            yield document


def held_out(document: Document, share: float) -> bool:
    """Whether a document belongs to the held-out split, a share (0 to 1) of all documents.

    A hash of the text alone decides: the split is the same on every machine, for every path and
    order, does not change when documents are added, and never separates copies of a text.
    """
    digest = hashlib.sha256(document.text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def source_files(source: str) -> list[Path]:
    """Files of a source, in reading order; DataError if there are none, or not of a known type."""
    if source == "stdlib":
        topics = Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
        return [*_stdlib_files(), *([topics] if topics.is_file() else [])]
    if source.startswith("hf:"):
        folder = Path(_hub_parts(source)[0])
        return sorted(path for path in folder.rglob("*") if path.is_file())
    return _find(source)[0]


def text_fingerprint(source: str) -> str:
    """Of the content of a source, wherever it is; a dataset of the Hub is known by its name alone.

    Raises:
        DataError: If the source does not exist.
    """
    files = source_files(source)
    if not files:
        return source
    part = _hub_parts(source)[1:] if source.startswith("hf:") else []
    return fingerprint([part, files_fingerprint(files)])


def _find(source: str) -> tuple[list[Path], list[Path]]:
    """The files of a path or a glob in reading order, and the others there, which are not read."""
    if not source:  # Path would make it the current folder
        raise DataError("the source is empty: name a file, a folder (. for this one) or a glob")
    path = Path(source).expanduser()
    pattern = path
    if os.path.lexists(path):  # whose name may look like a glob
        pattern = Path(glob.escape(str(path)), "**" if path.is_dir() else "")
    matches = [*_matches(pattern)]
    files: dict[Path, Path] = {}  # each once, though a link leads back to its folder
    others = []
    for match in sorted(each for each in matches if not each.is_dir()):
        is_named = match == path or (match.suffix == path.suffix != "" and not path.is_dir())
        if not is_named and not _is_known(match):
            others.append(match)
            continue
        if not match.is_file():
            raise DataError(f"{match}: a broken link, a pipe or a device, not a file")
        files.setdefault(match.parent.resolve() / match.name, match)
    if files:
        return list(files.values()), others
    reason = (
        "no readable file there" if path.is_dir() or matches else "no such file, folder or glob"
    )
    known = (
        f"known types: {', '.join(KNOWN)} (of save_to_disk), all but the last two optionally with "
        ".gz, .xz or .zst"
    )
    raise DataError(
        f"{source}: {reason}; {known}; others, and hidden files, are read if named. Use hf:NAME "
        "for a Hugging Face dataset, stdlib for the text of Python's standard library"
    )


def _matches(pattern: Path) -> Iterator[Path]:
    """What matches a glob, in no order; hidden files and folders do if the glob names the dot."""
    # `glob` itself follows a link back into its own folder until the system refuses.
    if "**" not in pattern.parts:
        yield from map(Path, glob.glob(str(pattern)))
        return
    place = pattern.parts.index("**")
    rest = pattern.parts[place + 1 :] or ("*",)
    for root in _matches(Path(*pattern.parts[:place])):
        for folder in _folders(root):
            yield from _matches(Path(glob.escape(str(folder)), *rest))


def _folders(root: Path) -> Iterator[Path]:
    """A folder and those in it at any depth, through links, but for hidden ones; each once."""

    def refuse(error: OSError) -> None:
        raise error

    seen = set[str]()
    for folder, inner, _ in os.walk(root, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield Path(folder)


def _kind(path: Path) -> tuple[str, str | None]:
    """The ending of a file without that of its compression, and the compression."""
    name = path.name.lower()
    packing = PACKED.get(path.suffix.lower())
    kind = Path(f"a{name.removesuffix(path.suffix.lower())}").suffix if packing else ""
    return kind or path.suffix.lower() or name, packing


def _is_known(path: Path) -> bool:
    """Whether a file of a folder is text or has records, as far as its name and its head say."""
    kind, packing = _kind(path)
    if path.name in SAVED:
        return False
    if kind == ".arrow":
        return not packing and _is_saved(path)
    if kind != ".json":
        return kind in KNOWN and (kind not in TABLES or not packing)
    # Settings, such as config.json, begin with a line that has nothing but a brace.
    return not path.is_file() or next(_lines(path), "").strip() != "{"


def _is_saved(path: Path) -> bool:
    """Whether a file is a part of the table that its folder was saved with, and no cache there."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # no such folder
        state = json.loads((path.parent / STATE).read_bytes())
        return path.name in [file["filename"] for file in state["_data_files"]]
    return False


def _file_documents(path: Path, text_field: str, bad_lines: BadLines) -> Iterator[Document]:
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")
    kind, _ = _kind(path)
    if kind == TOKEN_IDS:
        raise DataError(f"{path}: has token ids, which training alone reads")
    if kind in (*RECORD_FILES, *TABLES):
        rows = _table_rows(path, text_field) if kind in TABLES else _json_rows(path)
        yield from _records(path, rows, text_field, bad_lines)
        return
    text = "".join(_lines(path))
    if "\0" in text:
        raise DataError(f"{path}: has a NUL byte; expected text, not binary data")
    if not text.strip():
        raise DataError(f"{path}: the file holds no text")
    yield Document(str(path), text)


def _lines(path: Path) -> Iterator[str]:
    """Lines of a text file, decompressed and decoded; DataError if it is malformed."""
    packing = _kind(path)[1]
    try:
        # Arrow decompresses .gz and .zst, and unlike zstandard's reader notices truncation.
        unpacking = partial(pyarrow.input_stream, compression=packing)
        opener: Any = lzma.open if packing == "xz" else unpacking
        # Opened here: Arrow takes UTF-8 names alone.
        with open(path, "rb") as file, opener(file) as stream:
            yield from io.TextIOWrapper(stream, encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error}); convert or remove the file") from error
    except (EOFError, lzma.LZMAError, OSError) as error:
        large = "Frame requires too much memory" in str(error)
        remedy = "; it was packed with a window above 128 MiB: unpack it with zstd -d --long=31"
        raise DataError(f"{path}: cannot be read: {error}{remedy if large else ''}") from error


def _json_rows(path: Path) -> Iterator[object]:
    """The lines of a file with a record in each, or the records of a file that is one list."""
    lines = _lines(path)
    first = next(lines, "")
    if _kind(path)[0] != ".json" or not first.lstrip().startswith("["):
        yield from chain([first], lines)
        return
    try:
        yield from json.loads("".join([first, *lines]))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error})") from error


def _table_rows(path: Path, text_field: str) -> Iterator[dict[str, object]]:
    """The rows of a Parquet or an Arrow file, with all columns if the text is in none of them."""
    kind = "Parquet" if _kind(path)[0] == ".parquet" else "Arrow"
    try:
        with open(path, "rb") as file:  # Arrow takes UTF-8 names alone
            if kind == "Parquet":
                table = pyarrow.parquet.ParquetFile(file)
                names = _needed(table.schema_arrow, text_field)
                batches = table.iter_batches(1000, columns=names)
            else:  # a stream, as `datasets` writes it
                batches = pyarrow.ipc.open_stream(file)
                names = _needed(batches.schema, text_field)
            for batch in batches:
                yield from batch.select(names).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: not a readable {kind} file: {error}") from error


def _needed(schema: pyarrow.Schema, text_field: str) -> list[str]:
    """The columns to read: all, for a message, if none has the text."""
    if text_field not in schema.names:
        return schema.names
    return [name for name in (text_field, "id") if name in schema.names]


def _records(
    path: Path, rows: Iterator[object], text_field: str, bad_lines: BadLines
) -> Iterator[Document]:
    """Documents of a file with a record in each of its lines or rows; blank lines do not count."""
    count = 0
    for number, row in enumerate(rows, start=1):
        if isinstance(row, str) and not row.strip():
            continue
        try:
            document = _document(row, text_field, f"{path}:{number}")
        except DataError as error:
            if bad_lines == "error":
                raise DataError(
                    f"{error}; correct it, or skip such lines (bad_lines: skip)"
                ) from error
            log.warning("skipped %s", error)
        else:
            count += 1
            yield document
    if not count:
        raise DataError(f"{path}: no document in the file")


def _document(record: object, text_field: str, place: str) -> Document:
    """The text of a record, with its ``id`` or else its place; DataError if it has none."""
    otherwise = f"; {RECORDS}" if isinstance(record, str) else ""
    if isinstance(record, str):
        try:
            record = json.loads(record)
        except (ValueError, RecursionError) as error:
            message = f"the line is not valid JSON ({getattr(error, 'msg', error)})"
            raise DataError(f"{place}: {message}{otherwise}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: expected a JSON object, got {type(record).__name__}")
    if text_field not in record:
        fields = ", ".join(map(repr, record))
        advice = _advice(record) or otherwise
        raise DataError(f"{place}: no text in field {text_field!r} (fields: {fields}){advice}")
    text = record[text_field]
    if text_field in CHATS and isinstance(text, list):
        raise DataError(f"{place}: no text in field {text_field!r}{_advice(record)}")
    if isinstance(text, bytes):  # Parquet's type binary, which some writers give to text
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{place}: the text is not UTF-8 ({error})") from error
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        raise DataError(f"{place}: no text in field {text_field!r}: expected a string, got {kind}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: the text is not valid Unicode ({error.reason})") from error
    name = record.get("id")
    if isinstance(name, bytes):
        name = name.decode(errors="replace")
    return Document(place if name is None else str(name), text)


def _advice(record: dict[str, Any]) -> str:
    """What to do where a record has no text in the field that was named; empty if that is open."""
    for name in CHATS:
        if isinstance(record.get(name), list):
            return (
                f": {name} is a chat, which has to be made one text first: in Python, by "
                f"tokenizer.apply_chat_template(record[{name!r}], tokenize=False), which takes "
                "entries with role and content"
            )
    texts = {
        name: text
        for name, text in record.items()
        if isinstance(text, str | bytes) and name != "id"
    }
    if not texts:
        return ""
    longest = max(texts, key=lambda name: len(texts[name]))
    return f": use --text-field {longest} (in a recipe data.text_field)"


def _hub_parts(source: str) -> list[str]:
    """NAME, CONFIG and SPLIT of a dataset, as far as they are given."""
    parts = source.removeprefix("hf:").split(":")
    if not parts[0] or len(parts) > 3:
        raise DataError(f"{source}: expected hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    return parts


def _hub_documents(source: str, text_field: str) -> Iterator[Document]:
    import datasets  # takes longer to import than everything else here

    parts = _hub_parts(source)
    if any(Path(parts[0], name).is_file() for name in SAVED[:2]):
        raise DataError(f"{source}: a folder of save_to_disk: name it without hf:")
    config = parts[1] if len(parts) == 3 else None
    split = parts[-1] if len(parts) > 1 else "train"
    number = 0
    try:
        for row in datasets.load_dataset(parts[0], config, split=split, streaming=True):
            yield _document(row, text_field, f"{source}:{number}")
            number += 1
    except DataError:
        raise
    except Exception as error:  # of any of the readers of `datasets`
        raise DataError(
            f"{source}: reading failed after {number} rows: {' '.join(str(error).split())[:300]}; "
            "check its name, config and split, or the connection"
        ) from error


def _stdlib_files() -> list[Path]:
    found = []
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = [name for name in folders if name not in STDLIB_EXCLUDED]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def _stdlib_documents() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in _stdlib_files():
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few files have other encodings
        if text.strip():
            yield Document(path.relative_to(root).as_posix(), text)
    try:
        from pydoc_data.topics import topics  # which some systems do not install
    except ImportError:
        return
    yield from (Document(f"topics/{name}", topics[name]) for name in sorted(topics))
