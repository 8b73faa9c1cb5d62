"""Items of work whose values are kept, so a command that was ended continues with what is missing.

They are computed in this process, in several (`coca_lab.processes`) or on Ray (`coca_lab.cluster`);
the process that starts the work, the driver, alone writes the store. Work that follows from other
work, such as measuring a model that is yet to be trained, is a `Job`.
"""

import importlib
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from contextlib import closing
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


Outcomes = Generator[tuple[Item, Any, float], None, None]
"""Items with their values, or an exception, and the seconds that they took."""
Step = tuple[Sequence[Item], Progress]
"""Items whose values a job needs, and what hears how far they are."""
Job = Generator[Step, None, None]
"""Work in steps.

It goes on when the store has all values of a step. If an item has failed, it gets a UserError once
the others are done.
"""


class _Waiting:
    """What a job waits for."""

    def __init__(self, job: Job, items: Sequence[Item], progress: Progress, store: Store) -> None:
        self.job, self.count, self.progress = job, len(items), progress
        self.costs = {as_text(key): x.cost / len(x.keys) for x in items for key in x.keys}
        self.left = {as_text(key) for x in items for key in x.keys if key not in store}
        self.total = sum(self.costs.values())
        self.done = self.total - sum(self.costs[name] for name in self.left)
        self.failed = list[tuple[Item, Exception]]()

    def tell(self, label: str = "") -> None:
        """Say how far it is."""
        line = f"{len(self.costs) - len(self.left):,} of {len(self.costs):,} values"
        line = f"{line}, {label}" if label else line
        self.progress(line, round(self.done), round(self.total))

    def end(self, item: Item, error: Exception | None) -> None:
        """Note that an item is done, or has failed."""
        ended = self.left.intersection(map(as_text, item.keys))
        self.left -= ended
        self.done += sum(self.costs[name] for name in ended)
        if error is None:
            self.tell(item.label)
        else:
            self.failed.append((item, error))

    @property
    def error(self) -> UserError | None:
        """The first failure, and how many there are."""
        if not self.failed:
            return None
        item, cause = self.failed[0]
        label = f"{item.label}: " if item.label else ""
        few = f" ({len(self.failed):,} of {self.count:,} items failed)" if self.count > 1 else ""
        error = UserError(f"{label}{problem(cause)}{few}")
        error.__cause__ = cause
        return error


class Engine:
    """Computes items in this process, one after the other, and keeps their values in a store."""

    def __init__(
        self, store: Store | None = None, progress: Progress = lambda line, done, total: None
    ) -> None:
        self.store = Store() if store is None else store
        self.progress = progress
        self.used: list[object] = []
        """Keys of all items that it was given."""

    def run(self, items: Sequence[Item]) -> list[Any]:
        """The values of all keys; once all is done, a UserError names the first that failed."""

        def job() -> Job:
            yield items, self.progress

        self.follow([job()])
        return [self.store.get(key) for item in items for key in item.keys]

    def follow(self, jobs: Iterable[Job]) -> None:
        """Compute what jobs ask for until all have ended; each key once, whoever asks for it.

        An item has failed with a UserError, or with any error the third time. What a job asks for
        as it goes on is computed before what others have asked for.
        """
        waiting, tries = dict[str, list[_Waiting]](), Counter[str]()
        queue = deque(item for job in jobs for item in self._begin(job, None, waiting))
        with closing(self._outcomes(queue)) as outcomes:
            for item, values, seconds in outcomes:
                error = values if isinstance(values, Exception) else None
                if not isinstance(values, Exception):
                    self.store.put(item.keys, values, seconds)
                elif not isinstance(values, UserError):
                    tries[as_text(item.keys)] += 1
                    if tries[as_text(item.keys)] < ATTEMPTS:
                        queue.append(item)
                        continue
                steps = [step for key in item.keys for step in waiting.pop(as_text(key))]
                following = list[Item]()
                for step in dict.fromkeys(steps):
                    step.end(item, error)
                    if not step.left:
                        following += self._begin(step.job, step.error, waiting)
                queue.extendleft(reversed(following))

    def _begin(
        self, job: Job, error: UserError | None, waiting: dict[str, list[_Waiting]]
    ) -> list[Item]:
        """What is to be computed for the next step of a job, if others do not wait for it."""
        while True:
            try:
                items, progress = next(job) if error is None else job.throw(error)
            except StopIteration:
                return []
            self.used += [key for item in items for key in item.keys]
            step, error = _Waiting(job, items, progress, self.store), None
            if items:
                step.tell()
            wanted, new = step.left - waiting.keys(), list[Item]()
            for item in items:
                new.append(item.part(wanted))
                wanted.difference_update(map(as_text, item.keys))
            for name in step.left:
                waiting.setdefault(name, []).append(step)
            if step.left:
                return [item for item in new if item.keys]

    def _outcomes(self, queue: deque[Item]) -> Outcomes:
        """Every item of a queue that grows."""
        while queue:
            item = queue.popleft()
            yield item, *compute(item.work, item.arguments)


def compute(work: Work, arguments: Sequence[object]) -> tuple[Any, float]:
    """The values, or an exception, and the seconds they took."""
    started = time.perf_counter()
    try:
        return work([*arguments]), time.perf_counter() - started
    except Exception as error:
        return error, 0.0


def compute_sent(work: bytes, arguments: Sequence[object]) -> tuple[Any, float]:
    """`compute` by work that was sent, as cloudpickle has it; a process keeps what it had last."""
    return compute(lambda each: _loaded(work)(each), arguments)


@lru_cache(maxsize=1)
def _loaded(work: bytes) -> Work:
    import_extensions()
    return cloudpickle.loads(work)  # which the driver alone sends, and no file has


def problem(error: Exception) -> str:
    """Why an item failed, in one line."""
    if isinstance(error, UserError):
        return str(error)
    text = " ".join(str(error).split())[:300]
    return known_problem(error) or f"unexpected {type(error).__name__}: {text}"
