"""Tokenised text on disk: written once, reused, and never used when outdated or damaged.

A cache is a pair of files. The ``.bin`` file holds the token ids, which are memory-mapped; the
``.json`` file describes their origin, number and checksum. The ``.json`` file is written last and
its checksum must match the ``.bin`` file, so whatever a kill or a full disk leaves is replaced.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from coca_attention.errors import UserError
from coca_lab.data.documents import (
    TOKENS,
    DataError,
    Document,
    SourceSettings,
    check_held_out,
    held_out,
    source_files,
)
from coca_lab.data.tokens import end_of_text, token_array, token_arrays, token_type
from coca_lab.environment import write_json

# Increased whenever the same settings give different tokens.
FORMAT = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenText:
    """Token ids, 1-D uint16 or uint32, in memory or mapped, and the SHA-256 of their bytes."""

    tokens: np.ndarray
    sha256: str


def cache_folder(setting: str | None) -> Path | None:
    """The folder of the caches, or None for no caches.

    Args:
        setting: A folder; ``auto`` for the user's cache (XDG_CACHE_HOME, or ``~/.cache``); or None.
    """
    if setting is None:
        return None
    if setting != "auto":
        return Path(setting).expanduser()
    # XDG rules: an empty or relative path is ignored.
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".cache") / "coca-attention"


def tokenise(
    source: SourceSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    share: float = 0.0,
    from_held_out: bool = False,
    max_tokens: int | None = None,
    folder: Path | None = None,
) -> TokenText:
    """Tokenise the training or the held-out documents of a source, as `token_array` does.

    With a folder, the tokens are written to a cache file there, or found in one, and memory-mapped,
    so memory does not grow with the text. If several processes need the same text, one writes it
    and the others wait. A source that ends with .npy is a file of token ids, see `read_tokens`.

    Args:
        source: The documents.
        tokenizer: Tokenizer with an ``eos_token``.
        share: Share of documents that are held out.
        from_held_out: Whether to tokenise the held-out documents instead of the others.
        max_tokens: Stop reading after this many tokens.
        folder: Folder of the caches; None keeps the tokens in memory.

    Raises:
        UserError: If the cache cannot be written, or if documents of a file of token ids are to be
            held out.
        DataError: If the source cannot be read, is empty, or changes while it is read.
    """
    if source.source.endswith(TOKENS):
        check_held_out(source.source, share or from_held_out)
        return read_tokens(source.source, tokenizer, max_tokens=max_tokens)

    def documents() -> Iterator[Document]:
        return (d for d in source.documents() if held_out(d, share) == from_held_out)

    if folder is None:
        tokens = token_array(documents(), tokenizer, max_tokens=max_tokens)
        return TokenText(tokens, hashlib.sha256(tokens.data).hexdigest())
    files = source_files(source.source)
    place = source.source
    if place != "stdlib" and not place.startswith("hf:"):
        place = os.path.abspath(os.path.expanduser(place))
    settings = {
        "format": FORMAT,
        "source": place,
        "text_field": source.text_field,
        "bad_lines": source.bad_lines,
        "held_out": share,
        "held": from_held_out,
        "max_tokens": max_tokens,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "dtype": token_type(tokenizer).name,
    }
    name = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]
    path = folder / "tokens" / f"{name}.bin"
    try:
        while True:
            seen = _stamp(path)
            text = _read(path, settings, files)
            if text is not None:
                return text
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):
                # Another process may have written it before we got the lock.
                if _stamp(path) == seen:
                    _write(path, settings, files, documents(), tokenizer)
    except OSError as error:
        raise UserError(
            f"{path.parent}: tokenised text cannot be stored here: {error.strerror or error}; free "
            "disk space, choose another folder with data.cache, or keep the tokens in memory with "
            "data.cache null"
        ) from error


def read_tokens(
    path: str, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int | None = None
) -> TokenText:
    """Token ids of a .npy file, memory-mapped.

    Args:
        path: A 1-D array of uint16 or uint32, made with this tokenizer.
        tokenizer: Its tokenizer.
        max_tokens: Read only so many tokens.

    Raises:
        DataError: If the file is no such array.
    """
    try:
        tokens = np.load(Path(path).expanduser(), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: token ids cannot be read: {error}") from error
    if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32) or not len(tokens):
        raise DataError(
            f"{path}: expected token ids, a 1-D array of uint16 or uint32, got {tokens.dtype} "
            f"with shape {tokens.shape}"
        )
    tokens = tokens[:max_tokens]
    if tokens.max() >= len(tokenizer):
        raise DataError(
            f"{path}: has token id {tokens.max()}, and the tokenizer {len(tokenizer)} entries: use "
            "the tokenizer that the file was made with"
        )
    return TokenText(tokens, hashlib.sha256(tokens.data).hexdigest())


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of everything that determines a tokenizer's ids, independent of its folder."""
    found = hashlib.sha256(f"{end_of_text(tokenizer)} {type(tokenizer).__name__}".encode())
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if tokenizer.is_fast:
        rules = json.loads(backend.to_str())
        # State of the last call, not a property of the tokenizer.
        del rules["truncation"], rules["padding"]
        found.update(json.dumps(rules).encode())
    else:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            for path in sorted(Path(folder).iterdir()):
                if path.name != "tokenizer_config.json":  # contains the folder
                    found.update(path.read_bytes())
    return found.hexdigest()


def _read(path: Path, settings: dict[str, Any], files: list[Path]) -> TokenText | None:
    """The cache at a path; None, and a warning in the log, if it is outdated or damaged."""
    if not path.with_suffix(".json").is_file():
        return None
    try:
        about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        if about["settings"] != settings:
            problem = "it has other settings"
        elif not _same_files(about["files"], files):
            problem = "the files of the source have changed"
        else:
            # Read instead of mapped, as mapped pages would count as this process's memory.
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == about["sha256"]:
                    tokens = np.memmap(file, dtype=settings["dtype"], mode="r")
                    return TokenText(tokens, about["sha256"])
            problem = "it is truncated or damaged"
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"it cannot be read ({error})"
    log.warning("%s: tokenising the text again: %s", path, problem)
    return None


def _write(
    path: Path,
    settings: dict[str, Any],
    files: list[Path],
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write a cache; called by one process at a time."""
    source, total = settings["source"], settings["max_tokens"]
    state, content = _state(files), _content(files)
    partial = path.with_suffix(".partial")
    found, count = hashlib.sha256(), 0
    try:
        with (
            open(partial, "wb") as file,
            tqdm(
                desc=f"tokenising {source}",
                total=total,
                unit=" tokens",
                unit_scale=True,
                disable=None,
            ) as bar,
        ):
            for tokens in token_arrays(documents, tokenizer, max_tokens=total):
                file.write(tokens.data)
                found.update(tokens.data)
                count += len(tokens)
                bar.update(len(tokens))
            file.flush()
            os.fsync(file.fileno())
        if _state(files) != state:
            raise DataError(f"{source}: changed while it was being read; run the command again")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    about = {
        "settings": settings,
        "files": {"state": state, "content": content},
        "tokens": count,
        "sha256": found.hexdigest(),
    }
    write_json(path.with_suffix(".json"), about)


def _same_files(known: dict[str, str], files: list[Path]) -> bool:
    """Whether files are those of a cache: by name, size and times, or otherwise by content."""
    return known["state"] == _state(files) or known["content"] == _content(files)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name a file of the source that cannot be read, which is no fault of the cache."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _state(files: list[Path]) -> str:
    """SHA-256 of names, sizes and times: fast, and different after every change.

    Unlike the modification time, the time of the last status change (ctime) cannot be set back.
    """
    found = hashlib.sha256()
    for path in files:
        with _reading(path):
            status = path.stat()
        times = (status.st_mtime_ns, status.st_ctime_ns)
        found.update(repr((path.name, status.st_size, *times)).encode())
    return found.hexdigest()


def _content(files: list[Path]) -> str:
    """SHA-256 of names and contents."""
    found = hashlib.sha256()
    for path in files:
        with _reading(path), open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found.update(repr((path.name, digest)).encode())
    return found.hexdigest()


def _stamp(path: Path) -> tuple[int, int] | None:
    """Identifies one version of a cache; None if there is none."""
    try:
        status = path.with_suffix(".json").stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_ino
