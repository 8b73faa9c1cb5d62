"""An engine of several processes on this machine, and what a process says while it works."""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from coca_attention.errors import UserError
from coca_lab.engine import Engine, Item, Outcomes, compute_sent, problem
from coca_lab.files import plain_name
from coca_lab.store import Store

Listener = Callable[[str, str, float], object]
"""Called with the label of an item, what is done with it, and the share of it that is done."""
GRACE = 60.0
"""Seconds in which a process that has to end can save what it is training."""

_listener: Listener | None = None


def tell(label: str, text: str, share: float) -> None:
    """Say from inside an item how far it is; on Ray nobody listens."""
    if _listener is not None:
        _listener(label, text, share)


def listen(listener: Listener | None) -> None:
    """Choose who hears what is told in this process."""
    global _listener
    _listener = listener


class ProcessEngine(Engine):
    """Computes items in processes; one whose process is killed has failed.

    What processes print goes into a folder, by the labels of the items.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        processes: int,
        threads: int = 1,
        logs: Path | None = None,
    ) -> None:
        super().__init__(store)
        self.processes, self.options = processes, (threads, logs)

    def _outcomes(self, queue: deque[Item]) -> Outcomes:
        idle, busy = list[_Process](), dict[Any, tuple[_Process, Item]]()
        try:
            while queue or busy:
                while queue and len(busy) < self.processes:
                    process = idle.pop() if idle else _Process(*self.options)
                    item = queue.popleft()
                    process.send(item)
                    busy[process.connection] = process, item
                for ready in connection.wait([*busy]):
                    process, item = busy[ready]
                    try:
                        kind, *content = process.connection.recv()
                    except EOFError:
                        del busy[ready]
                        yield item, UserError(process.why_it_ended()), 0.0
                        continue
                    if kind == "part":
                        tell(*content)
                    else:
                        del busy[ready]
                        idle.append(process)
                        yield item, *content
        finally:
            for process, _ in busy.values():
                process.process.terminate()  # a training is saved first
            for process in [*idle, *(process for process, _ in busy.values())]:
                process.end()


class _Process:
    """A process that computes what comes through its connection."""

    def __init__(self, threads: int, logs: Path | None) -> None:
        context = get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, threads, logs))
        self.process.start()
        other.close()
        self.work: object = None

    def send(self, item: Item) -> None:
        """Let it compute an item; work that it had last, perhaps with long texts, it still has."""
        work = None if item.work is self.work else cloudpickle.dumps(item.work)
        self.work = item.work
        self.connection.send((work, item.arguments, item.label))

    def end(self) -> None:
        """Send nothing more, and wait until it has ended."""
        self.connection.close()
        self.process.join(GRACE)
        self.process.kill()
        self.process.join()

    def why_it_ended(self) -> str:
        """Why there is no answer from it."""
        self.process.join()
        code = self.process.exitcode
        killed = f" by signal {-code}, perhaps for lack of memory" if code and code < 0 else ""
        return (
            f"its process was ended{killed}: run the same command again to resume, if need be with "
            "fewer --workers"
        )


def _serve(pipe: Connection, threads: int, logs: Path | None) -> None:
    """Compute items until nothing more comes, or the process that sends them is gone."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("coca_lab").setLevel(logging.INFO)
    torch.set_num_threads(threads)
    listen(lambda *part: pipe.send(("part", *part)))
    work = b""
    try:
        while True:
            sent, arguments, label = pipe.recv()
            work = sent or work
            if logs is not None:
                _log_to(logs / f"{plain_name(label)}.log")
            values, seconds = compute_sent(work, arguments)
            if isinstance(values, Exception):  # perhaps one that cannot be pickled
                values = UserError(problem(values))
            pipe.send(("done", values, seconds))
    except (EOFError, KeyboardInterrupt):
        pass


def _log_to(path: Path) -> None:
    """Append what this process prints to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def _end_with_parent() -> None:
    """When the parent has been killed, nothing more may be written into its folders."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
