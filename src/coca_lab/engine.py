"""Items of work whose values are kept, so a command that was ended continues with what is missing.

An engine is a store and an executor of ``concurrent.futures``: in this process, in several
(`coca_lab.processes`) or on Ray (`coca_lab.cluster`). The process that starts the work, the driver,
alone writes the store.
"""

import importlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Self

import cloudpickle

from coca_attention.errors import UserError
from coca_lab.files import known_problem
from coca_lab.store import Store, as_text

Progress = Callable[[str, int, int], object]
"""Called with a line of text, the work done so far and the work in all."""

EXTENSIONS = "COCA_IMPORT"
"""The environment variable with the names of the user's own modules, separated by commas."""
ATTEMPTS = 3
"""How often an item is computed before it has failed."""
GRACE = 60.0
"""Seconds in which a process that has to end can save what it is training."""


def import_extensions() -> None:
    """Import the user's own modules, for what they register; every process begins with it."""
    for name in filter(None, os.environ.get(EXTENSIONS, "").split(",")):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise UserError(
                f"{EXTENSIONS}={name}: {error}; install it, or set PYTHONPATH to its folder"
            ) from error


Work = Callable[[list[Any]], list[Any]]
"""From the arguments of the keys whose values are missing to these values, none of them None."""


@dataclass(frozen=True)
class Item:
    """Work that one process does without interruption."""

    keys: Sequence[object]  # of its values in the store: JSON that says what the values depend on
    work: Work  # items with the same object share what it holds; closures can be sent, too
    arguments: Sequence[object]  # one for each key
    cost: int = 1  # tokens to read
    label: str = ""  # what it is part of, for messages

    def missing(self, store: Store) -> Self:
        """What a store lacks of it."""
        pairs = zip(self.keys, self.arguments, strict=True)
        left = [(key, argument) for key, argument in pairs if key not in store]
        return replace(self, keys=[key for key, _ in left], arguments=[x for _, x in left])


Outcome = tuple[list[Any] | Exception, float]
"""The values of an item, or why there are none, and the seconds that they took."""


def compute(work: Work, arguments: Sequence[object]) -> Outcome:
    """Do the work of an item."""
    started = time.perf_counter()
    try:
        return work([*arguments]), time.perf_counter() - started
    except Exception as error:
        return error, 0.0
    except SystemExit as error:  # which would end the command, perhaps as if all were done
        return ItemError(f"it called sys.exit({error.code})"), 0.0


class ItemError(Exception):
    """What went wrong with an item in another process, in one line."""


def compute_sent(work: bytes, arguments: Sequence[object]) -> Outcome:
    """`compute` by work that was sent, as cloudpickle has it; a process keeps what it had last."""
    values, seconds = compute(lambda each: _loaded(work)(each), arguments)
    if isinstance(values, Exception):  # perhaps one that cannot be pickled
        kind = UserError if isinstance(values, UserError) else ItemError
        values = kind(problem(values)).with_traceback(values.__traceback__)
    return values, seconds


@lru_cache(maxsize=1)
def _loaded(work: bytes) -> Work:
    import_extensions()
    return cloudpickle.loads(work)  # which the driver alone sends, and no file has


class ItemExecutor(Executor):
    """Computes items where they are submitted: in this process, one after the other."""

    @property
    def slots(self) -> int:
        """How many items to submit before the first has ended."""
        return 1

    def submit(self, fn: Work, /, arguments: Sequence[object], label: str = "") -> Future[Outcome]:
        """What `compute` returns, where there is a process to return it."""
        future = Future[Outcome]()
        future.set_result(compute(fn, arguments))
        return future


@dataclass
class Job:
    """Items, and what follows once all of them have ended.

    Attributes:
        items: What to compute, unless the store has it.
        then: Called when all items have ended, with the first failure, if any; what it returns is
            computed before what others have asked for.
        progress: Hears how far the items are.
    """

    items: Sequence[Item]
    then: "Callable[[UserError | None], Iterable[Job]]" = lambda error: ()
    progress: Progress = lambda line, done, total: None
    ended: int = field(default=0, init=False)  # items that are done, or have failed
    done: int = field(default=0, init=False)  # their cost
    failed: list[tuple[Item, Exception]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        once = {as_text(item.keys): item for item in self.items}  # methods share some
        self.items = [*once.values()]
        self.total = sum(item.cost for item in self.items)

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to do."""
        return self.ended == len(self.items)

    def end(self, item: Item) -> None:
        """Count an item that has ended."""
        self.ended += 1
        self.done += item.cost

    def tell(self, label: str = "") -> None:
        """Say how far it is, and what is read now."""
        # Not that of the items, some of which cost a hundred times as much as others.
        share = self.done / max(self.total, 1)
        line = f"{share:.0%} of {self.total:,} tokens"
        self.progress(f"{line}, {label}" if label else line, self.done, self.total)

    @property
    def error(self) -> UserError | None:
        """The first failure, and how many there are."""
        if not self.failed:
            return None
        item, cause = self.failed[0]
        label = f"{item.label}: " if item.label else ""
        count = len(self.items)
        few = f" ({len(self.failed):,} of {count:,} items failed)" if count > 1 else ""
        error = UserError(f"{label}{problem(cause)}{few}")
        error.__cause__ = cause
        return error


@dataclass
class _Attempt:
    """An item of a job, and how often it has been tried."""

    job: Job
    item: Item
    tries: int = 0


@dataclass
class Engine:
    """Computes items, by default in this process, and keeps their values in a store.

    Attributes:
        store: Has the values.
        progress: Hears how far `run` is.
        executor: Computes the items.
        used: Keys of all items that it was given.
    """

    store: Store = field(default_factory=Store)
    progress: Progress = lambda line, done, total: None
    executor: ItemExecutor = field(default_factory=ItemExecutor)
    used: list[object] = field(default_factory=list, init=False)

    def run(self, items: Sequence[Item]) -> list[Any]:
        """The values of all keys; once all is done, a UserError names the first that failed."""
        job = Job(items, progress=self.progress)
        self.follow([job])
        if job.error is not None:
            raise job.error
        return [self.store.get(key) for item in items for key in item.keys]

    def follow(self, jobs: Iterable[Job], meanwhile: Callable[[], object] = lambda: None) -> None:
        """Compute jobs and what follows from them.

        An item has failed with a UserError, or the third time with any error or a process that was
        killed; the others continue. A store that cannot be written ends all. ``meanwhile`` is
        called about every second.
        """
        queue = deque(self._begin(jobs))
        running = dict[Future[Outcome], _Attempt]()
        try:
            while queue or running:
                slots = self.executor.slots
                while queue and len(running) < slots:
                    attempt = queue.popleft()
                    attempt.item = attempt.item.missing(self.store)
                    if not attempt.item.keys:  # computed since for another job
                        queue.extendleft(reversed(self._end(attempt, None)))
                        continue
                    label = attempt.item.label
                    # Before, because a long text may take many minutes.
                    attempt.job.tell(f"now {label}" if label else "")
                    try:
                        future = self.executor.submit(
                            attempt.item.work, attempt.item.arguments, label=label
                        )
                    except Exception as error:  # it cannot be pickled, or no process could start
                        future = Future[Outcome]()
                        future.set_exception(error)
                    running[future] = attempt
                done, _ = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
                meanwhile()
                for future in done:
                    attempt = running.pop(future)
                    error = self._keep(attempt.item, future)
                    attempt.tries += 1
                    is_final = error is None or isinstance(error, UserError)
                    if not is_final and attempt.tries < ATTEMPTS:
                        queue.append(attempt)
                    else:
                        queue.extendleft(reversed(self._end(attempt, error)))
        except BaseException:
            self.executor.shutdown(cancel_futures=True)  # what is trained is saved first
            raise

    def _begin(self, jobs: Iterable[Job]) -> list[_Attempt]:
        """What is missing for jobs; what follows from one that has all comes in its place."""
        attempts = list[_Attempt]()
        for job in jobs:
            for item in job.items:
                self.used += item.keys
                if item.missing(self.store).keys:
                    attempts.append(_Attempt(job, item))
                else:
                    job.end(item)
            if job.done:
                job.tell("from an earlier run")
            if job.has_ended:
                attempts += self._begin(job.then(None))
        return attempts

    def _keep(self, item: Item, future: Future[Outcome]) -> Exception | None:
        """Keep the values of an item; why that cannot be done."""
        try:
            values, seconds = future.result()
        except Exception as broken:  # the process was killed, or its answer could not be read
            return broken
        if isinstance(values, Exception):
            return values
        try:
            self.store.put(item.keys, values, seconds)
        except UserError:  # a full disk, for example
            raise
        except (ValueError, TypeError, AssertionError) as unfit:  # NaN, for example
            return ItemError(f"its values cannot be kept: {unfit}")
        return None

    def _end(self, attempt: _Attempt, error: Exception | None) -> list[_Attempt]:
        """Note that an item is done, or has failed; what follows if it was the last of its job."""
        job = attempt.job
        job.end(attempt.item)
        if error is None:
            job.tell()
        else:
            job.failed.append((attempt.item, error))
        return self._begin(job.then(job.error)) if job.has_ended else []


def problem(error: BaseException) -> str:
    """Why an item failed, in one line."""
    if isinstance(error, UserError | ItemError):
        return str(error)
    if isinstance(error, BrokenExecutor):
        return (
            f"its process was ended {ATTEMPTS} times, perhaps for lack of memory: run the same "
            "command again to resume, if need be with fewer --workers"
        )
    text = " ".join(str(error).split())[:300]
    return known_problem(error) or f"unexpected {type(error).__name__}: {text}"
