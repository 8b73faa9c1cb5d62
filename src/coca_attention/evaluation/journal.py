"""What an evaluation has finished, kept on disk as it goes: killed at any moment, little is lost.

One JSON object a line, a key and a value each. Keys say everything that a value depends on, so an
entry is either right or not found: nothing stale is ever used.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from coca_attention.errors import UserError


class Journal:
    """A mapping from JSON keys to JSON values that only grows.

    Args:
        path: Its file; without one, nothing is kept.

    Raises:
        UserError: If the file cannot be read or is damaged other than in its last line.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._values: dict[str, Any] = {}
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
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{path}: line {number} is damaged ({error!r}); remove the file to evaluate "
                    "everything anew, or the line to evaluate that part anew"
                ) from error
        if whole < len(content):
            # The write that a kill cut short.
            with open(path, "r+b") as file:
                file.truncate(whole)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Any) -> Any:
        """The value of a key, or None."""
        return self._values.get(_text(key))

    def put(self, key: Any, value: Any) -> None:
        """Keep a value; it is on disk when this returns."""
        if self.path is not None:
            line = json.dumps({"key": key, "value": value}, allow_nan=False) + "\n"
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        self._values[_text(key)] = value

    def remove(self) -> None:
        """Remove the file, when its values have gone into a result file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _text(key: Any) -> str:
    return json.dumps(key, sort_keys=True)


def fingerprint(path: str | Path) -> str:
    """What tells a model's folder from the same folder with another model in it.

    The names, sizes and times of its files, and the content of its configuration; a name that is
    no folder stands for itself.
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
