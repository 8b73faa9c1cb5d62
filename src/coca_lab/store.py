"""Values by keys that say everything a value depends on, in an SQLite file of one process."""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from coca_attention.errors import UserError
from coca_lab.files import RESUMABLE

SCHEMA = """
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS done (
    key TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL CHECK (json_valid(value) AND value != 'null'),
    seconds REAL NOT NULL
);
"""
"""Nobody else reads a store meanwhile, so no file systems with shared memory are needed."""


class Store:
    """A mapping from JSON keys to JSON values in an SQLite file, or in memory, for one process."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._is_new = self.path is None or not self.path.exists()
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._naming():
            self._db = sqlite3.connect(self.path or ":memory:", timeout=0)
            self._db.executescript(SCHEMA)
            (pages,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if pages != "ok":
            self.close()
            raise self._damaged(pages)

    def _damaged(self, why: object) -> UserError:
        text = " ".join(str(why).split())
        return UserError(f"{self.path} is damaged ({text}); delete it to measure everything again")

    def __len__(self) -> int:
        return self._one("SELECT count(*) FROM done")[0]

    def __contains__(self, key: object) -> bool:
        return self._one("SELECT 1 FROM done WHERE key = ?", as_text(key)) is not None

    def get(self, key: object) -> Any:
        """The value of a key, or None."""
        row = self._one("SELECT value FROM done WHERE key = ?", as_text(key))
        return None if row is None else json.loads(row[0])

    def seconds(self, keys: Iterable[object]) -> float:
        """The time that the values of keys took."""
        rows = (self._one("SELECT seconds FROM done WHERE key = ?", as_text(key)) for key in keys)
        return round(sum(row[0] for row in rows if row is not None), 3)

    def put(self, keys: Sequence[object], values: Sequence[object], seconds: float = 0.0) -> None:
        """Store values of keys in one transaction, with the time that they took together."""
        assert all(value is not None for value in values), "None says that there is no value"
        each = round(seconds / max(1, len(keys)), 6)
        rows = [
            (as_text(key), json.dumps(value, allow_nan=False), each)
            for key, value in zip(keys, values, strict=True)
        ]
        with self._naming(), self._db:
            self._db.executemany("INSERT OR REPLACE INTO done VALUES (?, ?, ?)", rows)

    def forget(self, keys: Iterable[object]) -> None:
        """Remove the values of keys."""
        with self._naming(), self._db:
            rows = [(as_text(key),) for key in keys]
            self._db.executemany("DELETE FROM done WHERE key = ?", rows)

    def close(self) -> None:
        """Let other processes use the file."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Close the file, and delete it if it has no values; after an error only if it is new."""
        empty = (error is None or self._is_new) and not len(self)
        self.close()
        if empty and self.path is not None:
            self.path.unlink(missing_ok=True)

    def _one(self, command: str, *values: str) -> Any:
        with self._naming():
            return self._db.execute(command, values).fetchone()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Turn errors of SQLite into UserErrors that name the file."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise UserError(
                    f"{self.path} is in use by another process: wait until it ends"
                ) from error
            if "column" in str(error):  # of something else
                raise self._damaged(error) from error
            raise UserError(f"{self.path}: {error}: {RESUMABLE}") from error
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from error


def as_text(key: object) -> str:
    """A key as text: equal for equal keys."""
    return json.dumps(key, sort_keys=True)
