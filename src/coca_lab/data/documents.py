"""Documents from Python's standard library, from files, or from Hugging Face datasets.

A source is given as a string:

- ``stdlib``: source code and documentation of the running Python: real text without a download;
- a file, a folder or a glob of ``.txt``, ``.jsonl`` and ``.parquet`` files, optionally compressed
  as ``.gz``, ``.xz`` or ``.zst``;
- ``hf:NAME``, ``hf:NAME:SPLIT`` or ``hf:NAME:CONFIG:SPLIT``: a dataset for `datasets`, streamed.
"""

import contextlib
import glob
import gzip
import hashlib
import io
import json
import lzma
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from coca_attention.errors import UserError, install
from coca_attention.models.hub import go_online

BadLines = Literal["error", "skip"]

TOKENS = ".npy"
"""Ending of a file of token ids, which training reads in place of text."""
LONGEST = 2**30
"""Characters of a document at most: a small compressed file can hold any number."""

FORMATS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = ("", ".gz", ".xz", ".zst")
SUFFIXES = tuple(kind + packed for kind in FORMATS for packed in COMPRESSIONS)

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
    """Documents of a source, in a fixed order, read lazily.

    Args:
        source: See the module's docstring.
        text_field: Field with the text in JSON records, Parquet files and datasets.
        bad_lines: Whether an invalid JSON line raises an error (``error``) or is skipped with a
            warning (``skip``).

    Raises:
        DataError: If the source does not exist, or a file is empty, binary, truncated or malformed.
            The message names the file and, for JSON lines, the line.
    """
    if source == "stdlib":
        return _stdlib_documents()
    if source.startswith("hf:"):
        return _hub_documents(source, text_field)
    return _file_documents(find_files(source), text_field, bad_lines)


@dataclass
class SourceSettings:
    """Documents to read."""

    source: str = "stdlib"
    """stdlib; a file, folder or glob of .txt, .jsonl, .parquet (or .gz, .xz, .zst); or hf:NAME."""
    text_field: str = "text"
    """Field with the text in JSON records, Parquet files and datasets."""
    bad_lines: BadLines = "error"
    """How to handle an invalid JSON line: error, or skip with a warning."""

    def documents(self) -> Iterator[Document]:
        """`read_documents` with these settings."""
        return read_documents(self.source, text_field=self.text_field, bad_lines=self.bad_lines)


def source_files(source: str) -> list[Path]:
    """Files of a source, in reading order; empty for a dataset on the Hub.

    Raises:
        DataError: As `read_documents`.
    """
    if source == "stdlib":
        topics = Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
        return [*_stdlib_files(), *([topics] if topics.is_file() else [])]
    if source.startswith("hf:"):
        folder = Path(source.removeprefix("hf:").split(":")[0])
        return sorted(path for path in folder.rglob("*") if path.is_file())
    if source.endswith(TOKENS) and Path(source).expanduser().is_file():
        return [Path(source).expanduser()]
    return find_files(source)


def check_held_out(source: str, share: float) -> None:
    """Raise UserError if a source is a file of token ids, and a share of it is to be held out."""
    if share and source.endswith(TOKENS):
        raise UserError(
            f"{source} has token ids, not documents, so none can be held out: set data.held_out to "
            "0 and, to validate, validation.source"
        )


def held_out(document: Document, share: float) -> bool:
    """Whether a document belongs to the held-out split.

    A hash of the text alone decides: the split is the same on every machine, for every path and
    order, does not change when documents are added, and never separates copies of a text.

    Args:
        document: The document.
        share: Share of documents that are held out, between 0 and 1.
    """
    digest = hashlib.sha256(document.text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def find_files(source: str) -> list[Path]:
    """Sorted files that match a path or glob.

    Raises:
        DataError: If there are none, or the file has an unknown type.
    """
    path = Path(source).expanduser()
    known = f"known types: {', '.join(FORMATS)}, optionally with {', '.join(COMPRESSIONS[1:])}"
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise DataError(f"{path}: unknown file type; {known}")
        return [path]
    if path.is_dir():
        found = _texts(path.rglob("*"))
        if not found:
            raise DataError(f"{path}: no readable file in this folder; {known}")
        return found
    matches = [Path(name) for name in glob.glob(str(path), recursive=True)]
    found = _texts(matches)
    if not found:
        reason = "no match has a known type" if matches else "no such file, folder or glob"
        raise DataError(
            f"{source}: {reason}; {known}. Use hf:NAME for a Hugging Face dataset, stdlib for the "
            "text of Python's standard library"
        )
    return found


def _texts(paths: Iterable[Path]) -> list[Path]:
    """The files of a known type, sorted; each once, though a link leads back to its folder."""
    found: dict[Path, Path] = {}
    for path in sorted(paths):
        if not path.name.endswith(SUFFIXES) or path.is_dir():
            continue
        if not path.is_file():
            kind = "a link that leads nowhere" if path.is_symlink() else "a pipe or device"
            raise DataError(f"{path}: {kind}, not a file; remove it, or name the files to read")
        found.setdefault(path.parent.resolve() / path.name, path)
    return list(found.values())


def _file_documents(files: list[Path], text_field: str, bad_lines: BadLines) -> Iterator[Document]:
    for path in files:
        name = path.name
        for compression in COMPRESSIONS:
            name = name.removesuffix(compression)
        kind = name[name.rfind(".") :]
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty")
        if kind == ".txt":
            lines, length = [], 0
            for line in _text_lines(path):
                lines.append(line)
                length += len(line)
                if length >= LONGEST:
                    raise _too_long(path)
            text = "".join(lines)
            if not text.strip():
                raise DataError(f"{path}: the file holds no text")
            yield Document(str(path), text)
        elif kind == ".jsonl":
            yield from _json_documents(path, text_field, bad_lines)
        else:
            yield from _parquet_documents(path, text_field)


def _open(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    if path.suffix == ".zst":
        # Arrow's reader detects a truncated stream; zstandard's does not.
        return _need("pyarrow", f"reading {path}").input_stream(str(path), compression="zstd")
    return open(path, "rb")


def _too_long(path: Path) -> DataError:
    return DataError(
        f"{path}: a document of more than {LONGEST:,} characters, which memory has to hold at "
        "once: split it into several files or lines"
    )


def _text_lines(path: Path) -> Iterator[str]:
    """Lines of a text file, decompressed and decoded; DataError if it is malformed."""
    with contextlib.ExitStack() as stack:
        try:
            stream = stack.enter_context(_open(path))
            text = io.TextIOWrapper(stream, encoding="utf-8")
            for number, line in enumerate(iter(lambda: text.readline(LONGEST), ""), start=1):
                if len(line) == LONGEST:
                    raise _too_long(path)
                if "\0" in line:
                    raise DataError(
                        f"{path}: line {number} has a NUL byte; expected text, not binary data"
                    )
                yield line
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: not UTF-8 text ({error.reason} at byte {error.start} of a block); "
                "convert or remove the file"
            ) from error
        except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
            raise DataError(f"{path}: compressed data truncated or damaged: {error}") from error
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _json_documents(path: Path, text_field: str, bad_lines: BadLines) -> Iterator[Document]:
    read = 0
    for number, line in enumerate(_text_lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = _json_record(line, text_field)
        except ValueError as error:
            problem = f"{path}: line {number}: {error}"
            if bad_lines == "error":
                raise DataError(
                    f"{problem}; fix the line, or skip such lines with bad_lines: skip"
                ) from error
            _warn(f"skipped {problem}")
            continue
        read += 1
        yield Document(_name(record, f"{path}:{number}"), record[text_field])
    if not read:
        raise DataError(f"{path}: no document in the file")


def _json_record(line: str, text_field: str) -> dict[str, Any]:
    """The object of a JSON line; ValueError if it is invalid or has no text."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg}, column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("not valid JSON (nested too deeply)") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    if not isinstance(record.get(text_field), str):
        texts = {name: value for name, value in record.items() if isinstance(value, str)}
        there = ", ".join(map(repr, record)) or "none"
        raise ValueError(f"no text in field {text_field!r} (fields: {there}){_other_field(texts)}")
    try:
        record[text_field].encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not valid Unicode ({error.reason})") from error
    return record


def _parquet_documents(path: Path, text_field: str) -> Iterator[Document]:
    parquet = _need("pyarrow.parquet", f"reading {path}")
    if path.suffix != ".parquet":
        raise DataError(f"{path}: Parquet has its own compression; decompress the file first")
    try:
        table = parquet.ParquetFile(path)
    except Exception as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error
    names = table.schema_arrow.names
    if text_field not in names:
        columns = {field.name: "" for field in table.schema_arrow if "string" in str(field.type)}
        raise DataError(
            f"{path}: no column {text_field!r}; its columns: {', '.join(names)}"
            f"{_other_field(columns)}"
        )
    columns = [text_field, "id"] if "id" in names and text_field != "id" else [text_field]
    row = 0
    batches = table.iter_batches(columns=columns)
    while True:
        try:
            batch = next(batches, None)
        except OSError as error:
            raise DataError(f"{path}: damaged after row {row}: {error}") from error
        if batch is None:
            break
        for record in batch.to_pylist():
            row += 1
            if not isinstance(record[text_field], str):
                raise DataError(f"{path}: row {row}: column {text_field!r} holds no text")
            yield Document(_name(record, f"{path}:{row}"), record[text_field])
    if not row:
        raise DataError(f"{path}: no rows in the file")


def _hub_documents(source: str, text_field: str) -> Iterator[Document]:
    datasets = _need("datasets", f"reading {source}")
    parts = source.removeprefix("hf:").split(":")
    if not parts[0] or len(parts) > 3:
        raise DataError(f"{source}: expected hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    config = parts[1] if len(parts) == 3 else None
    split = parts[-1] if len(parts) > 1 else "train"
    if not Path(parts[0]).is_dir():
        go_online()
    try:
        rows = datasets.load_dataset(parts[0], config, split=split, streaming=True)
    except Exception as error:
        raise DataError(
            f"{source}: the dataset cannot be opened: {' '.join(str(error).split())[:300]}; check "
            "its name, config and split, or the connection"
        ) from error
    for number, row in enumerate(_rows(rows, source)):
        if not isinstance(row.get(text_field), str):
            texts = {name: value for name, value in row.items() if isinstance(value, str)}
            raise DataError(
                f"{source}: row {number} has no text in {text_field!r}; its fields: "
                f"{', '.join(map(str, row))}{_other_field(texts)}"
            )
        yield Document(_name(row, f"{source}:{number}"), row[text_field])


def _other_field(texts: dict[str, str]) -> str:
    """What to do where the text field is missing: the option with the field that has the text."""
    if not texts:
        return ""
    usual = [name for name in ("text", "content", "body", "raw_content") if name in texts]
    field = usual[0] if usual else max(texts, key=lambda name: len(texts[name]))
    return f": use --text-field {field} (in a recipe data.text_field)"


def _name(record: Any, otherwise: str) -> str:
    """A record's ``id``, or its location."""
    name = record.get("id")
    return otherwise if name is None else str(name)


def _rows(rows: Any, source: str) -> Iterator[Any]:
    """Rows of a streamed dataset; DataError if the stream is interrupted."""
    number = 0
    try:
        for row in rows:
            yield row
            number += 1
    except Exception as error:
        raise DataError(f"{source}: reading failed after {number} rows: {error}") from error


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not STDLIB_EXCLUDED.intersection(path.relative_to(root).parts[:-1])
    ]


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
        from pydoc_data.topics import topics
    except ImportError:
        return  # some systems do not install the documentation
    for name in sorted(topics):
        yield Document(f"topics/{name}", topics[name])


def _need(module: str, purpose: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{purpose} needs {module.split('.')[0]}: {install('data')}") from error


def _warn(message: str) -> None:
    import warnings

    warnings.warn(message, stacklevel=2)
