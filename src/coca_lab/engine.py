"""Many independent items of work, computed in this process or on Ray; values stay in SQLite.

A `Store` keeps values by keys that say everything a value depends on, so a command that was ended
continues with what is missing. The process that starts the work, the driver, alone writes it.
"""

import importlib.util
import json
import logging
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from coca_attention.errors import UserError, install
from coca_lab.files import RESUMABLE, known_problem

Progress = Callable[[str, int, int], Any]
"""Called with a line of text, the work done so far and the work in all."""

EXTENSIONS = "COCA_IMPORT"
"""The environment variable with the names of the user's own modules, separated by commas."""
ATTEMPTS = 3
"""How often an item is computed before it has failed."""
PATIENCE = 20.0
"""Seconds in which a cluster has to answer."""


def import_extensions() -> None:
    """Import the user's own modules, for what they register; every process begins with it."""
    for name in filter(None, os.environ.get(EXTENSIONS, "").split(",")):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise UserError(
                f"{EXTENSIONS}={name}: {error}; install it, or set PYTHONPATH to its folder"
            ) from error


@dataclass(frozen=True)
class Item:
    """Work that one process does without interruption."""

    keys: Sequence[Any]  # of its values in the store: JSON that says what the values depend on
    work: Callable[[list[Any]], list[Any]]
    """From the arguments of the keys whose values are missing to these values, none of them None.
    Items with the same object share what it holds. Ray has to be able to pickle it."""
    arguments: Sequence[Any]  # one for each key
    cost: int = 1  # tokens to read
    label: str = ""  # what it is part of, for messages

    def missing(self, store: "Store") -> tuple[list[Any], list[Any]]:
        """The keys that the store does not have, and their arguments."""
        indices = [index for index, key in enumerate(self.keys) if key not in store]
        return [self.keys[index] for index in indices], [self.arguments[i] for i in indices]


SCHEMA = """
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS done (key TEXT PRIMARY KEY, value TEXT, seconds REAL);
"""
"""Nobody else reads a store meanwhile, so no file systems with shared memory are needed."""
COLUMNS = ["key", "value", "seconds"]


class Store:
    """A mapping from JSON keys to JSON values in an SQLite file, or in memory, for one process."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._naming():
            self._db = sqlite3.connect(self.path or ":memory:", timeout=0)
            self._db.executescript(SCHEMA)
            self._check()

    def _check(self) -> None:
        """Raise UserError unless every page and every value can be read."""
        columns = [row[1] for row in self._db.execute("PRAGMA table_info(done)")]
        if columns != COLUMNS:
            self.close()
            raise self._damaged(f"it has a table of {', '.join(columns)}")
        (pages,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        (bad,) = self._db.execute(
            "SELECT count(*) FROM done WHERE key IS NULL OR seconds IS NULL "
            "OR typeof(value) != 'text' OR value = 'null' OR NOT json_valid(value)"
        ).fetchone()
        if pages != "ok" or bad:
            self.close()
            raise self._damaged(f"{bad} values are no JSON" if bad else pages)

    def _damaged(self, why: object) -> UserError:
        return UserError(f"{self.path} is damaged ({why}); delete it to repeat the whole work")

    def __len__(self) -> int:
        return self._one("SELECT count(*) FROM done")[0]

    def __contains__(self, key: Any) -> bool:
        return self._one("SELECT 1 FROM done WHERE key = ?", _text(key)) is not None

    def get(self, key: Any) -> Any:
        """The value of a key, or None."""
        row = self._one("SELECT value FROM done WHERE key = ?", _text(key))
        return None if row is None else json.loads(row[0])

    def seconds(self, key: Any) -> float:
        """The time that the value of a key took."""
        row = self._one("SELECT seconds FROM done WHERE key = ?", _text(key))
        return 0.0 if row is None else row[0]

    def put(self, keys: Sequence[Any], values: Sequence[Any], seconds: float = 0.0) -> None:
        """Store values of keys in one transaction, with the time that they took together."""
        assert all(value is not None for value in values), "None says that there is no value"
        each = round(seconds / max(1, len(keys)), 6)
        rows = [
            (_text(key), json.dumps(value, allow_nan=False), each)
            for key, value in zip(keys, values, strict=True)
        ]
        with self._naming(), self._db:
            self._db.executemany("INSERT OR REPLACE INTO done VALUES (?, ?, ?)", rows)

    def remove(self, keys: Sequence[Any]) -> None:
        """Forget keys, close the file, and delete it if it has no others."""
        with self._naming(), self._db:
            rows = [(_text(key),) for key in keys]
            self._db.executemany("DELETE FROM done WHERE key = ?", rows)
        empty = len(self) == 0
        self.close()
        if empty and self.path is not None:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let other processes use the file."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _one(self, command: str, *values: Any) -> Any:
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
                    f"{self.path} is in use by another process: wait until it ends, or choose "
                    "another --output"
                ) from error
            raise UserError(f"{self.path}: {error}: {RESUMABLE}") from error
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from error


def _text(key: Any) -> str:
    """A key as text: equal for equal keys."""
    return json.dumps(key, sort_keys=True)


class Engine:
    """Computes items in this process, one after the other, and keeps their values in a store."""

    def __init__(
        self, store: Store | None = None, progress: Progress = lambda line, done, total: None
    ) -> None:
        self.store = Store() if store is None else store
        self.progress = progress
        self.used: list[Any] = []
        """Keys of all items that it was given."""

    def run(self, items: Sequence[Item]) -> list[Any]:
        """The values of all keys; once all is done, a UserError names the first that failed."""
        failed = self.compute(items)
        if failed:
            item, error = failed[0]
            label = f"{item.label}: " if item.label else ""
            more = f" ({len(failed):,} of {len(items):,} items failed)" if len(items) > 1 else ""
            raise UserError(f"{label}{problem(error)}{more}") from error
        return [self.store.get(key) for item in items for key in item.keys]

    def compute(self, items: Sequence[Item]) -> list[tuple[Item, Exception]]:
        """Compute what is missing; the items that failed: with a UserError, or three times."""
        self.used += [key for item in items for key in item.keys]
        items = [*{_text(item.keys): item for item in items}.values()]  # those with the same keys
        pending = [item for item in items if item.missing(self.store)[0]]
        total, left = (sum(item.cost for item in each) for each in (items, pending))
        count, done, started = len(items) - len(pending), total - left, time.monotonic()
        if items:
            self.progress(f"{count:,} of {len(items):,} items", done, total)
        failed: list[tuple[Item, Exception]] = []
        for attempt in range(1, ATTEMPTS + 1):
            again = []
            for item, values, seconds in self._outcomes(pending):
                if isinstance(values, Exception):
                    if isinstance(values, UserError) or attempt == ATTEMPTS:
                        failed.append((item, values))
                    else:
                        again.append(item)
                    continue
                self.store.put(item.missing(self.store)[0], values, seconds)
                count, done = count + 1, done + item.cost
                rate = (done - total + left) / max(time.monotonic() - started, 1e-9)
                line = f"{count:,} of {len(items):,} items, {rate:,.0f} tokens/s"
                self.progress(f"{line}, {item.label}" if item.label else line, done, total)
            pending = again
        return failed

    def seconds(self, items: Sequence[Item]) -> float:
        """The time that finished items took."""
        return round(sum(self.store.seconds(key) for item in items for key in item.keys), 3)

    def _outcomes(self, items: Sequence[Item]) -> Iterator[tuple[Item, Any, float]]:
        """Every item with its missing values, or an exception, and the seconds it took."""
        for item in items:
            yield item, *_compute(item.work, item.missing(self.store)[1])


def _compute(work: Callable[[list[Any]], list[Any]], arguments: list[Any]) -> tuple[Any, float]:
    """The values, or an exception, and the seconds they took."""
    started = time.perf_counter()
    try:
        return work(arguments), time.perf_counter() - started
    except Exception as error:
        return error, 0.0


def problem(error: Exception) -> str:
    """Why an item failed, in one line."""
    if isinstance(error, UserError):
        return str(error)
    text = " ".join(str(error).split())[:300]
    return known_problem(error) or f"unexpected {type(error).__name__}: {text}"


class RayEngine(Engine):
    """Computes items on Ray, at an address or started here; by default one GPU each, if any."""

    def __init__(
        self,
        store: Store | None = None,
        progress: Progress = lambda line, done, total: None,
        *,
        address: str = "",
        num_cpus: int = 1,
        num_gpus: float | None = None,
    ) -> None:
        super().__init__(store, progress)
        _connect(address)
        import ray  # an optional package

        there = ray.cluster_resources()
        if num_gpus is None:
            num_gpus = 1 if there.get("GPU", 0) >= 1 else 0
        for kind, number in (("CPU", num_cpus), ("GPU", num_gpus)):
            if number > there.get(kind, 0):
                raise UserError(
                    f"an item needs {number:g} {kind}s and Ray has {there.get(kind, 0):g}: change "
                    f"num_{kind.lower()}s, or add machines"
                )
        # Processes compute many items each (max_calls), and so keep a model between them.
        options: Any = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_calls": 0}
        self._remote: Any = ray.remote(**options, max_retries=0)(_compute_remotely)

    def _outcomes(self, items: Sequence[Item]) -> Iterator[tuple[Item, Any, float]]:
        import ray  # an optional package
        from ray.exceptions import RayError

        copies = {id(item.work): item.work for item in items}
        copies = {name: ray.put(work) for name, work in copies.items()}
        running: dict[Any, Item] = {}
        for item in items:
            _, arguments = item.missing(self.store)
            running[self._remote.remote(os.getcwd(), [copies[id(item.work)]], arguments)] = item
        while running:
            (promise,), _ = ray.wait([*running], num_returns=1)
            item = running.pop(promise)
            try:
                yield item, *ray.get(promise)
            except RayError as error:  # the process has died
                yield item, error, 0.0


def _compute_remotely(folder: str, copy: list[Any], arguments: list[Any]) -> tuple[Any, float]:
    """`_compute` in a process of Ray; the reference is in a list, lest Ray reads it every time."""
    if Path(folder).is_dir():
        os.chdir(folder)  # where the paths of the driver begin
    return _compute(lambda each: _read_work(copy[0])(each), arguments)


@lru_cache(maxsize=1)
def _read_work(copy: Any) -> Any:
    """The work behind a reference; a process of Ray keeps one."""
    import ray  # an optional package

    import_extensions()
    return ray.get(copy)


def _connect(address: str) -> None:
    """Start Ray or join a cluster; what has been started ends with this process."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"this needs Ray: {install('ray')}")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray  # an optional package

    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host:
            socket.create_connection((host, int(port)), PATIENCE).close()
        if ray.is_initialized():
            return
        ray.init(
            address=address or "local",
            include_dashboard=False if not address else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (OSError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(f"Ray at {address or 'this machine'} does not answer: {text}") from error
