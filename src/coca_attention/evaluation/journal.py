"""Finished parts of an evaluation, written to disk as it runs: little is lost when it is killed.

The file has one JSON object per line with a key and a value. A key contains everything that its
value depends on, so a value that is found is never out of date.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from coca_attention.environment import naming
from coca_attention.errors import UserError


class Journal:
    """An append-only mapping from JSON keys to JSON values.

    Args:
        path: The file; without one, values are kept in memory only.

    Raises:
        UserError: If the file cannot be read or is damaged other than in its last line.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._values: dict[str, Any] = {}
        self._used: set[str] = set()
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def _read(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        whole = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                entry = json.loads(line)
                self._values[_text(entry["key"])] = entry["value"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise UserError(
                    f"{path}: line {number} is damaged; delete the file to repeat the whole "
                    "evaluation, or the line to repeat that part"
                ) from error
        if whole < len(content):
            # An incomplete last line: the process was killed while writing it.
            with open(path, "r+b") as file:
                file.truncate(whole)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Any) -> Any:
        """The value of a key, or None."""
        self._used.add(_text(key))
        return self._values.get(_text(key))

    def put(self, key: Any, value: Any) -> None:
        """Store a value; it is on disk when this returns."""
        if self.path is not None:
            line = json.dumps({"key": key, "value": value}, allow_nan=False) + "\n"
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with naming(self.path), open(self.path, "a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        self._used.add(_text(key))
        self._values[_text(key)] = value

    def remove(self) -> None:
        """Delete the file, once its values are in a result file; not if others are in it too."""
        if self.path is not None and set(self._values) <= self._used:
            self.path.unlink(missing_ok=True)


def _text(key: Any) -> str:
    return json.dumps(key, sort_keys=True)


def fingerprint(path: str | Path) -> str:
    """Identifies the model in a folder, so that results of a replaced model are not reused.

    A hash of the names, sizes and times of the model's files and of its configuration. A name
    that is not a folder is returned as it is.
    """
    folder = Path(path)
    if not folder.is_dir():
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
