"""Errors that the user can fix, and the words of their messages."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class UserError(ValueError):
    """An error that the user can fix: in a file, a setting or an argument.

    The message says what was expected, what was received, and what to do.
    """


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
