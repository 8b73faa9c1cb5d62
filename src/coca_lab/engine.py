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
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from coca_attention.errors import RESUMABLE, TemporaryError, UserError, install, known_problem
from coca_lab.extensions import import_extensions

Progress = Callable[[str, int, int], Any]
"""Called with a line of text, the work done so far and the work in all."""

ATTEMPTS = 3
"""How often an item is computed before it has failed."""
PATIENCE = 20.0
"""Seconds in which a cluster has to answer."""
RAY_HELP = "Compute on Ray: started here, or the cluster at an address (--ray HOST:PORT)."


@dataclass(frozen=True)
class Item:
    """Work that one process does without interruption.

    Attributes:
        keys: Keys of its values in the store: JSON values that say what the values depend on.
        work: From the arguments of the keys whose values are missing to the values, which do not
            depend on which others are missing. Items that share it (the same object) share what it
            holds. Ray has to be able to pickle it.
        arguments: An argument for each key.
        cost: Tokens to read.
        label: What it is part of, for messages.
        group: Items of a group use the same model; a process prefers to stay with it.
    """

    keys: Sequence[Any]
    work: Callable[[list[Any]], list[Any]]
    arguments: Sequence[Any]
    cost: int = 1
    label: str = ""
    group: str = ""

    def missing(self, store: "Store") -> list[int]:
        """Indices of the keys that the store does not have."""
        return [index for index, key in enumerate(self.keys) if key not in store]


class Store:
    """A mapping from JSON keys to JSON values in an SQLite file, which one process uses at a time.

    Args:
        path: The file; without one, values are kept in memory.

    Raises:
        UserError: If another process uses the file, or it is damaged.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._naming():
            self._db = sqlite3.connect(self.path or ":memory:", timeout=0, isolation_level=None)
            # Nobody else reads it meanwhile, so no file systems with shared memory are needed.
            for command in (
                "PRAGMA locking_mode = EXCLUSIVE",
                "PRAGMA journal_mode = WAL",
                "PRAGMA synchronous = NORMAL",
                "BEGIN IMMEDIATE",
                "CREATE TABLE IF NOT EXISTS done (key TEXT PRIMARY KEY, value TEXT, seconds REAL)",
                "COMMIT",
            ):
                self._db.execute(command)

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
        each = round(seconds / max(1, len(keys)), 6)
        rows = [
            (_text(key), json.dumps(value, allow_nan=False), each)
            for key, value in zip(keys, values, strict=True)
        ]
        with self._naming():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.executemany("INSERT OR REPLACE INTO done VALUES (?, ?, ?)", rows)
                self._db.execute("COMMIT")
            except sqlite3.Error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def remove(self, keys: Sequence[Any]) -> None:
        """Forget keys, close the file, and delete it if it has no others."""
        with self._naming():
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
                raise TemporaryError(
                    f"{self.path} is in use by another process: wait until it ends, or choose "
                    "another --output"
                ) from error
            raise TemporaryError(f"{self.path}: {error}: {RESUMABLE}") from error
        except sqlite3.DatabaseError as error:
            raise UserError(
                f"{self.path} is damaged ({error}); delete it to repeat the whole evaluation"
            ) from error


def _text(key: Any) -> str:
    """A key as text: equal for equal keys."""
    return json.dumps(key, sort_keys=True)


class Engine:
    """Computes items in this process, one after the other.

    Args:
        store: Keeps the values; by default in memory.
        progress: Called when an item is finished, with a line for the whole, and the tokens read
            so far and in all.
    """

    def __init__(
        self, store: Store | None = None, progress: Progress = lambda line, done, total: None
    ) -> None:
        self.store = Store() if store is None else store
        self.progress = progress
        self.used: list[Any] = []
        """Keys of all items that it was given."""

    def run(self, items: Sequence[Item]) -> list[Any]:
        """The values of all keys of some items; what the store does not have is computed.

        Raises:
            UserError: If an item has failed, once all others are finished; it names the first.
        """
        failed = self.compute(items)
        if failed:
            item, error = failed[0]
            label = f"{item.label}: " if item.label else ""
            more = f" ({len(failed):,} of {len(items):,} items failed)" if len(items) > 1 else ""
            raise UserError(f"{label}{problem(error)}{more}") from error
        return [self.store.get(key) for item in items for key in item.keys]

    def compute(self, items: Sequence[Item]) -> list[tuple[Item, Exception]]:
        """Compute what the store does not have yet.

        Returns:
            The items that failed: with a UserError, which would come again, or three times.
        """
        self.used += [key for item in items for key in item.keys]
        pending = [item for item in items if item.missing(self.store)]
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
                keys = [item.keys[index] for index in item.missing(self.store)]
                self.store.put(keys, values, seconds)
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
            arguments = [item.arguments[index] for index in item.missing(self.store)]
            values, seconds = _compute(item.work, arguments)
            yield item, values, seconds


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
    """Computes items on Ray: one that starts here, or that of a cluster.

    Each of its processes computes one item at a time. An item whose process dies is computed again
    by another one.

    Args:
        store: As for `Engine`.
        progress: As for `Engine`.
        address: Of a cluster; empty to start Ray with the cores and GPUs of this machine.
        num_cpus: Cores, and threads, of an item.
        num_gpus: GPUs of an item; by default one if there are GPUs.

    Raises:
        UserError: If Ray is not installed, the cluster does not answer, or has less than one item
            needs.
    """

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
        needed = {"CPU": num_cpus, "GPU": num_gpus}
        for kind, number in needed.items():
            if number > there.get(kind, 0):
                raise UserError(
                    f"an item needs {number:g} {kind}s and Ray has {there.get(kind, 0):g}: change "
                    f"num_{kind.lower()}s, or add machines"
                )
        self._places = int(min(there[k] // number for k, number in needed.items() if number))
        self._actor: Any = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus)(_Worker)

    def _outcomes(self, items: Sequence[Item]) -> Iterator[tuple[Item, Any, float]]:
        import ray  # an optional package
        from ray.exceptions import RayError, RayTaskError

        queue, works = _Queue(items), _Works(items)
        # By what Ray has promised: the process, and the item it computes; at first, only to start.
        running: dict[Any, tuple[Any, Item | None]] = {}

        def start() -> None:
            worker = self._actor.remote(os.getcwd())
            running[worker.ready.remote()] = (worker, None)

        for _ in range(min(self._places, len(items))):
            start()
        left, unstarted = len(items), 0
        while left:
            (promise,), _ = ray.wait([*running], num_returns=1)
            worker, item = running.pop(promise)
            try:
                values, seconds = ray.get(promise)
            except RayTaskError as error:  # the process lacks what it needs to work
                values, seconds = error.cause, 0.0
            except RayError as error:  # the process has died
                values, seconds, worker = error, 0.0, None
            if item is None and worker is not None and isinstance(values, Exception):
                raise values  # what was added from outside cannot be imported
            if item is not None:
                works.release(item)
                left -= 1
                yield item, values, seconds
            unstarted = unstarted + 1 if worker is None and item is None else 0
            if unstarted > ATTEMPTS * self._places:
                raise UserError(f"processes of Ray end before they work: {problem(values)}")
            if worker is None:
                start()
            elif following := queue.take(item.group if item else None):
                missing = [following.arguments[i] for i in following.missing(self.store)]
                promise = worker.compute.remote([works.hold(following)], missing)
                running[promise] = (worker, following)


def start_engine(
    store: Store, progress: Progress | None, ray: str | None, **resources: Any
) -> Engine:
    """An engine in this process, or on Ray where ``ray`` is an address or empty."""
    progress = progress or (lambda line, done, total: None)
    if ray is None:
        return Engine(store, progress)
    return RayEngine(store, progress, address=ray, **resources)


def take_ray(words: list[str]) -> tuple[list[str], str | None]:
    """Words of a command without ``--ray [ADDRESS]``, and the address; None without the option."""
    rest, address = list(words), None
    for index, word in enumerate(words):
        if word == "--ray" or word.startswith("--ray="):
            following = words[index + 1 : index + 2]
            alone = word == "--ray" and following and not following[0].startswith("-")
            address = following[0] if alone else word[len("--ray=") :]
            del rest[index : index + 1 + bool(alone)]
            break
    return rest, address


class _Worker:
    """A process of Ray, which keeps what it works with between items."""

    def __init__(self, folder: str) -> None:
        if Path(folder).is_dir():
            os.chdir(folder)  # where the paths of the driver begin
        self._held: tuple[Any, Any] = (None, None)

    def ready(self) -> tuple[Any, float]:
        """Import what was added from outside; None, or an exception."""
        return _compute(lambda _: import_extensions(), [])  # pyright: ignore[reportArgumentType]

    def compute(self, work: list[Any], arguments: list[Any]) -> tuple[Any, float]:
        """Values for arguments, and the seconds they took."""
        import ray  # an optional package

        (reference,) = work
        if self._held[0] != reference:
            self._held = (None, None)  # frees it before the next one is read
            self._held = (reference, ray.get(reference))
        return _compute(self._held[1], arguments)


class _Queue:
    """Items by group, those that cost most first."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._groups: dict[str, deque[Item]] = defaultdict(deque)
        self._taken: Counter[str] = Counter()
        for item in sorted(items, key=lambda item: -item.cost):
            self._groups[item.group].append(item)

    def take(self, group: str | None) -> Item | None:
        """The next item of a group, or of that which has the fewest processes."""
        if group is None or not self._groups[group]:
            rest = [name for name, items in self._groups.items() if items]
            if not rest:
                return None
            group = min(rest, key=self._taken.__getitem__)
            self._taken[group] += 1
        return self._groups[group].popleft()


class _Works:
    """What items share, put into Ray's memory once and as long as it is needed."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._uses = Counter(id(item.work) for item in items)
        self._references: dict[int, Any] = {}

    def hold(self, item: Item) -> Any:
        """Ray's reference to an item's work."""
        import ray  # an optional package

        number = id(item.work)
        if number not in self._references:
            self._references[number] = ray.put(item.work)
        return self._references[number]

    def release(self, item: Item) -> None:
        """An item is finished."""
        self._uses[id(item.work)] -= 1
        if not self._uses[id(item.work)]:
            self._references.pop(id(item.work), None)


def _connect(address: str) -> None:
    """Start Ray or join a cluster; what has been started ends with this process."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"this needs Ray: {install('ray')}")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray  # an optional package

    if ray.is_initialized():
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host:
            socket.create_connection((host, int(port)), PATIENCE).close()
        ray.init(
            address=address or "local",
            include_dashboard=False if not address else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (OSError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(f"Ray at {address or 'this machine'} does not answer: {text}") from error
