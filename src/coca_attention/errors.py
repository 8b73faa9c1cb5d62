"""What the command line reports in one line: errors of the user, with exit code 2, and signals."""

import errno
import os
import re
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class UserError(ValueError):
    """An error that the user can fix: in a file, a setting or an argument.

    The message says what was expected, what was received, and what to do.
    """


class Interrupted(KeyboardInterrupt):
    """A signal has ended the work and determines the exit code; the message says what is saved."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.signal = number


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of a message about an unknown word: the nearest known one, or ``otherwise``."""
    near = get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else otherwise


def install(extra: str = "") -> str:
    """How to install this package, which no package index has, with an extra: a command line."""
    tree = f"'PATH/TO/coca-attention[{extra}]'" if extra else "PATH/TO/coca-attention"
    return f"pip install {tree}  # its source tree"


@contextmanager
def error_prefix(prefix: str) -> Iterator[None]:
    """Put what it is about before the message of every UserError raised in the context."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{prefix}{error}") from error


# In the messages of PyTorch's file writer, which reports a full disk as a RuntimeError.
WRITER = "inline_container|PytorchStreamWriter|iostream error"
RESUMABLE = "free disk space, then run the same command again; what is done is kept"
"""What `known_problem` advises where a later start can go on."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def known_problem(error: BaseException) -> str | None:
    """One line for an exception whose cause lies outside the program, or None."""
    # Full disks, missing permissions and a lack of memory come as many types: OSError, MemoryError,
    # and from PyTorch, safetensors and tokenizers as RuntimeError or a plain Exception with a text.
    text = " ".join(str(error).split())[:300]
    if isinstance(error, MemoryError) or re.search(r"out of memory|can't allocate memory", text):
        return (
            f"there is not enough memory ({text or 'MemoryError'}): use smaller batches, shorter "
            "texts or a smaller model"
        )
    number = error.errno if isinstance(error, OSError) else None
    if found := re.search(r"os error (\d+)", text):  # Rust's wording
        number = int(found[1])
    if number is None:
        if not re.search(WRITER, text):
            return None
        return f"a file cannot be written ({text}): {RESUMABLE}"
    path = getattr(error, "filename", None)
    where = f"{os.fsdecode(path)}: " if isinstance(path, str | bytes | os.PathLike) else ""
    reason = f"{where}{os.strerror(number)}"
    if number in FULL:
        return f"{reason}: {RESUMABLE}"
    if number in FORBIDDEN:
        return f"{reason}: choose another folder, or change its permissions"
    return f"{reason}: check the path and run the command again"
