"""An executor of several processes on this machine."""

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from coca_attention.errors import UserError
from coca_lab.engine import GRACE, ItemExecutor, Outcome, Work, compute_sent
from coca_lab.files import plain_name


@dataclass
class Workers(ItemExecutor):
    """Processes, of which each computes one item at a time; they start as they are needed.

    Each is a `ProcessPoolExecutor` of its own. A pool of several ends all of its processes when one
    is killed, and so would interrupt the trainings of the others and count as a try of theirs.

    Attributes:
        count: How many there are at most.
        threads: Threads of each.
        logs: Folder with a file for each label of an item, for what is printed.
    """

    count: int
    threads: int = 1
    logs: Path | None = None
    _workers: "list[_Worker]" = field(default_factory=list, init=False)

    @property
    def slots(self) -> int:
        return self.count

    def submit(self, fn: Work, /, arguments: Sequence[object], label: str = "") -> Future[Outcome]:
        work = cloudpickle.dumps(fn)
        log = None if self.logs is None else self.logs / f"{plain_name(label)}.log"
        for worker in [each for each in self._workers if each.future.done()]:
            with suppress(BrokenProcessPool):  # it was killed
                return worker.submit(work, arguments, log)
            self._workers.remove(worker)
            worker.end()
        worker = _Worker(self.threads)
        self._workers.append(worker)  # before Ctrl-C can be raised
        return worker.submit(work, arguments, log)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes, with ``cancel_futures`` also those that compute, within `GRACE`."""
        if cancel_futures:
            for worker in self._workers:
                worker.end()
        for worker in self._workers:
            worker.pool.shutdown(wait)
        self._workers.clear()


class _Worker:
    """A process, which ends when this one closes the connection to it, or is killed."""

    def __init__(self, threads: int) -> None:
        self.pipe, its_end = connection.Pipe()
        self.pool = ProcessPoolExecutor(
            1, get_context("spawn"), initializer=_begin, initargs=(its_end, threads)
        )
        self.future = Future[Outcome]()

    def submit(self, work: bytes, arguments: Sequence[object], log: Path | None) -> Future[Outcome]:
        """Let it compute."""
        # The terminal sends Ctrl-C to the process, too, which this one ends. It inherits what is
        # blocked, so that nothing is interrupted while it imports torch, with a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self.future = self.pool.submit(_compute, work, arguments, log)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # The pool keeps the end of its results open that the process writes to. A process that is
        # killed within a result of more than 64 kB, what a pipe holds, would then never be missed:
        # the pool's thread would wait for the rest (seen with Python 3.11 to 3.13).
        results: Any = self.pool._result_queue  # pyright: ignore[reportPrivateUsage]
        results._writer.close()
        return self.future

    def end(self) -> None:
        """End the process, which waits for this in `_end_with_driver`."""
        self.pipe.close()


# In a process


def _begin(driver: Connection, threads: int) -> None:
    """Prepare a process for its items."""
    threading.Thread(target=_end_with_driver, args=(driver,), daemon=True).start()
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("coca_lab").setLevel(logging.INFO)
    torch.set_num_threads(threads)


def _end_with_driver(driver: Connection) -> None:
    """Wait until the driver has closed the connection or was killed, and end this process."""
    connection.wait([driver])
    os.kill(os.getpid(), signal.SIGTERM)  # a training is saved first
    time.sleep(GRACE)
    os._exit(1)


def _compute(work: bytes, arguments: Sequence[object], log: Path | None) -> Outcome:
    """Do the work that was sent, with its output in a log."""
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    try:
        values, seconds = compute_sent(work, arguments)
    except KeyboardInterrupt:  # a signal has ended a training, which is saved
        sys.stdout.flush()
        os._exit(1)
    if isinstance(values, Exception) and not isinstance(values, UserError):
        traceback.print_exception(values)
    return values, seconds
