"""Documents of a source of text, which `coca_lab.source_files` describes and finds."""

import hashlib
import json
import logging
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from coca_lab.fingerprints import files_fingerprint, fingerprint
from coca_lab.settings.sources import TOKEN_IDS, BadLines, SourceSettings
from coca_lab.source_files import (
    RECORD_FILES,
    SAVED,
    TABLES,
    DataError,
    find_files,
    hub_parts,
    kind_of,
    lines_of,
    source_files,
    stdlib_files,
)

log = logging.getLogger(__name__)

RECORDS = "expected a record in each line or, in .json, one list of records"
CHATS = ("messages", "conversations")
"""Fields in which datasets have chats, by custom."""
NAMED = 5
"""Files that a message names."""


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
    files, others = find_files(source)
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


def text_fingerprint(source: str) -> str:
    """Of the content of a source, wherever it is; a dataset of the Hub is known by its name alone.

    Raises:
        DataError: If the source does not exist.
    """
    files = source_files(source)
    if not files:
        return source
    part = hub_parts(source)[1:] if source.startswith("hf:") else []
    return fingerprint([part, files_fingerprint(files)])


def _file_documents(path: Path, text_field: str, bad_lines: BadLines) -> Iterator[Document]:
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty: name one that has text, or remove it")
    kind, _ = kind_of(path)
    if kind == TOKEN_IDS:
        raise DataError(f"{path}: has token ids, which training alone reads")
    if kind in (*RECORD_FILES, *TABLES):
        rows = _table_rows(path, text_field) if kind in TABLES else _json_rows(path)
        yield from _records(path, rows, text_field, bad_lines)
        return
    text = "".join(lines_of(path))
    if "\0" in text:
        raise DataError(f"{path}: has a NUL byte; expected text, not binary data")
    if not text.strip():
        raise DataError(f"{path}: the file holds no text: name one that has, or remove it")
    yield Document(str(path), text)


def _json_rows(path: Path) -> Iterator[object]:
    """The lines of a file with a record in each, or the records of a file that is one list."""
    lines = lines_of(path)
    first = next(lines, "")
    if kind_of(path)[0] != ".json" or not first.lstrip().startswith("["):
        yield from chain([first], lines)
        return
    try:
        yield from json.loads("".join([first, *lines]))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error})") from error


def _table_rows(path: Path, text_field: str) -> Iterator[dict[str, object]]:
    """The rows of a Parquet or an Arrow file, with all columns if the text is in none of them."""
    kind = "Parquet" if kind_of(path)[0] == ".parquet" else "Arrow"
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
                    f"{error}; correct it, or skip such lines by `bad_lines` skip"
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


def _hub_documents(source: str, text_field: str) -> Iterator[Document]:
    import datasets  # takes longer to import than everything else here

    parts = hub_parts(source)
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


def _stdlib_documents() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in stdlib_files():
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
