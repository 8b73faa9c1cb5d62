"""The exception that the command line reports in one line, with exit code 2."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class UserError(ValueError):
    """An error that the user can fix: in a file, a setting or an argument.

    The message says what was expected, what was received, and what to do.
    """


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of a message about an unknown word: the nearest known one.

    Args:
        word: What was given.
        known: What there is.
        otherwise: The end of the message if nothing is near.
    """
    near = get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else otherwise


@contextmanager
def error_prefix(prefix: str) -> Iterator[None]:
    """Put a prefix before the message of every UserError raised in the context.

    Args:
        prefix: What the error is about, such as ``"stage 'first': "``.
    """
    try:
        yield
    except UserError as error:
        raise type(error)(f"{prefix}{error}") from error
