"""Items of work whose values are kept, so a command that was ended continues with what is missing.

An engine is a store and an executor of ``concurrent.futures``: in this process, in several
(`coca_lab.processes`) or on Ray (`coca_lab.cluster`). The process that starts the work, the driver,
alone writes the store.
"""

import importlib
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, replace
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

    def part(self, wanted: Container[str]) -> Self:
        """What is wanted of it, by keys as text."""
        pairs = zip(self.keys, self.arguments, strict=True)
        kept = [(key, argument) for key, argument in pairs if as_text(key) in wanted]
        return replace(self, keys=[key for key, _ in kept], arguments=[x for _, x in kept])


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

    def hear(self) -> None:
        """Pass on what processes `tell`."""


Listener = Callable[[str, str, float], object]
"""Called with the label of an item, what is done with it, and the share of it that is done."""
_listener: Listener | None = None


def tell(label: str, text: str, share: float) -> None:
    """Say from inside an item how far it is; on Ray nobody listens."""
    if _listener is not None:
        _listener(label, text, share)


def listen(listener: Listener | None) -> None:
    """Choose who hears what is told in this process."""
    global _listener
    _listener = listener


class Job:
    """Items, and what follows once all of them have ended."""

    def __init__(
        self,
        items: Sequence[Item],
        then: "Callable[[UserError | None], Iterable[Job]]" = lambda error: (),
        progress: Progress = lambda line, done, total: None,
    ) -> None:
        """Describe a job.

        Args:
            items: What to compute, unless the store has it.
            then: Called when all items have ended, with the first failure, if any; what it returns
                is computed before what others have asked for.
            progress: Hears how far the items are.
        """
        self.items = items
        self.then = then
        self.progress = progress
        self.costs = {as_text(key): x.cost / len(x.keys) for x in items for key in x.keys}
        self.total = sum(self.costs.values())
        self.done = 0.0
        self.left = set[str]()
        self.failed = list[tuple[Item, Exception]]()

    def begin(self, store: Store) -> None:
        """Note which values are missing."""
        self.left = {as_text(key) for x in self.items for key in x.keys if key not in store}
        self.done = self.total - sum(self.costs[name] for name in self.left)
        if self.items:
            self._tell()

    def end(self, item: Item, error: Exception | None) -> None:
        """Note that an item is done, or has failed."""
        ended = self.left.intersection(map(as_text, item.keys))
        self.left -= ended
        self.done += sum(self.costs[name] for name in ended)
        if error is None:
            self._tell(item.label)
        else:
            self.failed.append((item, error))

    def _tell(self, label: str = "") -> None:
        line = f"{len(self.costs) - len(self.left):,} of {len(self.costs):,} values"
        line = f"{line}, {label}" if label else line
        self.progress(line, round(self.done), round(self.total))

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


class Engine:
    """Computes items, by default in this process, and keeps their values in a store."""

    def __init__(
        self,
        store: Store | None = None,
        progress: Progress = lambda line, done, total: None,
        executor: ItemExecutor | None = None,
    ) -> None:
        self.store = Store() if store is None else store
        self.progress = progress
        self.executor = executor or ItemExecutor()
        self.used: list[object] = []
        """Keys of all items that it was given."""
        self._queue = deque[Item]()
        self._waiting = dict[str, list[Job]]()  # by the keys of values that they wait for
        self._tries = Counter[str]()

    def run(self, items: Sequence[Item]) -> list[Any]:
        """The values of all keys; once all is done, a UserError names the first that failed."""
        job = Job(items, progress=self.progress)
        self.follow([job])
        if job.error is not None:
            raise job.error
        return [self.store.get(key) for item in items for key in item.keys]

    def follow(self, jobs: Iterable[Job]) -> None:
        """Compute jobs and what follows from them; each key once, whoever asks for it.

        An item has failed with a UserError, or the third time with any error or a process that was
        killed; the others continue. A store that cannot be written ends all.
        """
        running = dict[Future[Outcome], Item]()
        self._queue.clear()
        self._waiting.clear()
        self._tries.clear()
        try:
            self._begin(jobs)
            while self._queue or running:
                slots = self.executor.slots
                while self._queue and len(running) < slots:
                    item = self._queue.popleft()
                    running[self._submitted(item)] = item
                done, _ = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
                self.executor.hear()
                for future in done:
                    self._end(running.pop(future), future)
        except BaseException:
            self.executor.shutdown(cancel_futures=True)  # what is trained is saved first
            raise

    def _begin(self, jobs: Iterable[Job]) -> None:
        """Put what is missing for jobs before the queue, unless others wait for it, too."""
        new, left = list[Item](), deque(jobs)
        while left:
            job = left.popleft()
            self.used += [key for item in job.items for key in item.keys]
            job.begin(self.store)
            wanted = job.left - self._waiting.keys()
            for item in job.items:
                part = item.part(wanted)
                wanted.difference_update(map(as_text, part.keys))
                if part.keys:
                    new.append(part)
            for name in job.left:
                self._waiting.setdefault(name, []).append(job)
            if not job.left:
                left.extendleft(reversed([*job.then(job.error)]))
        self._queue.extendleft(reversed(new))

    def _submitted(self, item: Item) -> Future[Outcome]:
        try:
            return self.executor.submit(item.work, item.arguments, label=item.label)
        except Exception as error:  # work that cannot be pickled, or no process could be started
            failed = Future[Outcome]()
            failed.set_exception(error)
            return failed

    def _end(self, item: Item, future: Future[Outcome]) -> None:
        """Keep the values of an item, or try it again; begin what follows."""
        try:
            values, seconds = future.result()
        except Exception as broken:  # the process was killed, or its answer could not be read
            values, seconds = broken, 0.0
        error = values if isinstance(values, Exception) else None
        if not isinstance(values, Exception):
            try:
                self.store.put(item.keys, values, seconds)
            except UserError:  # a full disk, for example
                raise
            except (ValueError, TypeError, AssertionError) as unfit:  # NaN, for example
                error = ItemError(f"its values cannot be kept: {unfit}")
        if error is not None and not isinstance(error, UserError):
            name = as_text(item.keys)
            self._tries[name] += 1
            if self._tries[name] < ATTEMPTS:
                self._queue.append(item)
                return
        jobs = [job for key in item.keys for job in self._waiting.pop(as_text(key))]
        ended = list[Job]()
        for job in dict.fromkeys(jobs):
            job.end(item, error)
            if not job.left:
                ended.append(job)
        self._begin([following for job in ended for following in job.then(job.error)])


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
