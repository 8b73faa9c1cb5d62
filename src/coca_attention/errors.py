"""The exception that the command line reports in one line, with exit code 2."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """An error that the user can fix: in a file, a setting or an argument.

    The message says what was expected, what was received, and what to do.
    """


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
