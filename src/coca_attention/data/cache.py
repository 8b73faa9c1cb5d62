"""Tokenised text on disk: made once, found again, never used when stale or damaged.

A cache is a pair of files. One holds the token ids as they lie in memory (``.bin``), to be mapped
and not read; the other (``.json``) names what they were made from, their number and their
checksum. The ``.json`` is written last and has to fit the ``.bin`` to the byte, so whatever a kill
or a full disk leaves behind is made again.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from coca_attention.data.documents import (
    DataError,
    Document,
    SourceSettings,
    held_out,
    source_files,
)
from coca_attention.data.tokens import end_of_text, token_array, token_arrays, token_type
from coca_attention.environment import write_json
from coca_attention.errors import UserError

# To be raised when the same settings come to give other tokens.
FORMAT = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenText:
    """Token ids, 1-D uint16 or uint32, in memory or mapped; and the SHA-256 of their bytes."""

    tokens: np.ndarray
    sha256: str


def cache_folder(setting: str | None) -> Path | None:
    """Where caches are kept.

    Args:
        setting: A folder; ``auto`` for the user's own (XDG_CACHE_HOME, else ``~/.cache``); None for
            no caches.
    """
    if setting is None:
        return None
    if setting != "auto":
        return Path(setting).expanduser()
    # The XDG rules: a path that is empty or relative does not count.
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".cache") / "coca-attention"


def tokenised(
    source: SourceSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    share: float = 0.0,
    held: bool = False,
    max_tokens: int | None = None,
    folder: Path | None = None,
) -> TokenText:
    """The documents of a source that are not held out, or those that are, joined by `token_array`.

    With a folder they are tokenised into a cache there, or one is found, and mapped: memory does
    not grow with the text. Processes that ask for the same text wait until one has written it.

    Args:
        source: Which documents.
        tokenizer: Tokenizer with an ``eos_token``.
        share: Share of documents held out.
        held: Whether those are wanted, not the others.
        max_tokens: Stop reading after this many tokens.
        folder: Where caches are kept; None keeps the tokens in memory.

    Raises:
        UserError: If the cache cannot be written.
        DataError: If the source cannot be read, is empty, or changes while it is read.
    """

    def documents() -> Iterator[Document]:
        return (d for d in source.documents() if held_out(d, share) == held)

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
        "held": held,
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
                # Another process may have made it between the look and the lock.
                if _stamp(path) == seen:
                    _write(path, settings, files, documents(), tokenizer)
    except OSError as error:
        raise UserError(
            f"{path.parent}: tokenised text cannot be kept here: {error.strerror or error}; make "
            "room, name another folder by data.cache, or keep the tokens in memory by data.cache "
            "null"
        ) from error


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of all that decides a tokenizer's ids, wherever it was loaded from."""
    found = hashlib.sha256(f"{end_of_text(tokenizer)} {type(tokenizer).__name__}".encode())
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if tokenizer.is_fast:
        rules = json.loads(backend.to_str())
        # What the last call asked for, not what the tokenizer is.
        del rules["truncation"], rules["padding"]
        found.update(json.dumps(rules).encode())
    else:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            for path in sorted(Path(folder).iterdir()):
                if path.name != "tokenizer_config.json":  # holds where it was loaded from
                    found.update(path.read_bytes())
    return found.hexdigest()


def _read(path: Path, settings: dict[str, Any], files: list[Path]) -> TokenText | None:
    """The cache at a path if it is whole and of this source; else None, and why in the log."""
    if not path.with_suffix(".json").is_file():
        return None
    try:
        about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        if about["settings"] != settings:
            problem = "it was made with other settings"
        elif not _same_files(about["files"], files):
            problem = "the files of the source have changed"
        else:
            # Read, not mapped, so that the whole file does not count as this process's memory.
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == about["sha256"]:
                    tokens = np.memmap(file, dtype=settings["dtype"], mode="r")
                    return TokenText(tokens, about["sha256"])
            problem = "it is cut short or damaged"
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"it cannot be read ({error})"
    log.warning("%s: tokenised text is made again: %s", path, problem)
    return None


def _write(
    path: Path,
    settings: dict[str, Any],
    files: list[Path],
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Make a cache; called by one process at a time."""
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
            raise DataError(f"{source}: changed while it was read; start again")
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
    """Whether files are those of a cache: by name, size and times, or else by what they hold."""
    return known["state"] == _state(files) or known["content"] == _content(files)


def _state(files: list[Path]) -> str:
    """SHA-256 of names, sizes and times: quick, and another one after every change.

    The time of the last change of status cannot be set back as that of the content can.
    """
    found = hashlib.sha256()
    for path in files:
        status = path.stat()
        times = (status.st_mtime_ns, status.st_ctime_ns)
        found.update(repr((path.name, status.st_size, *times)).encode())
    return found.hexdigest()


def _content(files: list[Path]) -> str:
    """SHA-256 of names and contents."""
    found = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found.update(repr((path.name, digest)).encode())
    return found.hexdigest()


def _stamp(path: Path) -> tuple[int, int] | None:
    """Tells one writing of a cache from the next."""
    try:
        status = path.with_suffix(".json").stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_ino
