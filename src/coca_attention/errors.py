"""The one exception that the command line turns into a single line and exit code 2."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Something outside the program is wrong: a file, a setting, an argument.

    The message says what was expected, what came, and what to do.
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
