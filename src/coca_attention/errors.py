"""The exception that the command line reports in one line, with exit code 2."""


class UserError(ValueError):
    """An error that the user can fix: in a file, a setting or an argument.

    The message says what was expected, what was received, and what to do.
    """
