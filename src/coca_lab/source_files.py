"""The files of a source of text; nothing here imports torch.

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
import io
import json
import lzma
import os
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow

from coca_attention.errors import UserError

RECORD_FILES = (".jsonl", ".ndjson", ".json")
"""Endings of files with a record in each line, or, the last, with a list of records."""
TABLES = (".parquet", ".arrow")
"""Endings of files with a record in each row, which have a compression of their own."""
KNOWN = (".txt", *RECORD_FILES, *TABLES)
PACKED = {".gz": "gzip", ".xz": "xz", ".zst": "zstd"}
STATE = "state.json"
"""Of a folder that `datasets` has saved: names the files of its table."""
SAVED = (STATE, "dataset_dict.json", "dataset_info.json")
"""Files without records that `datasets` saves beside them."""

# Folders of the standard library with tests or tables of numbers, or missing on some systems:
# without them, the text is nearly the same on every machine with the same Python.
STDLIB_EXCLUDED = {
    "__pycache__", "config", "distutils", "encodings", "ensurepip", "idlelib", "lib-dynload",
    "lib2to3", "pydoc_data", "site-packages", "test", "tests", "tkinter", "turtledemo",
}  # fmt: skip


class DataError(UserError):
    """A data source cannot be read or has too little text."""


def source_files(source: str) -> list[Path]:
    """Files of a source, in reading order; DataError if there are none, or not of a known type."""
    if source == "stdlib":
        topics = Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
        return [*stdlib_files(), *([topics] if topics.is_file() else [])]
    if source.startswith("hf:"):
        folder = Path(hub_parts(source)[0])
        return sorted(path for path in folder.rglob("*") if path.is_file())
    return find_files(source)[0]


def find_files(source: str) -> tuple[list[Path], list[Path]]:
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


def kind_of(path: Path) -> tuple[str, str | None]:
    """The ending of a file without that of its compression, and the compression."""
    name = path.name.lower()
    packing = PACKED.get(path.suffix.lower())
    kind = Path(f"a{name.removesuffix(path.suffix.lower())}").suffix if packing else ""
    return kind or path.suffix.lower() or name, packing


def _is_known(path: Path) -> bool:
    """Whether a file of a folder is text or has records, as far as its name and its head say."""
    kind, packing = kind_of(path)
    if path.name in SAVED:
        return False
    if kind == ".arrow":  # a part of the table that its folder was saved with, no cache there
        with suppress(OSError, ValueError, LookupError, TypeError):  # no such folder
            state = json.loads((path.parent / STATE).read_bytes())
            return not packing and path.name in [file["filename"] for file in state["_data_files"]]
        return False
    if kind != ".json":
        return kind in KNOWN and (kind not in TABLES or not packing)
    # Settings, such as config.json, begin with a line that has nothing but a brace.
    return not path.is_file() or next(lines_of(path), "").strip() != "{"


def lines_of(path: Path) -> Iterator[str]:
    """Lines of a text file, decompressed and decoded; DataError if it is malformed."""
    packing = kind_of(path)[1]
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


def hub_parts(source: str) -> list[str]:
    """NAME, CONFIG and SPLIT of a dataset, as far as they are given."""
    parts = source.removeprefix("hf:").split(":")
    if not parts[0] or len(parts) > 3:
        raise DataError(f"{source}: expected hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    return parts


def stdlib_files() -> list[Path]:
    """The modules of the standard library that are read."""
    found = []
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = [name for name in folders if name not in STDLIB_EXCLUDED]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)
