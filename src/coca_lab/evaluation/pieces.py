"""Pieces of work that any number of processes share through a folder.

The processes never wait for one another in a collective operation: a piece is claimed by a lock on
one byte of a file, which the system releases when its process ends, however it ends.
"""

import atexit
import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from coca_attention.errors import UserError
from coca_lab.environment import file_locks
from coca_lab.evaluation.journal import Journal, key_text

Progress = Callable[[str, int, int], Any]
"""Called with a label, the work done so far and the work in all."""

PIECE_TOKENS = 65_536
"""Tokens that a piece reads at most, if one text has fewer: what a killed process can lose."""
POLL = 0.5
"""Seconds between two looks at what other processes have finished."""


@dataclass(frozen=True)
class Piece:
    """Work that one process does without interruption.

    Attributes:
        label: The cell that it is part of, for progress.
        keys: Journal keys of its values.
        cost: Tokens to read.
        length: Tokens that are read at once.
        model: The name of the model that reads them, in a suite.
        compute: From the indices of the keys whose values are missing, and a function to be called
            with the tokens read since its last call, to the values. They do not depend on which
            others are missing.
    """

    label: str
    keys: list[Any]
    cost: int
    length: int
    compute: Callable[[list[int], Callable[[int], Any]], list[Any]]
    model: str = ""

    @cached_property
    def texts(self) -> list[str]:
        """The keys as the journal writes them."""
        return [key_text(key) for key in self.keys]

    def missing(self, journal: Journal) -> list[int]:
        """Indices of the keys that the journal does not have."""
        return [index for index, text in enumerate(self.texts) if not journal.has(text)]


class Claims:
    """Which piece this process works on, known to all processes that see a lock file.

    Args:
        path: The lock file; each piece is a byte of it.
        alone: Whether this process was started alone: it then also runs where files cannot be
            locked.
    """

    def __init__(self, path: Path, alone: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.alone = path, alone
        self.file = open(path, "a+b")  # noqa: SIM115 (closing it would release the locks)

    def take(self, key: str) -> bool:
        """Claim what a key stands for; False if another process has it.

        Raises:
            UserError: If the folder's file system has no locks and there are other processes.
        """
        try:
            locks = file_locks()
            locks.lockf(self.file, locks.LOCK_EX | locks.LOCK_NB, 1, _byte(key))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            if not self.alone:
                raise UserError(
                    f"{self.path}: files cannot be locked here ({error.strerror}), so processes "
                    "cannot share work: choose an --output on another file system, or start one "
                    "process"
                ) from error
        return True

    def release(self, key: str) -> None:
        """Give a claim back."""
        try:
            locks = file_locks()
            locks.lockf(self.file, locks.LOCK_UN, 1, _byte(key))
        except OSError:
            if not self.alone:
                raise

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Claim what a key stands for in the ``with`` block, after waiting until it is free."""
        while not self.take(key):
            time.sleep(POLL)
        try:
            yield
        finally:
            self.release(key)

    def close(self) -> None:
        """Give everything back."""
        self.file.close()


def _byte(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 2


def work(
    pieces: Sequence[Piece],
    journal: Journal,
    progress: Progress = lambda label, done, total: None,
    claims: Claims | None = None,
    *,
    wait: bool = True,
) -> None:
    """Compute pieces until the journal has them all.

    Args:
        pieces: Those that cost most come first.
        journal: Where their values go.
        progress: Called with a label, and the tokens read so far and in all, by all processes.
        claims: Shared with other processes; by default this one is alone.
        wait: Whether to wait for the pieces that other processes work on, and to take over those
            of processes that end without finishing them; if not, return when nothing is free.
    """
    journal.refresh()
    total = sum(piece.cost for piece in pieces)
    left = [piece for piece in pieces if piece.missing(journal)]
    done, counted = total - sum(piece.cost for piece in left), time.monotonic()
    for label in {piece.label: None for piece in pieces if not piece.missing(journal)}:
        progress(label, done, total)
    while left:
        worked = False
        for piece in left:
            claim = piece.texts[0]
            if not piece.missing(journal) or (claims and not claims.take(claim)):
                continue
            try:
                journal.refresh()
                if missing := piece.missing(journal):
                    # What others have done is counted now and then: it takes a look at every piece.
                    if time.monotonic() - counted > POLL:
                        done = total - sum(p.cost for p in left if p.missing(journal))
                        counted = time.monotonic()
                    _compute(piece, missing, journal, done, total, progress)
                    done += piece.cost
                    worked = True
            finally:
                if claims:
                    claims.release(claim)
        journal.refresh()
        left = [piece for piece in left if piece.missing(journal)]
        if left and not worked:
            if not wait:
                return
            time.sleep(POLL)


def _compute(
    piece: Piece, missing: list[int], journal: Journal, done: int, total: int, progress: Progress
) -> None:
    started, read = time.perf_counter(), 0

    def advance(tokens: int) -> None:
        nonlocal read
        read += tokens
        progress(piece.label, done + min(read, piece.cost), total)

    values = piece.compute(missing, advance)
    keys = [piece.keys[index] for index in missing]
    journal.put_all([*zip(keys, values, strict=True)], time.perf_counter() - started)
    progress(piece.label, done + piece.cost, total)


def cut(costs: Sequence[int], most: int = PIECE_TOKENS) -> list[slice]:
    """Consecutive slices of at most ``most`` tokens together, or of one item.

    Args:
        costs: Tokens of every item.
        most: Tokens of a slice.
    """
    slices, start, tokens = [], 0, 0
    for index, cost in enumerate(costs):
        if index > start and tokens + cost > most:
            slices.append(slice(start, index))
            start, tokens = index, 0
        tokens += cost
    return [*slices, slice(start, len(costs))]


def rank() -> int:
    """The number of this process among those of a launch by torchrun or Accelerate."""
    return int(os.environ.get("RANK", 0))


def processes() -> int:
    """The number of processes of the launch, on all machines."""
    return int(os.environ.get("WORLD_SIZE", 1))


def local_device(device: str | None) -> str | None:
    """The accelerator of this process among those of its machine, where a launch has several.

    Args:
        device: As for `load_model`; one with a number, and the CPU, are returned as they are.

    Raises:
        UserError: If several processes of a machine are to use all of its accelerators.
    """
    import torch

    if device == "auto" and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1:
        raise UserError(
            "device auto uses all accelerators of a machine: start one process on each machine"
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if processes() == 1 or accelerator is None or device not in (None, accelerator.type):
        return device
    number = int(os.environ.get("LOCAL_RANK", 0)) % torch.accelerator.device_count()
    return f"{accelerator.type}:{number}"


def join(path: Path) -> Journal:
    """The journal of processes that make the same calls, each with a part of the model or text.

    The first process reads and writes the file; the others begin with its values in memory, so
    that all miss the same pieces.

    Args:
        path: The file.

    Raises:
        UserError: If this is no launch of several processes.
    """
    import torch.distributed as dist

    if processes() == 1:
        raise UserError(
            "a model or text in parts needs several processes: torchrun --nproc-per-node N -m "
            "coca_lab.cli eval …"
        )
    launch_group()
    journal = Journal(path if rank() == 0 else None)
    values = [journal.values]
    dist.broadcast_object_list(values)
    journal.values = values[0]
    return journal


def launch_group() -> Any:
    """The group of all processes of a launch, for collective operations; None in one process."""
    import torch.distributed as dist

    if processes() > 1 and not dist.is_initialized():
        dist.init_process_group()
        atexit.register(dist.destroy_process_group)
    return dist.group.WORLD
