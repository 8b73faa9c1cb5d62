"""Finished parts of an evaluation, written to disk as it runs: little is lost when it is killed.

The file has one JSON object per line with a key and a value. A key contains everything that its
value depends on, so a value that is found is never out of date.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from coca_attention.errors import UserError
from coca_attention.models.hub import check_name
from coca_lab.environment import file_locks, naming


class Journal:
    """An append-only mapping from JSON keys to JSON values, which several processes can write.

    Args:
        path: The file; without one, values are kept in memory only.

    Attributes:
        values: By the text of their keys (`key_text`).

    Raises:
        UserError: If the file cannot be read or is damaged other than in its last line.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.values: dict[str, Any] = {}
        self._seconds: dict[str, float] = {}
        self._used: set[str] = set()
        self._bytes = self._lines = 0  # read so far
        self.refresh()

    def refresh(self) -> None:
        """Read what other processes have written."""
        if self.path is not None and self.path.exists():
            with self._reading(self.path), open(self.path, "rb") as file:
                _lock(file, shared=True)
                self._read(file)

    def _read(self, file: IO[bytes]) -> None:
        assert self.path is not None
        if os.fstat(file.fileno()).st_size < self._bytes:
            self._bytes = self._lines = 0  # it was deleted, and begun again
        file.seek(self._bytes)
        content = file.read()
        # An incomplete last line is one of a killed process: the next one that writes removes it.
        whole = content[: content.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._lines += 1
            try:
                entry = json.loads(line)
                text = key_text(entry["key"])
                self.values[text] = entry["value"]
                self._seconds[text] = entry.get("seconds", 0.0)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise UserError(
                    f"{self.path}: line {self._lines} is damaged; delete the file to repeat the "
                    "whole evaluation, or the line to repeat that part"
                ) from error
        self._bytes += len(whole)

    @staticmethod
    @contextmanager
    def _reading(path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error

    def __len__(self) -> int:
        return len(self.values)

    def has(self, text: str) -> bool:
        """Whether there is a value; the key is given as `key_text` writes it."""
        self._used.add(text)
        return text in self.values

    def get(self, key: Any) -> Any:
        """The value of a key, or None."""
        self._used.add(key_text(key))
        return self.values.get(key_text(key))

    def put(self, key: Any, value: Any) -> None:
        """Store a value; it is on disk when this returns."""
        self.put_all([(key, value)])

    def put_all(self, entries: Sequence[tuple[Any, Any]], seconds: float = 0.0) -> None:
        """Store values of keys, and the time that they took together."""
        each = round(seconds / max(1, len(entries)), 6)
        if self.path is not None:
            lines = "".join(
                json.dumps({"key": key, "value": value, "seconds": each}, allow_nan=False) + "\n"
                for key, value in entries
            )
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with naming(self.path), open(self.path, "a+b") as file:
                _lock(file)
                self._read(file)
                file.truncate(self._bytes)
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
                self._bytes += len(lines.encode())
                self._lines += len(entries)
        for key, value in entries:
            text = key_text(key)
            self._used.add(text)
            self.values[text], self._seconds[text] = value, each

    def seconds(self, text: str) -> float:
        """The time that a value took; its key is given as `key_text` writes it."""
        return self._seconds.get(text, 0.0)

    def remove(self) -> None:
        """Delete the file, once its values are in a result file; not if others are in it too."""
        if self.path is not None and set(self.values) <= self._used:
            self.path.unlink(missing_ok=True)


def _lock(file: IO[bytes], *, shared: bool = False) -> None:
    """Keep writers out of a file until it is closed; network file systems then show it as it is."""
    with suppress(OSError):  # a file system without locks, on which `Claims` allows one process
        locks = file_locks()
        locks.flock(file, locks.LOCK_SH if shared else locks.LOCK_EX)


def key_text(key: Any) -> str:
    """A key as text: equal for equal keys."""
    return json.dumps(key, sort_keys=True)


def fingerprint(path: str | Path) -> str:
    """Identifies a model, so that results of one that was replaced or updated are not reused.

    Args:
        path: A folder: a hash of the names, sizes and times of the model's files and of its
            configuration. Or a name on the Hub: with the commit that is loaded, which the Hub is
            asked for if it answers.

    Raises:
        UserError: If the name leads nowhere.
    """
    folder = Path(path)
    if not folder.is_dir():
        from transformers.utils import cached_file

        check_name(str(path))
        with suppress(OSError):
            config = cached_file(str(path), "config.json")
            return f"{path} {Path(str(config)).parent.name}"
        return str(path)
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in (".safetensors", ".json") and file.is_file():
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    config = folder / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    return digest.hexdigest()
