"""Text: documents of a source, the tokenizer they train, and their token ids, cached on disk.

A source is a string:

- ``stdlib``: source code and documentation of the running Python: real text without a download;
- a file, a folder or a glob of ``.txt``, ``.jsonl`` and ``.parquet`` files; texts and JSON lines
  may be compressed as ``.gz``, ``.xz`` or ``.zst``;
- ``hf:NAME``, ``hf:NAME:SPLIT`` or ``hf:NAME:CONFIG:SPLIT``: a dataset for `datasets`, streamed;
- to train on, a ``.npy`` file of token ids.
"""

import glob
import hashlib
import io
import json
import lzma
import os
import sysconfig
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
import pyarrow.parquet
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from coca_attention.errors import UserError
from coca_lab.files import check_name, writing

BadLines = Literal["error", "skip"]

TOKENS = ".npy"
"""Ending of a file of token ids, which training reads in place of text."""

PACKED = (".gz", ".xz", ".zst")
SUFFIXES = (*(kind + end for kind in (".txt", ".jsonl") for end in ("", *PACKED)), ".parquet")

# Folders of the standard library with tests or tables of numbers, or missing on some systems:
# without them, the text is nearly the same on every machine with the same Python.
STDLIB_EXCLUDED = {
    "__pycache__", "config", "distutils", "encodings", "ensurepip", "idlelib", "lib-dynload",
    "lib2to3", "pydoc_data", "site-packages", "test", "tests", "tkinter", "turtledemo",
}  # fmt: skip

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_CHARACTERS = 100_000_000
SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 257, 10_000_000
"""Of a tokenizer that is trained here: the bytes and the end of text; and beyond any use."""
NO_DOCUMENTS = (
    "has token ids, not documents, so none can be held out: set data.held_out to 0 and, to "
    "validate, validation.source"
)


# Documents


class DataError(UserError):
    """A data source cannot be read or has too little text."""


@dataclass(frozen=True)
class Document:
    """A text; ``id`` identifies it in messages and results."""

    id: str
    text: str


@dataclass
class SourceSettings:
    """Documents to read."""

    source: str = "stdlib"
    """stdlib; a file, folder or glob of .txt, .jsonl (also .gz, .xz, .zst) or .parquet; or
    hf:NAME."""
    text_field: str = "text"
    """Field with the text in JSON records, Parquet files and datasets."""
    bad_lines: BadLines = "error"
    """How to handle an invalid JSON line: error, or skip with a warning."""

    def documents(self) -> Iterator[Document]:
        """`read_documents` with these settings."""
        return read_documents(self.source, text_field=self.text_field, bad_lines=self.bad_lines)


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
    files = source_files(source)
    return chain.from_iterable(_file_documents(path, text_field, bad_lines) for path in files)


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
        folder = Path(source.removeprefix("hf:").split(":")[0])
        return sorted(path for path in folder.rglob("*") if path.is_file())
    path = Path(source).expanduser()
    if path.is_file() and source.endswith(TOKENS):
        return [path]
    matches = list(path.rglob("*")) if path.is_dir() else glob.glob(str(path), recursive=True)
    files: dict[Path, Path] = {}  # each once, though a link leads back to its folder
    for match in sorted(map(Path, matches)):
        if match.name.endswith(SUFFIXES) and not match.is_dir():
            if not match.is_file():
                raise DataError(f"{match}: a broken link, a pipe or a device, not a file")
            files.setdefault(match.parent.resolve() / match.name, match)
    if files:
        return list(files.values())
    reason = "no such file, folder or glob"
    if path.exists() or matches:
        reason = "unknown file type" if path.is_file() else "no readable file there"
    raise DataError(
        f"{source}: {reason}; known types: .txt and .jsonl, optionally with .gz, .xz or .zst, and "
        ".parquet. Use hf:NAME for a Hugging Face dataset, stdlib for the text of Python's "
        "standard library"
    )


def _file_documents(path: Path, text_field: str, bad_lines: BadLines) -> Iterator[Document]:
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")
    if path.suffix == TOKENS:
        raise DataError(f"{path}: has token ids, which training alone reads")
    name = path.name.removesuffix(path.suffix if path.suffix in PACKED else "")
    if not name.endswith(".txt"):
        rows = _lines(path) if name.endswith(".jsonl") else _parquet_rows(path, text_field)
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
    try:
        # Arrow decompresses .gz and .zst, and unlike zstandard's reader notices truncation.
        opener: Any = lzma.open if path.suffix == ".xz" else pyarrow.input_stream
        with opener(str(path)) as stream:
            yield from io.TextIOWrapper(stream, encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error}); convert or remove the file") from error
    except (EOFError, lzma.LZMAError, OSError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _parquet_rows(path: Path, text_field: str) -> Iterator[dict[str, Any]]:
    try:
        table = pyarrow.parquet.ParquetFile(path)
        needed = [name for name in (text_field, "id") if name in table.schema_arrow.names]
        for batch in table.iter_batches(1000, columns=needed if text_field in needed else None):
            yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def _records(
    path: Path, rows: Iterator[str | dict[str, Any]], text_field: str, bad_lines: BadLines
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
                raise DataError(f"{error}; or skip such lines with bad_lines: skip") from error
            warnings.warn(f"skipped {error}", stacklevel=2)
        else:
            count += 1
            yield document
    if not count:
        raise DataError(f"{path}: no document in the file")


def _document(record: Any, text_field: str, place: str) -> Document:
    """The text of a record, with its ``id`` or else its place; DataError if it has none."""
    if isinstance(record, str):
        try:
            record = json.loads(record)
        except (ValueError, RecursionError) as error:
            message = f"{place}: not valid JSON ({getattr(error, 'msg', error)})"
            raise DataError(message) from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: expected a JSON object, got {type(record).__name__}")
    text = record.get(text_field)
    if not isinstance(text, str):
        texts = {name: value for name, value in record.items() if isinstance(value, str)}
        longest = max(texts, key=lambda name: len(texts[name]), default=None)
        hint = f": use --text-field {longest} (in a recipe data.text_field)" if longest else ""
        fields = ", ".join(map(repr, record))
        raise DataError(f"{place}: no text in field {text_field!r} (fields: {fields}){hint}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: the text is not valid Unicode ({error.reason})") from error
    name = record.get("id")
    return Document(place if name is None else str(name), text)


def _hub_documents(source: str, text_field: str) -> Iterator[Document]:
    import datasets  # takes longer to import than everything else here

    parts = source.removeprefix("hf:").split(":")
    if not parts[0] or len(parts) > 3:
        raise DataError(f"{source}: expected hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
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
    root = Path(sysconfig.get_paths()["stdlib"])
    every = sorted(root.rglob("*.py"))
    return [p for p in every if STDLIB_EXCLUDED.isdisjoint(p.relative_to(root).parts[:-1])]


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


# Tokens


def train_tokenizer(
    documents: Iterable[Document], vocab_size: int, *, split_digits: bool = False
) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text in, the same text out; ``<|endoftext|>`` ends documents.

    About `TOKENIZER_CHARACTERS` characters are read: more text changes little, and a stream may be
    endless. ``vocab_size`` is a maximum, at least 257 (the bytes and the end of text), else
    UserError; ``split_digits`` makes every digit a token of its own.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(f"vocab_size must be at least {SMALLEST_VOCABULARY}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_]) if split_digits else bytes_
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    some = up_to(TOKENIZER_CHARACTERS, documents)
    tokenizer.train_from_iterator((document.text for document in some), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def up_to(characters: float, documents: Iterable[Document]) -> Iterator[Document]:
    """Documents until they have so many characters or more; none is read beyond."""
    for document in documents:
        yield document
        characters -= len(document.text)
        if characters <= 0:
            return


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Any Transformers tokenizer, by folder or name; UserError if it cannot be loaded."""
    check_name(str(path))
    try:
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # a damaged file raises a plain Exception, among others
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: no tokenizer could be loaded: {reason}") from error


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> int:
    """Id of the token that ends documents; UserError if the tokenizer has none."""
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise UserError("the tokenizer has no eos_token, which is needed to end documents")
    return end


def encode_documents(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, *, batch: int = 64
) -> Iterator[tuple[Document, list[int]]]:
    """Every document with its token ids, without special tokens."""
    stream = iter(documents)
    while chunk := list(islice(stream, batch)):
        texts = [document.text for document in chunk]
        ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        yield from zip(chunk, ids["input_ids"], strict=True)


def _token_arrays(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, max_tokens: int | None
) -> Iterator[np.ndarray]:
    end, dtype, count = end_of_text(tokenizer), _token_type(tokenizer), 0
    for _, ids in encode_documents(documents, tokenizer):
        left = None if max_tokens is None else max_tokens - count
        yield np.array([*ids, end], dtype=dtype)[:left]
        count += len(ids) + 1
        if max_tokens is not None and count >= max_tokens:
            return
    if not count:
        raise DataError("no documents to tokenise: the source or the split is empty")


def _token_type(tokenizer: PreTrainedTokenizerBase) -> np.dtype:
    return np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)


def cache_folder(setting: str | None) -> Path | None:
    """The folder of the caches: the setting, or the user's for ``auto``; None for no caches."""
    if setting == "auto":
        setting = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/coca-attention"
    return None if setting is None else Path(setting).expanduser()


def tokenise(
    source: SourceSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    share: float = 0.0,
    from_held_out: bool = False,
    max_tokens: int | None = None,
    folder: Path | None = None,
) -> np.ndarray:
    """The training or the held-out documents as token ids, each followed by the end of text.

    With a folder, the tokens are in a file there, which is written once and memory-mapped, so
    memory does not grow with the text. Its name is a hash of everything that the tokens depend on:
    the settings, the tokenizer, and names, sizes and times of the source's files. If several
    processes need the same text, one writes it and the others wait. A source that ends with .npy
    is a file of token ids: a 1-D array of uint16 or uint32, made with this tokenizer.

    Args:
        source: The documents.
        tokenizer: Tokenizer with an ``eos_token``.
        share: Share of documents that are held out.
        from_held_out: Whether to tokenise the held-out documents instead of the others.
        max_tokens: Stop reading after this many tokens; required for endless streams.
        folder: Folder of the caches; None for none.

    Returns:
        (tokens,), uint16 or uint32, in memory or mapped.

    Raises:
        UserError: If the tokenizer has no end of text, the cache cannot be written, or documents of
            a file of token ids are to be held out.
        DataError: If the source cannot be read, is empty, or changes while it is read.
    """
    if source.source.endswith(TOKENS):
        if share or from_held_out:
            raise UserError(f"{source.source} {NO_DOCUMENTS}")
        return _read_tokens(source.source, tokenizer, max_tokens)
    documents = (d for d in source.documents() if held_out(d, share) == from_held_out)
    if folder is None:
        return np.concatenate([*_token_arrays(documents, tokenizer, max_tokens)])
    state, dtype = _state(source.source), _token_type(tokenizer)
    settings = [source.source, source.text_field, source.bad_lines, share, from_held_out]
    key = f"{settings} {max_tokens} {dtype} {state} {tokenizer_fingerprint(tokenizer)}"
    path = folder / "tokens" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.bin"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):  # waits for a process that writes the same
            if not path.is_file():
                with writing(path) as partial:
                    _write(partial, _token_arrays(documents, tokenizer, max_tokens), source.source)
                    if _state(source.source) != state:
                        raise DataError(f"{source.source}: changed while it was being read")
        return np.memmap(path, dtype, mode="r")
    except OSError as error:
        raise UserError(
            f"{path.parent}: tokenised text cannot be stored here: {error.strerror or error}; free "
            "disk space, choose another folder with data.cache, or keep the tokens in memory with "
            "data.cache null"
        ) from error


def _read_tokens(path: str, tokenizer: PreTrainedTokenizerBase, most: int | None) -> np.ndarray:
    """Token ids of a .npy file, memory-mapped; DataError if they are not this tokenizer's."""
    try:
        tokens = np.load(Path(path).expanduser(), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: token ids cannot be read: {error}") from error
    if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32) or not len(tokens):
        raise DataError(
            f"{path}: expected token ids, a 1-D array of uint16 or uint32, got {tokens.dtype} "
            f"with shape {tokens.shape}"
        )
    tokens = tokens[:most]
    if tokens.max() >= len(tokenizer):
        raise DataError(
            f"{path}: has token id {tokens.max()}, and the tokenizer {len(tokenizer)} entries: use "
            "the tokenizer that the file was made with"
        )
    return tokens


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of everything that determines a tokenizer's ids, independent of its folder."""
    digest = hashlib.sha256(f"{end_of_text(tokenizer)} {type(tokenizer).__name__}".encode())
    if tokenizer.is_fast:
        backend: Any = tokenizer
        rules = json.loads(backend.backend_tokenizer.to_str())
        del rules["truncation"], rules["padding"]  # state of the last call
        digest.update(json.dumps(rules).encode())
        return digest.hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).iterdir()):
            if path.name != "tokenizer_config.json":  # contains the folder
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _write(path: Path, arrays: Iterator[np.ndarray], source: str) -> None:
    with open(path, "wb") as file:
        for tokens in tqdm(arrays, f"tokenising {source}", unit=" documents", disable=None):
            file.write(tokens.data)


def _state(source: str) -> list[Any]:
    """Path, size and times of the files of a source; unlike mtime, ctime cannot be set back."""
    files = [(os.path.abspath(path), path.stat()) for path in source_files(source)]
    return [(path, x.st_size, x.st_mtime_ns, x.st_ctime_ns) for path, x in files]
